"""Small files of /proc and /sys, any of which a container may hide."""

from __future__ import annotations

import re
from pathlib import Path


def read_lines(path: Path) -> list[str]:
    """The lines of a small file; none if it cannot be read."""
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def read_number(path: Path) -> int | None:
    """The integer that a file holds; None if it holds something else or cannot be read."""
    lines = read_lines(path)
    return int(lines[0]) if lines and re.fullmatch(r"-?\d+\s*", lines[0]) else None


def unescape(path: str) -> str:
    """A path of mountinfo, where space, tab, newline and backslash are octal."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), path)
