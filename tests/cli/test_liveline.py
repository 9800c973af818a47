"""The live line, as a terminal shows it; pyte is the terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest
from program import ROOT

COLUMNS, ROWS = 40, 8
WORDS = [
    "The quick brown fox jumps over the lazy dog, ",
    "and over the wide 鸟 of a hummingbird",
    ", again and again.\n",
    "\n",
    "- a list\n- of points\n",
    "x" * 3 * COLUMNS,
    "to the\tedge",
    " and on, 鸟" * 30,
]


def shown(texts: list[str], height: int, tmp_path: Path, line: str) -> tuple[list[str], list[str]]:
    """What a terminal shows before the line goes, and after."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from colibri_mmap.cli.liveline import LiveLine\n"
        f"with LiveLine(lambda: {line!r}, refresh_seconds=0.0) as live:\n"
        f"    for text in {texts!r}: live.write(text)\n"
        "    sys.stdout.write('\\x00'); sys.stdout.flush()\n"
    )
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (height, COLUMNS))
    inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=theirs,
        cwd=tmp_path,
        env={**inherited, "PYTHONPATH": str(ROOT), "TERM": "xterm", "PYTHONUTF8": "1"},
    )
    os.close(theirs)
    output = b""
    while True:
        try:
            output += os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
    os.close(ours)
    assert process.wait(60) == 0
    screen = pyte.Screen(COLUMNS, height)
    stream = pyte.ByteStream(screen)
    before, _, after = output.partition(b"\x00")
    stream.feed(before)
    during = [row.rstrip() for row in screen.display]
    stream.feed(after)
    return during, [row.rstrip() for row in screen.display]


@pytest.mark.parametrize("height", [ROWS, 30])
@pytest.mark.parametrize("count", range(1, len(WORDS) + 1))
def test_it_is_below_the_text_and_leaves_nothing(tmp_path: Path, height: int, count: int) -> None:
    """On a screen that scrolls and on one that is tall enough."""
    during, after = shown(WORDS[:count], height, tmp_path, "7.8 tok/s")
    plain = pyte.Screen(COLUMNS, height)
    stream = pyte.Stream(plain)
    for text in WORDS[:count]:
        stream.feed(text.replace("\n", "\r\n"))
        if plain.cursor.x < COLUMNS:
            stream.feed("\x1bD\x1bM")  # there is a line below, as with the live line
    assert after == [row.rstrip() for row in plain.display]
    at = plain.cursor.y + 1
    if plain.cursor.x == COLUMNS:  # the cursor is behind the last column
        assert during == after
    else:
        assert during[at] == "7.8 tok/s"
        assert [*during[:at], "", *during[at + 1 :]] == after


def test_a_long_line_is_cut(tmp_path: Path) -> None:
    during, _ = shown(["Hi"], ROWS, tmp_path, "n" * 100)
    assert during[:3] == ["Hi", "n" * (COLUMNS - 1), ""]


def test_a_pipe_gets_the_text_alone() -> None:
    code = (
        "from colibri_mmap.cli.liveline import LiveLine\n"
        "with LiveLine(lambda: 'numbers', refresh_seconds=0.0) as live: live.write('text')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert done.stdout == b"text"
