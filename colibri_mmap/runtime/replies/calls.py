"""The tool calls of one reply: their numbers, their names, and the types of their arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from colibri_mmap.runtime.replies.pieces import ToolCallArguments, ToolCallStart
from colibri_mmap.runtime.replies.reader import Parsing, Reader

Tool = Mapping[str, Any]  # as in OpenAI's API, with or without the outer {"type", "function"}

_AS_JSON = {"True": "true", "False": "false", "None": "null"}  # what models write who think Python


def function_of(tool: Tool) -> Mapping[str, Any]:
    """Name, description and parameters of a tool."""
    function = tool.get("function", tool)
    return function if isinstance(function, Mapping) else tool


class Calls:
    """Numbers the calls of one reply and knows the tools that it may call."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._parameters = {
            str(function.get("name")): function.get("parameters")
            for function in map(function_of, tools)
        }
        self.count = 0

    def __bool__(self) -> bool:
        """Whether there is a tool that can be called."""
        return bool(self._parameters)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._parameters

    def start(self, name: str, given_id: str | None = None) -> ToolCallStart:
        """The beginning of the next call."""
        self.count += 1
        return ToolCallStart(self.count - 1, name, given_id)

    def arguments(self, text: str) -> ToolCallArguments:
        """A part of the arguments of the call that was started last."""
        return ToolCallArguments(self.count - 1, text)

    def schema(self, name: str, key: str) -> Mapping[str, Any]:
        """What the tool `name` says about its parameter `key`; empty if nothing."""
        parameters = self._parameters.get(name)
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        return schema if isinstance(schema, Mapping) else {}


def types_of(schema: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that `schema` allows, as far as it says; empty if it does not."""
    stated = schema.get("type")
    if isinstance(stated, str):
        return frozenset((stated,))
    if isinstance(stated, list):
        return frozenset(str(name) for name in stated)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            each = [types_of(branch) for branch in branches if isinstance(branch, Mapping)]
            known = len(each) == len(branches) and all(each)
            return frozenset().union(*each) if known else frozenset()
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset(map(_type_name, values))
    return frozenset()


def typed(text: str, types: frozenset[str]) -> str:
    """The argument written as `text`, as JSON of one of `types`; a string if it is none of them."""
    plain = text.strip()
    plain = _AS_JSON.get(plain, plain)
    try:
        value = json.loads(plain, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    name = _type_name(value)
    fits = not types or name in types or (name == "integer" and "number" in types)
    if name == "string" and "string" in types:
        fits = False  # a string that is written without quotes, and has some
    return plain if fits or "string" not in types else json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _type_name(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


class JsonScan:
    """Finds the end of one JSON object or array that comes in parts; `depth`: of brackets open."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int | None:
        """The length of the part of `text` that still belongs to it; None: all, and it goes on."""
        for position, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif character == '"':
                self._in_string = not self._in_string
            elif self._in_string:
                self._escaped = character == "\\"
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return position + 1
        return None


def stream_json(reader: Reader, calls: Calls) -> Parsing[None]:
    """Pass on the JSON object that comes next as arguments of the last call."""
    scan = JsonScan()
    while True:
        length = scan.feed(reader.text)
        yield calls.arguments(reader.take(len(reader.text) if length is None else length))
        if length is not None or reader.ended:
            return
        yield None
