"""Tool calls that are a Python list of calls: [name(key="value", other=1), ...]."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from colibri_mmap.runtime.replies.calls import Calls, Tool
from colibri_mmap.runtime.replies.reader import Asking, Parsing, Reader
from colibri_mmap.runtime.replies.rules import Rules

_BEGINNING = re.compile(r"\s*(?:\[\s*(?:[A-Za-z_][\w.]*(?P<call>\()|[^\s\w]|\w+[^\w.(])|[^\s\[])")


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """`opening`, the list, `closing`; `bare`: a reply may also begin with the list."""

    opening: str
    closing: str
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

        `known`: only a tool that exists can be called. The list is read as a whole.
        """
        beginning = yield from reader.match(_BEGINNING, len(opening))
        if beginning is None or not beginning["call"]:
            return False
        end = yield from _end_of_list(reader, len(opening))
        found = [] if end is None else _calls_in(reader.text[len(opening) : end])
        if end is None or not found or (known and any(name not in calls for name, _ in found)):
            return False
        reader.take(end)
        for name, arguments in found:
            yield calls.start(name)
            yield calls.arguments(arguments)
        if self.closing:
            yield from reader.skip(self.closing)
        return True

    def rules(self, rules: Rules, tools: Sequence[Tool], several: bool) -> str | None:
        """None: Python values have no JSON schema."""
        return None


def _end_of_list(reader: Reader, after: int) -> Asking[int | None]:
    """Where the list ends that begins `after` so many characters; None if it does not."""
    depth, quote, escaped = 0, "", False
    position = after
    while True:
        while position < len(reader.text):
            character = reader.text[position]
            position += 1
            if escaped:
                escaped = False
            elif quote:
                escaped = character == "\\"
                quote = "" if character == quote else quote
            elif character in "'\"":
                quote = character
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
                if depth <= 0:
                    return position
        if reader.ended:
            return None
        yield None


def _calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments, as JSON, of the calls in a list; empty if it is something else."""
    try:
        listed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(listed, ast.List):
            return []
        return [_named_arguments(call) for call in listed.elts]
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return []


def _named_arguments(call: ast.expr) -> tuple[str, str]:
    if not isinstance(call, ast.Call) or call.args:
        raise ValueError("not a call with named arguments")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}
    if None in arguments:
        raise ValueError("** in a call")
    return ast.unparse(call.func), json.dumps(arguments, ensure_ascii=False)
