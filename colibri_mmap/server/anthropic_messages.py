"""Anthropic's messages and tools as chat templates take them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from .anthropic_schemas import Block, Message, Prompting, Tool
from .messages import schema_form, template_call
from .problems import refuse
from .prompts import Conversation


def conversation(body: Prompting) -> Conversation:
    """What the template and the model get of a request."""
    choice, form = body.tool_choice, body.output_config.format
    tools = [] if choice.type == "none" else body.tools
    if choice.type == "tool":
        tools = [tool for tool in tools if tool.name == choice.name]
    names = {b.id: b.name for m in body.messages for b in m.content if b.type == "tool_use"}
    messages = list(_system(body.system))
    for number, message in enumerate(body.messages):
        messages += _template_messages(message, names, f"messages[{number}].content")
    hints: dict[str, Any] = {}
    if body.thinking is not None:
        hints["enable_thinking"] = body.thinking.type != "disabled"
    if body.output_config.effort:
        hints["reasoning_effort"] = body.output_config.effort
    return Conversation(
        messages=messages,
        tools=[_template_tool(tool) for tool in tools],
        hints=hints,
        form=None if form is None else schema_form("output_config.format", form.schema_),
        must_call=choice.type in ("any", "tool"),
        several=not choice.disable_parallel_tool_use,
    )


def _system(blocks: Sequence[Block]) -> Iterator[dict[str, Any]]:
    if blocks:
        yield {"role": "system", "content": _text(blocks, "system")}


def _template_messages(
    message: Message, names: dict[str, str], field: str
) -> Iterator[dict[str, Any]]:
    """One message, or a user's as the answers of tools and what the user says besides."""
    blocks = message.content
    kinds = [block.type for block in blocks]
    if message.role == "assistant":
        yield _assistant(blocks, field)
        return
    for block in blocks:
        if block.type == "tool_result":
            answer = _text(block.content, f"{field}.content")
            answer = f"Error: {answer}" if block.is_error else answer
            name = names.get(block.tool_use_id, "")
            named = {"name": name} if name else {}
            yield {"role": "tool", "content": answer, "tool_call_id": block.tool_use_id, **named}
    said = [block for block in blocks if block.type != "tool_result"]
    if said or "tool_result" not in kinds:
        yield {"role": message.role, "content": _text(said, field)}


def _assistant(blocks: Sequence[Block], field: str) -> dict[str, Any]:
    calls = [
        template_call(block.id, block.name, block.input)
        for block in blocks
        if block.type == "tool_use"
    ]
    thoughts = "\n".join(block.thinking for block in blocks if block.type == "thinking")
    said = [block for block in blocks if block.type not in ("tool_use", "thinking")]
    result: dict[str, Any] = {"role": "assistant", "content": _text(said, field)}
    if thoughts:
        result["reasoning_content"] = thoughts
    if calls:
        result["tool_calls"] = calls
    return result


def _text(blocks: Sequence[Block], field: str) -> str:
    """The text of blocks that have to be text here."""
    for number, block in enumerate(blocks):
        if block.type != "text":
            raise refuse(f"{field}[{number}].type", f"{block.type} does not belong here")
    return "\n".join(block.text for block in blocks)


def _template_tool(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, which templates expect."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}
