"""Where a command prints: results to stdout, everything about them to stderr."""

from __future__ import annotations

import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Literal

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

SHOW_AFTER_SECONDS = 0.5

# What a terminal may be sent from a model or a file: no escape sequences, no carriage returns.
_CONTROL_CHARACTERS = {
    code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def results() -> Console:
    """Standard output; a pipe gets lines of any length."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console


def messages() -> Console:
    """Standard error: progress, notices, statistics."""
    return Console(stderr=True, highlight=False, soft_wrap=True)


def printable(text: str) -> str:
    """`text` without the control characters that could drive a terminal."""
    return text.translate(_CONTROL_CHARACTERS)


@contextmanager
def silent_keyboard() -> Iterator[None]:
    """Keep what is typed meanwhile, ^C too, out of the text; the next prompt still receives it."""
    if not sys.stdin.isatty():
        yield
        return
    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    silent = [*before]
    silent[3] &= ~termios.ECHO
    termios.tcsetattr(keyboard, termios.TCSADRAIN, silent)
    try:
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A bar on a terminal's stderr that appears only when the work outlasts half a second.

    Called as `bar(stage, done, total)` (total 0: not known). With `announce`, a stderr that is no
    terminal gets one line for each stage.
    """

    def __init__(
        self, unit: Literal["bytes", "items"] = "items", *, announce: bool = False
    ) -> None:
        self._console = messages()
        columns: tuple[ProgressColumn, ...] = (MofNCompleteColumn(), TimeElapsedColumn())
        if unit == "bytes":
            columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            *columns,
            console=self._console,
            transient=True,
        )
        self._announce = announce
        self._stage: str | None = None
        self._task = self._progress.add_task("", total=None, visible=False)
        self._timer = threading.Timer(SHOW_AFTER_SECONDS, self._progress.start)
        self._timer.daemon = True

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Report that `done` of `total` of `stage` are finished."""
        if stage != self._stage:
            self._begin(stage)
        self._progress.update(self._task, completed=done, total=total or None)

    def _begin(self, stage: str) -> None:
        first, self._stage = self._stage is None, stage
        if self._console.is_interactive:
            self._progress.remove_task(self._task)
            self._task = self._progress.add_task(stage, total=None)
            if first:
                self._timer.start()
        elif self._announce:
            self._console.print(f"{stage} ...", markup=False)

    def stop(self) -> None:
        """Erase the bar; more calls have no effect on the terminal."""
        self._timer.cancel()
        if self._timer.ident is not None:
            self._timer.join()
            self._progress.stop()

    def __exit__(self, *_: object) -> None:
        self.stop()
