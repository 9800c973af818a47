"""The bodies of Anthropic's Messages API; a field that is not listed here is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from .fields import MOST_STOPS, Body, Temperature, unsupported, wrong


class CacheControl(Body):
    """A wish that a prefix is kept: prefixes are kept without."""

    type: Literal["ephemeral"]
    ttl: str = ""
    scope: str = ""


class Block(Body):
    """A part of a message: the fields of all kinds that this server reads, by `type`."""

    type: str
    cache_control: CacheControl | None = None
    text: str = ""  # text
    citations: list[Any] = Field(default=[])
    id: str = ""  # tool_use
    name: str = ""
    input: dict[str, Any] = Field(default={})
    tool_use_id: str = ""  # tool_result
    content: Blocks = Field(default=[])
    is_error: bool = False
    thinking: str = ""  # thinking
    signature: str = ""
    caller: dict[str, Any] = Field(default={})

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_known_type(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in _NEEDED:
            raise unsupported(f"blocks of type {kind!r} are not supported; text is", "type")
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> Block:
        for field in _NEEDED[self.type]:
            if field not in self.model_fields_set:
                raise wrong(f"a block of type {self.type} needs it", field)
        return self


_NEEDED = {
    "text": ("text",),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
    "thinking": ("thinking",),
}


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


_BLOCK_SCHEMA = {"type": "object", "properties": {"type": {"enum": list(_NEEDED)}}}
Blocks = Annotated[
    list[Block],
    BeforeValidator(_blocks),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK_SCHEMA}]}),
]


class Message(Body):
    role: Literal["user", "assistant", "system"]
    content: Blocks


class Tool(Body):
    """A tool that the client runs; what Anthropic's servers run is refused by its type."""

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    input_schema: dict[str, Any]
    cache_control: CacheControl | None = None
    strict: bool = False
    eager_input_streaming: bool = False
    defer_loading: Literal[False] = False


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False  # how many calls a reply has is up to the model


class Thinking(Body):
    """Whether a model thinks is its template's affair; what it may spend on it cannot be said."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int = 0
    display: str = ""


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    format: OutputFormat | None = None
    effort: str = ""


class Prompting(Body):
    """What a prompt is made of."""

    model: str = ""
    messages: Annotated[list[Message], Field(min_length=1)]
    system: Blocks = Field(default=[])
    tools: list[Tool] = Field(default=[])
    tool_choice: ToolChoice = ToolChoice()
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def _tools_fit(self) -> Prompting:
        choice = self.tool_choice
        if choice.type in ("any", "tool") and not self.tools:
            raise wrong("asks for a tool, and tools has none", "tool_choice")
        if choice.type == "tool" and choice.name not in [tool.name for tool in self.tools]:
            raise wrong("names a tool that tools does not have", "tool_choice")
        return self


class CountBody(Prompting):
    """POST /v1/messages/count_tokens"""


class MessagesBody(Prompting):
    """POST /v1/messages"""

    max_tokens: Annotated[int, Field(ge=1)]
    stream: bool = False
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(
        default=[], max_length=MOST_STOPS
    )
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    metadata: dict[str, Any] = Field(default={})  # whom a reply is for is of no interest here
    context_management: dict[str, Any] = Field(default={})  # what may be dropped: nothing is
    service_tier: str = ""
