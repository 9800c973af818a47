"""Where the program keeps what it learns: small files in $XDG_STATE_HOME/colibri-mmap.

The default is ~/.local/state. Files are replaced as a whole, so that neither an interruption nor
another process leaves a damaged one.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def state_directory(name: str) -> Path:
    """The directory of one kind of state; a relative XDG_STATE_HOME is invalid and ignored."""
    home = Path(os.environ.get("XDG_STATE_HOME", ""))
    base = home if home.is_absolute() else Path.home() / ".local/state"
    return base / "colibri-mmap" / name


def kernel_directory() -> Path:
    """Where compiled kernels are kept: in $XDG_CACHE_HOME, by default ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "colibri-mmap" / "kernels"


def replace_file(path: Path, content: str | bytes) -> None:
    """Write under a temporary name beside `path`, then take its place; OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.stem}.")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
