"""`cache`: what the program keeps on this machine besides pulled models, and clearing it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from colibri_mmap.errors import ColibriError

MODELS = (
    "pulled models are kept elsewhere: `colibri-mmap list` shows, `colibri-mmap rm` deletes them"
)


class Kind(StrEnum):
    """What is kept, by the name under which it is shown and cleared."""

    KERNELS = "kernels"
    USAGE = "usage"
    PROFILES = "profiles"
    SESSIONS = "sessions"
    DEMO = "demo"


cache = typer.Typer(
    help="Show or clear what is kept here: kernels, counts, profiles, sessions, the demo model.",
    invoke_without_command=True,
)


@dataclass(frozen=True, slots=True)
class Kept:
    """One kind of kept files: what they are for, and their directory.

    With `names`, other files are in it too.
    """

    kind: Kind
    directory: Path
    purpose: str
    names: tuple[str, ...] = ()

    @property
    def files(self) -> list[Path]:
        """The files that there are, at any depth."""
        paths = (
            map(self.directory.joinpath, self.names) if self.names else self.directory.rglob("*")
        )
        return [path for path in paths if path.is_file()]

    def delete(self) -> None:
        """Delete them, and a directory of their own."""
        try:
            if not self.names:
                shutil.rmtree(self.directory)
            for path in self.files:
                path.unlink(missing_ok=True)
        except FileNotFoundError:
            return
        except OSError as error:
            raise ColibriError(f"{error.filename}: cannot be deleted ({error.strerror})") from error


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

    KIND is kernels, usage, profiles, sessions or demo. Sessions are only deleted when they are
    named.
    """
    from colibri_mmap.cli.console import results
    from colibri_mmap.quantities import byte_size

    chosen = set(kinds or set(Kind) - {Kind.SESSIONS})
    for kept in _kinds():
        if kept.kind not in chosen:
            continue
        files = kept.files
        freed = sum(path.stat().st_size for path in files)
        kept.delete()
        results().print(f"{kept.kind}: {byte_size(freed)} freed", markup=False)


def _kinds() -> list[Kept]:
    from colibri_mmap.demo.model import DENSE_NAME, MOE_NAME, PACKED_NAME
    from colibri_mmap.runtime.state import kernel_directory, state_directory

    demo = (DENSE_NAME, MOE_NAME, PACKED_NAME)
    return [
        Kept(Kind.KERNELS, kernel_directory(), "compiled for this processor and its GPU"),
        Kept(Kind.USAGE, state_directory("usage"), "how often the experts of models were used"),
        Kept(Kind.PROFILES, state_directory("profiles"), "what tune found out"),
        Kept(Kind.SESSIONS, state_directory("sessions"), "conversations that were kept"),
        Kept(Kind.DEMO, kernel_directory().parent, "the demo model, and what it was made of", demo),
    ]
