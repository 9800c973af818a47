"""The numbers so far, in the line below a reply that is being written to a terminal."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from rich.cells import cell_len

APPEARS_AFTER_SECONDS = 1.0  # a reply that is quick needs no line
_REFRESH_SECONDS = 0.5

_MAKE_LINE_BELOW = "\x1bD\x1bM"  # down, which scrolls at the bottom, and up again
_SAVE_AND_GO_BELOW, _GO_BACK = "\x1b7\x1b[B\r\x1b[2K", "\x1b8"
_DIM, _NORMAL = "\x1b[2m", "\x1b[0m"


class LiveLine(AbstractContextManager["LiveLine"]):
    """Writes text to stdout, and below it what `describe` says; nothing of that remains at the end.

    Where stdout is no terminal it only writes the text.
    """

    def __init__(self, describe: Callable[[], str], refresh_seconds: float | None = None) -> None:
        """`refresh_seconds` replaces both the delay of the line and the time between changes."""
        given = refresh_seconds
        self._delay = APPEARS_AFTER_SECONDS if given is None else given
        self._refresh = _REFRESH_SECONDS if given is None else given
        self._describe = describe
        self._active = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._first = self._changed = 0.0
        self._text = ""
        self._column = 0  # of the cursor
        self._drawn = False

    def write(self, text: str, dim: bool = False) -> None:
        """Print a piece of the reply at once; `dim` is for terminals."""
        output = self._erasure() + (f"{_DIM}{text}{_NORMAL}" if dim and self._active else text)
        self._drawn = False
        if self._active:
            now = time.monotonic()
            self._first = self._first or now
            if now - max(self._changed, self._first + self._delay - self._refresh) >= self._refresh:
                self._text, self._changed = self._describe(), now
            columns = shutil.get_terminal_size().columns
            self._column = _column_after(text, self._column, columns)
            # Behind the last column the cursor is in a state that few terminals save.
            if self._text and self._column < columns:
                line = f"{_DIM}{self._text[: columns - 1]}{_NORMAL}"
                output += _MAKE_LINE_BELOW + _SAVE_AND_GO_BELOW + line + _GO_BACK
                self._drawn = True
        sys.stdout.write(output)
        sys.stdout.flush()

    def _erasure(self) -> str:
        return _SAVE_AND_GO_BELOW + _GO_BACK if self._drawn else ""

    def __exit__(self, *_: object) -> None:
        if self._drawn:
            sys.stdout.write(self._erasure())
            sys.stdout.flush()
            self._drawn = False


def _column_after(text: str, column: int, columns: int) -> int:
    """Where the cursor is after printing text from a column on; `columns` is behind the last."""
    for character in text:
        if character == "\n":
            column = 0
        elif character == "\t":
            column = min((column // 8 + 1) * 8, columns - 1)
        else:
            width = cell_len(character)
            column = column + width if column + width <= columns else width
    return column
