"""Tool calls whose arguments are written one by one between tags."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from colibri_mmap.runtime.replies.calls import Calls, Tool, function_of, typed, types_of
from colibri_mmap.runtime.replies.reader import Asking, Markers, Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules, parameters_of, property_schema

_STRING = frozenset(("string",))


@dataclass(frozen=True, slots=True)
class XmlCalls:
    """`section`, then calls of `head`, any number of parameters and `end`, then `section_end`.

    A parameter is `parameter`, the value and `parameter_end`; `lines`: a value has lines of its
    own. `head` and `parameter` are patterns, with the groups `name` and `key`, and perhaps
    `string`, which says "true" of strings. Without a `begin`, a section is one call. The forms are
    how the model was taught to write: one call, what is around all {calls}, and one parameter.
    """

    section: str
    begin: str
    head: str
    parameter: str
    parameter_end: str
    end: str
    section_end: str
    form: str
    calls_form: str
    parameter_form: str
    lines: bool = False
    markup: tuple[str, ...] = ()
    bare: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """What such calls begin with; a section may be missing."""
        return tuple(dict.fromkeys(filter(None, (self.section, self.begin))))

    def parse(self, reader: Reader, opening: str, calls: Calls, known: bool) -> Parsing[bool]:
        """The calls that come next, behind `opening`; False, and nothing taken, if it is none.

        `known`: only a tool that exists can be called.
        """
        after = len(opening) if opening == self.section else 0
        head = yield from self._next(reader, after)
        if head is None or (known and head["name"] not in calls):
            return False
        reader.take(after)
        while head is not None:
            reader.take(head.end())
            yield calls.start(head["name"])
            yield from self._arguments(reader, calls, head["name"])
            head = (yield from self._next(reader, 0)) if self.begin else None
        if self.section_end:
            yield from reader.skip(self.section_end)
        return True

    def _next(self, reader: Reader, after: int) -> Asking[re.Match[str] | None]:
        """What a call begins with, if one comes next."""
        if not (yield from reader.comes(self.begin, after=after)):
            return None
        return (yield from reader.match(re.compile(rf"\s*{self.head}"), after))

    def _arguments(self, reader: Reader, calls: Calls, name: str) -> Parsing[None]:
        """Parameters up to the end of the call, as one JSON object."""
        pattern = re.compile(rf"\s*(?:{self.parameter}|(?P<end>{re.escape(self.end)}))")
        keys = 0
        while (found := (yield from reader.match(pattern))) is not None and not found["end"]:
            reader.take(found.end())
            key = found["key"].strip()
            yield calls.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys += 1
            types = types_of(calls.schema(name, key))
            marked = found.groupdict().get("string")
            if marked is not None:
                types = _STRING if marked == "true" else types - _STRING
            if types == _STRING:
                yield calls.arguments('"')
                complete = yield from self._string(reader, calls)
                text = '"' if complete else ""
            else:
                value = yield from self._whole(reader)
                complete = value is not None
                text = "" if value is None else typed(value, types)
            yield calls.arguments(text)
            if not complete:
                return
        if found is not None:
            reader.take(found.end())
        elif reader.ended:
            return
        yield calls.arguments("}" if keys else "{}")

    def _string(self, reader: Reader, calls: Calls) -> Parsing[bool]:
        """Pass a value on as the inside of a JSON string; whether it was complete."""
        values = self._value(reader)
        while True:
            try:
                part = next(values)
            except StopIteration as stop:
                return bool(stop.value)
            if part is None:
                yield None
            else:
                yield calls.arguments(json.dumps(part, ensure_ascii=False)[1:-1])

    def _whole(self, reader: Reader) -> Asking[str | None]:
        """A complete value; None if the text ends within it."""
        values = self._value(reader)
        parts: list[str] = []
        while True:
            try:
                part = next(values)
            except StopIteration as stop:
                return "".join(parts) if stop.value else None
            if part is None:
                yield None
            else:
                parts.append(part)

    def _value(self, reader: Reader) -> Generator[str | None, None, bool]:
        """The parts of a value, up to and with its end; whether it was complete."""
        marker = Markers((self.parameter_end,))
        while self.lines and not reader.text and not reader.ended:
            yield None
        if self.lines and reader.text.startswith("\n"):
            reader.take(1)
        while True:
            found = marker.find(reader.text)
            sure = found.start() if found else marker.beginning(reader.text)
            last_line = self.lines and reader.text[:sure].endswith("\n")
            if last_line and (found or not reader.ended):
                sure -= 1
            if sure:
                yield reader.take(sure)
            if found:
                reader.take(len(self.parameter_end) + (1 if last_line else 0))
                return True
            if reader.ended:
                yield reader.take(len(reader.text))
                return False
            yield None

    def rules(self, rules: Rules, tools: Sequence[Tool], several: bool) -> str:
        """The rule of a call of one of the tools, or of several calls."""
        each = []
        for number, function in enumerate(map(function_of, tools)):
            parameters = self._parameter_rules(rules, number, parameters_of(function))
            name = rules.literal(function["name"])
            body = rules.fill(self.form, name=name, parameters=parameters)
            each.append(rules.add(f"call{number}", body))
        call = rules.add("call", " | ".join(each))
        return rules.add("calls", rules.fill(self.calls_form, calls=rules.some(call, several)))

    def _parameter_rules(self, rules: Rules, number: int, parameters: Mapping[str, Any]) -> str:
        """All parameters of a tool, in the schema's order."""
        properties = parameters.get("properties")
        each = []
        for index, key in enumerate(properties if isinstance(properties, Mapping) else ()):
            schema = property_schema(parameters, key)
            start, _, end = self.parameter_form.partition("{value}")
            name = f"value{number}_{index}"
            is_string = types_of(schema) == _STRING
            if is_string:
                value = self._string_rule(rules, name, schema, end)
            else:
                value = f"{rules.json(name, schema)} {rules.literal(end)}"
            marked = rules.literal("true" if is_string else "false")
            head = rules.fill(start, key=rules.literal(key), string=marked)
            rule = rules.add(f"parameter{number}_{index}", f"{head} {value}")
            each.append(rule if key in parameters.get("required", ()) else f"{rule}?")
        return " ".join(each) or '""'

    def _string_rule(self, rules: Rules, name: str, schema: Mapping[str, Any], end: str) -> str:
        """A string, which is written as it is, and the end of its parameter."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if values:
            each = " | ".join(rules.literal(str(value)) for value in values)
            return f"{rules.add(name, each)} {rules.literal(end)}"
        return rules.any_text(name, end)
