"""Tool calls with the name in front of a JSON object, between markers of their own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from colibri_mmap.runtime.replies.calls import Calls, Tool, function_of, stream_json
from colibri_mmap.runtime.replies.reader import Asking, Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules, parameters_of


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """`section`, then calls of `begin`, `head`, a JSON object and `ends`, then `section_end`.

    `head` is a pattern for what stands before the object; its groups are `name` and perhaps `id`.
    `form` is a call as the model was taught to write it, `calls_form` what is around all {calls}.
    `markup`: all markers that stand in it.
    """

    section: str
    begin: str
    head: str
    ends: tuple[str, ...]
    section_end: str
    form: str
    calls_form: str
    markup: tuple[str, ...]
    bare: bool = False

    @property
    def openings(self) -> tuple[str, ...]:
        """What such calls begin with; a section may be missing."""
        return tuple(dict.fromkeys((self.section or self.begin, self.begin)))

    def parse(self, reader: Reader, opening: str, calls: Calls, known: bool) -> Parsing[bool]:
        """The calls that come next, behind `opening`; False, and nothing taken, if it is none.

        `known`: only a tool that exists can be called.
        """
        after = 0 if opening == self.begin else len(opening)
        head = yield from self._next(reader, after)
        if head is None or (known and head["name"] not in calls):
            return False
        reader.take(after)
        while head is not None:
            reader.take(head.end())
            yield calls.start(head["name"], head.groupdict().get("id"))
            yield from stream_json(reader, calls)
            for literal in self.ends:
                yield from reader.skip(literal)
            head = yield from self._next(reader, 0)
        if self.section_end:
            yield from reader.skip(self.section_end)
        return True

    def rules(self, rules: Rules, tools: Sequence[Tool], several: bool) -> str:
        """The rule of a call of one of the tools, or of several calls."""
        each = []
        for number, function in enumerate(map(function_of, tools)):
            arguments = rules.json(f"arguments{number}", parameters_of(function))
            name = rules.literal(function["name"])
            values = {"name": name, "index": "/[0-9]{1,3}/", "arguments": arguments}
            each.append(rules.add(f"call{number}", rules.fill(self.form, **values)))
        call = rules.add("call", " | ".join(each))
        return rules.add("calls", rules.fill(self.calls_form, calls=rules.some(call, several)))

    def _next(self, reader: Reader, after: int) -> Asking[re.Match[str] | None]:
        """What a call begins with, up to its arguments, if one comes next."""
        if not (yield from reader.comes(self.begin, after=after)):
            return None
        whole = re.compile(rf"\s*{re.escape(self.begin)}{self.head}\s*(?=\{{)")
        return (yield from reader.match(whole, after))
