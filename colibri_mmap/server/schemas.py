"""The bodies of OpenAI's API, and of the endpoints for tokens."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from colibri_mmap.runtime.sampling import Sampling

from .fields import (
    Body,
    Penalty,
    Stops,
    Temperature,
    Text,
    sampling_of,
    unsupported,
    wrong,
)

MOST_CHOICES = 8  # replies that one request may ask for
MOST_ALTERNATIVES = 20


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False  # padding against eavesdroppers: there is none


class Generating(Body):
    """Fields of both endpoints: the model, how tokens are chosen, and how many."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_progress: bool = False  # while streaming: how far the prompt has been read
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stops = Field(default=[])
    seed: Annotated[int, Field(ge=-1, lt=2**63)] = -1  # -1: a new one
    temperature: Temperature | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0, -1: all tokens
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[
        Annotated[str, Field(pattern=r"^\d{1,9}$")], Annotated[float, Field(ge=-1000, le=1000)]
    ] = Field(default={})
    user: str = ""  # whom a reply is for is of no interest here

    def sampling(self, defaults: Sampling, choice: int = 0) -> Sampling:
        """How choice number `choice` is sampled; ArgumentError for a value that makes no sense."""
        return sampling_of(
            defaults,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repeat_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            seed=None if self.seed == -1 else self.seed + choice,
            stop=tuple(self.stop),
            logit_bias={int(token): bias for token, bias in self.logit_bias.items()},
        )


# ------------------------------------------------------------------------------ chat
class FunctionCall(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str = "{}"

    @property
    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are none."""
        try:
            value = json.loads(self.arguments or "{}")
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    @model_validator(mode="after")
    def _arguments_are_an_object(self) -> FunctionCall:
        if self.parsed is None:
            raise wrong("is not the JSON of an object", "arguments")
        return self


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int = 0  # of a streamed delta that a client sends back


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text = ""
    name: str = ""
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = Field(default=[])
    tool_call_id: str = ""
    refusal: str = ""  # parts of a reply of OpenAI's that say nothing to a model
    annotations: list[Any] = Field(default=[])

    @model_validator(mode="after")
    def _fits_its_role(self) -> Message:
        if self.role != "assistant" and (self.tool_calls or self.reasoning_content):
            raise wrong("belongs to an assistant's message", "tool_calls")
        if self.role == "tool" and not self.tool_call_id:
            raise wrong("a tool's message needs it", "tool_call_id")
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise wrong("the message has none", "content")
        return self


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    description: str = ""
    parameters: dict[str, Any] = Field(default={})
    strict: bool = False


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


def _tool_choice(value: Any) -> Any:
    return {"mode": value} if isinstance(value, str) else {"mode": "named", "tool": value}


class ToolChoice(Body):
    """`tool` is what a named choice names."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    tool: NamedTool | None = None


class JsonSchema(Body):
    name: str = ""
    description: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default={})
    strict: bool = False  # the reply fits the schema in any case


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise wrong("goes with the type json_schema, and with no other", "json_schema")
        return self


class ChatBody(Generating):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] = Field(default=[])
    tool_choice: Annotated[
        ToolChoice,
        BeforeValidator(_tool_choice),
        WithJsonSchema(
            {
                "anyOf": [
                    {"enum": ["none", "auto", "required"]},
                    {
                        "type": "object",
                        "properties": {
                            "type": {"const": "function"},
                            "function": {
                                "type": "object",
                                "properties": {"name": {"type": "string"}},
                                "required": ["name"],
                            },
                        },
                        "required": ["type", "function"],
                    },
                ]
            }
        ),
    ] = ToolChoice()
    response_format: ResponseFormat = ResponseFormat(type="text")
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] = 0
    chat_template_kwargs: dict[str, Any] = Field(default={})  # variables of the template
    reasoning_effort: str = ""  # another one
    metadata: dict[str, Any] = Field(default={})  # bookkeeping of OpenAI's
    store: bool = False
    service_tier: str = ""
    safety_identifier: str = ""
    prompt_cache_key: str = ""  # prefixes are found without
    prompt_cache_retention: str = ""
    parallel_tool_calls: bool = True  # imposed with the calls, else up to the model
    modalities: list[Literal["text"]] = Field(default=["text"])

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @model_validator(mode="after")
    def _tools_fit(self) -> ChatBody:
        if self.tool_choice.mode in ("required", "named") and not self.tools:
            raise wrong("asks for a tool, and tools has none", "tool_choice")
        named = self.tool_choice.tool
        if named and named.function.name not in [tool.function.name for tool in self.tools]:
            raise wrong("names a tool that tools does not have", "tool_choice")
        if self.top_logprobs and not self.logprobs:
            raise wrong("needs logprobs: true", "top_logprobs")
        return self


# ------------------------------------------------------------------------------ completions
def _prompts(value: Any) -> Any:
    """A text, a list of texts, ids, or a list of lists of ids, as a list of prompts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value and all(type(item) is int for item in value):
        return [value]
    return value


class CompletionBody(Generating):
    """POST /v1/completions"""

    prompt: Annotated[
        list[str | list[Annotated[int, Field(ge=0)]]],
        BeforeValidator(_prompts),
        Field(min_length=1, max_length=MOST_CHOICES),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}, "minItems": 1},
                    {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    {
                        "type": "array",
                        "minItems": 1,
                        "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
                    },
                ]
            }
        ),
    ]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    best_of: Literal[1] = 1

    @model_validator(mode="after")
    def _fits(self) -> CompletionBody:
        if self.echo and self.logprobs is not None:
            raise unsupported("the prompt's are not computed: leave out echo", "logprobs")
        if len(self.prompt) * self.n > MOST_CHOICES:
            raise unsupported(f"at most {MOST_CHOICES} replies: prompts times n", "prompt")
        return self


# ------------------------------------------------------------------------------ tokens
class TokenizeBody(Body):
    """POST /tokenize"""

    content: str
    model: str = ""
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeBody(Body):
    """POST /detokenize"""

    tokens: list[Annotated[int, Field(ge=0)]]
    model: str = ""
