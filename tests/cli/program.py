"""The command as people run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "colibri_mmap.cli"]

Colibri = Callable[..., subprocess.CompletedProcess[bytes]]


def environment(state: Path) -> dict[str, str]:
    """A person's environment, with a place of its own for what the program remembers."""
    ours = ("COLIBRI_", "COLUMNS")  # a size that is not the terminal's
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**kept, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), "TERM": "xterm"}
