"""`list` and `rm`: the models that were pulled, by this program or another."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri_mmap.cli import options
from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.quantities import byte_size

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.runtime.modelstore import StoredModel

NOTHING = "no models here: `colibri-mmap pull owner/name` fetches one from the Hugging Face hub"


@dataclass(frozen=True, slots=True)
class Listed:
    """A model with what its header says; `problem` is why it does not run, if so."""

    model: StoredModel
    architecture: str | None
    problem: str | None


def list_models(as_json: options.AsJson = False, verbose: options.Verbose = False) -> None:
    """List the models that were pulled.

    All GGUF models in the cache of the Hugging Face hub (HF_HOME) are listed, whichever program
    fetched them. Every command takes the names.
    """
    from colibri_mmap.runtime.modelstore import find_models, hub_cache

    cache = hub_cache()
    models = [_listed(model) for model in find_models(cache)]
    if as_json:
        content = {"cache": str(cache), "models": [_as_dict(model) for model in models]}
        print(json.dumps(content, indent=2))
        return
    from colibri_mmap.cli.console import messages, results

    if models:
        results().print(_table(models))
    else:
        messages().print(NOTHING, markup=False)


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A model as `list` names it.")],
    yes: Annotated[bool, typer.Option("-y", "--yes", metavar="", help="Do not ask.")] = False,
    verbose: options.Verbose = False,
) -> None:
    """Delete a pulled model.

    Only files of this model go, in the cache of the Hugging Face hub; content that other files
    there share stays.
    """
    from colibri_mmap.cli.console import printable, results
    from colibri_mmap.runtime.modelstore import find_model, hub_cache, remove_model

    cache = hub_cache()
    model = find_model(name, cache)
    if model is None:
        raise ArgumentError(f"{name}: no such model was pulled; `colibri-mmap list` shows them")
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise ArgumentError(f"{model.name}: nobody is here to ask; --yes deletes it")
        question = f"delete {model.name}, {byte_size(model.nbytes)}?"
        if not typer.confirm(printable(question), err=True):
            raise typer.Exit(1)
    freed = remove_model(model, cache)
    kept = "" if freed >= model.nbytes else "; the rest is shared with other files"
    text = f"{model.name}: deleted, {byte_size(freed)} are free again{kept}"
    results().print(printable(text), markup=False, soft_wrap=True)


def _listed(model: StoredModel) -> Listed:
    from colibri_mmap.format.gguf import open_gguf

    if model.path is None:
        return Listed(model, None, "incomplete")
    try:
        return Listed(model, open_gguf(model.path).architecture, None)
    except ColibriError as error:
        return Listed(model, None, str(error))


def _as_dict(listed: Listed) -> dict[str, Any]:
    model, files = listed.model, listed.model.files
    return {
        "name": model.name,
        "bytes": model.nbytes,
        "total_bytes": model.total_bytes,
        "complete": model.path is not None,
        "architecture": listed.architecture,
        "quantisation": files.quantisation if files else None,
        "path": str(model.path) if model.path else None,
        "modified": int(model.modified),
        "problem": listed.problem,
    }


def _table(models: list[Listed]) -> Table:
    from rich.table import Table
    from rich.text import Text

    from colibri_mmap.cli.console import printable

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("name", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    for title in ("architecture", "quantisation", "modified"):
        table.add_column(title, no_wrap=True)
    for listed in models:
        model, files = listed.model, listed.model.files
        table.add_row(
            Text(printable(model.name)),
            byte_size(model.nbytes),
            Text(*_architecture(listed)),
            (files.quantisation if files else None) or "-",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(model.modified)),
        )
    return table


def _architecture(listed: Listed) -> tuple[str, str]:
    """Text and colour: the architecture, or what is wrong."""
    from colibri_mmap.cli.console import printable

    if listed.model.path is None:
        total = listed.model.total_bytes
        return (f"incomplete, of {byte_size(total)}" if total else "incomplete"), "yellow"
    if listed.architecture is None:
        return "damaged: see inspect", "red"
    return printable(listed.architecture), ""
