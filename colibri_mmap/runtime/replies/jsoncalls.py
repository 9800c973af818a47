"""Tool calls that are JSON objects: {"name": ..., "arguments": {...}}, one or a list of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from colibri_mmap.runtime.replies.calls import Calls, JsonScan, Tool, function_of, stream_json
from colibri_mmap.runtime.replies.reader import Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules, call_schema

_LIST = re.compile(r"\s*(?:(?P<list>\[)|[^\s\[])")
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*"(?P<name>[^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_KEY = re.compile(r'\s*(?:[^\s{]|\{\s*(?:[^\s"]|"(?P<key>[^"]*)"))')
_KEYS = ("name", "arguments", "parameters", "type", "function", "id")
_NEXT = re.compile(r"\s*(?:(?P<more>[,;]\s*)(?=\{)|[^\s,;]|[,;]\s*[^\s{])")


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """`opening`, an object or a list of objects, `closing`.

    `bare`: a reply may also begin with calls that nothing introduces. `form` is how the model was
    taught to write, {calls} being the object, or the list if `listed`; `one`: never several.
    """

    opening: str
    closing: str
    form: str
    listed: bool = False
    one: bool = False
    parameters_key: str = "arguments"
    bare: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """What such calls begin with."""
        return (self.opening,)

    @property
    def markup(self) -> tuple[str, ...]:
        """The markers around calls."""
        return (self.opening, self.closing)

    def parse(self, reader: Reader, opening: str, calls: Calls, known: bool) -> Parsing[bool]:
        """The calls that come next, behind `opening`; False, and nothing taken, if it is none.

        `known`: only a tool that exists can be called.
        """
        begins = yield from reader.match(_LIST, len(opening))
        listed = begins is not None and begins["list"] is not None
        after = len(opening) + (begins.end() if begins and listed else 0)
        if not (yield from _call(reader, after, calls, known)):
            return False
        while (more := (yield from reader.match(_NEXT))) is not None and more["more"]:
            if not (yield from _call(reader, more.end(), calls, known)):
                return True
        if listed:
            yield from reader.skip("]")
        if self.closing:
            yield from reader.skip(self.closing)
        return True

    def rules(self, rules: Rules, tools: Sequence[Tool], several: bool) -> str:
        """The rule of a call of one of the tools, or of several calls."""
        schemas = [call_schema(function_of(tool), self.parameters_key) for tool in tools]
        each = [rules.json(f"call{number}", schema) for number, schema in enumerate(schemas)]
        call = rules.add("call", " | ".join(each))
        if self.listed:
            some = rules.some(call, several, '"," " "?')
            return rules.add("calls", rules.fill(self.form, calls=f'"[" {some} "]"'))
        wrapped = rules.add("wrapped", rules.fill(self.form, calls=call))
        return rules.add("calls", rules.some(wrapped, several and not self.one))


def _call(reader: Reader, after: int, calls: Calls, known: bool) -> Parsing[bool]:
    """The call that begins `after` so many characters; False, and nothing taken, if it is none."""
    scan, scanned = JsonScan(), after
    while (head := _HEAD.match(reader.text, after)) is None:
        key = _FIRST_KEY.match(reader.text, after)
        if key is not None and key["key"] not in _KEYS:
            return False
        length = scan.feed(reader.text[scanned:])
        if length is not None:
            return (yield from _whole_call(reader, after, scanned + length, calls, known))
        if reader.ended:
            return False
        scanned = len(reader.text)
        yield None
    if known and head["name"] not in calls:
        return False
    reader.take(head.end())
    yield calls.start(head["name"])
    yield from stream_json(reader, calls)
    rest = JsonScan(depth=1)  # what else the object has, such as an id, up to its end
    while (length := rest.feed(reader.text)) is None and not reader.ended:
        reader.text = ""
        yield None
    reader.take(length or 0)
    return True


def _whole_call(reader: Reader, after: int, end: int, calls: Calls, known: bool) -> Parsing[bool]:
    """A complete object whose members are in an unusual order or form."""
    named = _named_arguments(reader.text[after:end])
    if named is None or (known and named[0] not in calls):
        return False
    reader.take(end)
    yield calls.start(named[0])
    yield calls.arguments(named[1])
    return True


def _named_arguments(text: str) -> tuple[str, str] | None:
    """Name and arguments, as JSON, of the call that is `text`; None if it is no call."""
    try:
        value: Any = json.loads(text)
        if isinstance(value, dict) and isinstance(value.get("function"), dict):
            value = value["function"]
        name = value.get("name", value.get("function"))
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
    except (ValueError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return name, json.dumps(arguments, ensure_ascii=False)
