"""OpenAI's messages and tools as chat templates take them."""

from __future__ import annotations

from typing import Any

from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.grammar import Grammar

from .problems import refuse
from .prompts import Conversation
from .schemas import ChatBody, Message, ResponseFormat


def conversation(body: ChatBody) -> Conversation:
    """What the template and the model get of a request."""
    names = {call.id: call.function.name for m in body.messages for call in m.tool_calls}
    choice = body.tool_choice
    tools = [] if choice.mode == "none" else body.tools
    if choice.tool is not None:
        tools = [tool for tool in tools if tool.function.name == choice.tool.function.name]
    variables = {"chat_template_kwargs": body.chat_template_kwargs}
    if body.reasoning_effort:
        variables["reasoning_effort"] = {"reasoning_effort": body.reasoning_effort}
    return Conversation(
        messages=[_template_message(message, names) for message in body.messages],
        tools=[tool.model_dump(exclude_unset=True) for tool in tools],
        variables=variables,
        form=_form(body.response_format),
        must_call=choice.mode in ("required", "named"),
        several=body.parallel_tool_calls,
    )


def _template_message(message: Message, names: dict[str, str]) -> dict[str, Any]:
    """A message; "developer" is what newer models of OpenAI's call the system."""
    role = "system" if message.role == "developer" else message.role
    result: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning_content:
        result["reasoning_content"] = message.reasoning_content
    if message.tool_calls:
        result["tool_calls"] = [
            template_call(call.id, call.function.name, call.function.parsed or {})
            for call in message.tool_calls
        ]
    if message.role == "tool":
        result["tool_call_id"] = message.tool_call_id
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        result["name"] = name
    return result


def template_call(call_id: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as templates take it: its arguments are an object."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _form(wanted: ResponseFormat) -> tuple[str, Grammar] | None:
    if wanted.json_schema is not None:
        return schema_form("response_format", wanted.json_schema.schema_)
    return ("response_format", Grammar.json_object()) if wanted.type == "json_object" else None


def schema_form(field: str, schema: dict[str, Any]) -> tuple[str, Grammar]:
    """What a reply has to be that fits a schema; a 400 for one that cannot be imposed."""
    try:
        return field, Grammar.json_schema(schema)
    except ArgumentError as error:
        raise refuse(field, str(error), "unsupported_value") from error
