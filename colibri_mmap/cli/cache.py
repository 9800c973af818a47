"""`cache`: what the program keeps on this machine besides models, and clearing it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from colibri_mmap.errors import ColibriError

MODELS = "models are kept elsewhere: `colibri-mmap list` shows them, `colibri-mmap rm` deletes one"


class Kind(StrEnum):
    """What is kept, by the name of its directory."""

    KERNELS = "kernels"
    USAGE = "usage"
    PROFILES = "profiles"
    SESSIONS = "sessions"


cache = typer.Typer(
    help="Show or clear what is kept on this machine: kernels, counts, profiles, sessions.",
    invoke_without_command=True,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of kept files: the directory they are in, and what they are for."""

    kind: Kind
    directory: Path
    purpose: str

    @property
    def files(self) -> list[Path]:
        """The files in it, at any depth."""
        return [path for path in self.directory.rglob("*") if path.is_file()]


@cache.callback()
def show(context: typer.Context) -> None:
    """Show what is kept on this machine, and where."""
    if context.invoked_subcommand is not None:
        return
    from rich.table import Table

    from colibri_mmap.cli.console import messages, printable, results
    from colibri_mmap.quantities import byte_size

    table = Table.grid(padding=(0, 3))
    for kept in _kinds():
        files = kept.files
        size = byte_size(sum(path.stat().st_size for path in files)) if files else "empty"
        row = (kept.kind, size, kept.purpose, printable(str(kept.directory)))
        table.add_row(*row, style=None if files else "dim")
    results().print(table, soft_wrap=True)
    messages().print(MODELS, style="dim", markup=False)


@cache.command()
def clear(
    kinds: Annotated[
        list[Kind] | None, typer.Argument(metavar="KIND", help="What to clear (default: all).")
    ] = None,
) -> None:
    """Delete what is kept; it comes again by itself, except for saved sessions.

    KIND is kernels, usage, profiles or sessions. Sessions are only deleted when they are named.
    """
    from colibri_mmap.cli.console import results
    from colibri_mmap.quantities import byte_size

    chosen = set(kinds or set(Kind) - {Kind.SESSIONS})
    for kept in _kinds():
        if kept.kind not in chosen:
            continue
        files = kept.files
        freed = sum(path.stat().st_size for path in files)
        _delete(kept.directory)
        results().print(f"{kept.kind}: {byte_size(freed)} freed", markup=False)


def _kinds() -> list[Kept]:
    from colibri_mmap.runtime.state import kernel_directory, state_directory

    return [
        Kept(Kind.KERNELS, kernel_directory(), "compiled for this processor and its GPU"),
        Kept(Kind.USAGE, state_directory("usage"), "how often the experts of models were used"),
        Kept(Kind.PROFILES, state_directory("profiles"), "what tune found out"),
        Kept(Kind.SESSIONS, state_directory("sessions"), "conversations that were kept"),
    ]


def _delete(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise ColibriError(f"{error.filename}: cannot be deleted ({error.strerror})") from error
