"""Reading a reply that is still being written.

Parsers are generators over one `Reader`: they yield pieces, and None where what comes next depends
on text that has not come yet. No decision depends on how the text was cut into parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from colibri_mmap.runtime.replies.pieces import Piece

T = TypeVar("T")
Parsing = Generator[Piece | None, None, T]  # pieces, or None for "more text", and an outcome
Asking = Generator[None, None, T]  # no pieces

_LONGEST_HEAD = 400  # characters in which what begins a call has to be complete


class Markers:
    """Texts that are looked for together; none is part of another."""

    def __init__(self, texts: Sequence[str]) -> None:
        assert all(texts)
        assert not any(a != b and a in b for a in texts for b in texts)
        self._texts = tuple(texts)
        self._pattern = re.compile("|".join(map(re.escape, texts)) if texts else "(?!)")
        self._longest = max(map(len, texts), default=1) - 1

    def find(self, text: str) -> re.Match[str] | None:
        """The first of them in `text`."""
        return self._pattern.search(text)

    def beginning(self, text: str) -> int:
        """From where on `text` may be the beginning of one of them; its length: from nowhere."""
        for start in range(max(0, len(text) - self._longest), len(text)):
            if any(marker.startswith(text[start:]) for marker in self._texts):
                return start
        return len(text)


class Reader:
    """The text that has come and is not yet dealt with; `ended`: no more will come."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, length: int) -> str:
        """Remove the first `length` characters."""
        taken, self.text = self.text[:length], self.text[length:]
        return taken

    def until(self, markers: Markers, said: Callable[[str], Piece]) -> Parsing[str | None]:
        """Pass text on up to a marker and the white space before it, which is the outcome.

        The marker comes next then. None: the text ended without one.
        """
        while True:
            found = markers.find(self.text)
            sure = len(self.text)
            if found or not self.ended:
                sure = found.start() if found else markers.beginning(self.text)
                sure = len(self.text[:sure].rstrip())
            if sure:
                yield said(self.take(sure))
            if found:
                return self.take(found.start() - sure)
            if self.ended:
                return None
            yield None

    def skip_space(self) -> Asking[None]:
        """Drop white space."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.ended:
                return
            yield None

    def comes(self, *literals: str, after: int = 0) -> Asking[bool]:
        """Whether one of `literals` comes next, perhaps behind white space.

        `after`: the first characters to look beyond.
        """
        while True:
            ahead = self.text[after:].lstrip()
            if ahead.startswith(literals):
                return True
            if self.ended or not any(literal.startswith(ahead) for literal in literals):
                return False
            yield None

    def skip(self, literal: str) -> Asking[bool]:
        """Drop `literal` and white space before it, if they come next."""
        comes = yield from self.comes(literal)
        if comes:
            self.text = self.text.lstrip().removeprefix(literal)
        return comes

    def match(self, pattern: re.Pattern[str], after: int = 0) -> Asking[re.Match[str] | None]:
        """What `pattern` matches `after` so many characters; nothing is taken.

        What it matches must not depend on the text behind.
        """
        while True:
            found = pattern.match(self.text[after : after + _LONGEST_HEAD])
            if found or self.ended or len(self.text) >= after + _LONGEST_HEAD:
                return found
            yield None
