"""The command line: parse, call, print; every command imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable
from inspect import cleandoc
from typing import Annotated

import typer

from colibri_mmap import __version__
from colibri_mmap.cli.bench import bench
from colibri_mmap.cli.cache import cache
from colibri_mmap.cli.chat import chat
from colibri_mmap.cli.doctor import doctor
from colibri_mmap.cli.inspect import inspect
from colibri_mmap.cli.models import list_models, rm
from colibri_mmap.cli.pack import pack, verify
from colibri_mmap.cli.plan import plan
from colibri_mmap.cli.pull import pull
from colibri_mmap.cli.serve import serve
from colibri_mmap.cli.tune import tune
from colibri_mmap.cli.warmup import warmup
from colibri_mmap.errors import ColibriError


def _paragraphs(command: Callable[..., None]) -> str:
    """Its docstring with each paragraph on one line, which the terminal breaks where it must."""
    text = cleandoc(command.__doc__ or "")
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


app = typer.Typer(
    help="Run Mixture-of-Experts language models straight from mapped GGUF files.",
    epilog="To begin: colibri-mmap chat --demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    *(chat, serve, pull, list_models, rm, pack, verify),
    *(inspect, plan, doctor, tune, bench, warmup),
):
    app.command(command.__name__.removesuffix("_models"), help=_paragraphs(command))(command)
app.add_typer(cache, name="cache")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"colibri-mmap {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            help="Show the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    """Run Mixture-of-Experts language models straight from mapped GGUF files."""


def main() -> None:
    """Run the program: status 1 for an error of the world, 2 for a wrong option, 130 for Ctrl-C."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a path may hold what the encoding cannot
            stream.reconfigure(errors="backslashreplace")
    try:
        app(prog_name="colibri-mmap")
    except (ColibriError, OSError, MemoryError) as error:
        if "--verbose" in sys.argv or os.environ.get("COLIBRI_DEBUG"):
            raise
        sys.exit(f"error: {_one_line(error)}")


def _one_line(error: Exception) -> str:
    """What went wrong, without the number in front of an OSError."""
    if isinstance(error, ColibriError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename is not None else ""
        return f"{place}{error.strerror}"
    return str(error) or "out of memory"
