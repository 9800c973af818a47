"""`warmup`: compile the kernels ahead of the first run."""

from __future__ import annotations

from colibri_mmap.cli import options


def warmup(verbose: options.Verbose = False) -> None:
    """Compile the kernels for this CPU."""
