"""`pack` and `verify`: write a container and check its bytes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from colibri_mmap.cli import options
from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.quantities import byte_size

NAMED = 3  # damaged parts that the error of `verify` names


def pack(
    model: options.ModelArgument = None,
    target: Annotated[
        Path | None,
        typer.Argument(metavar="TARGET", help="The file to write.", show_default=False),
    ] = None,
    model_option: options.ModelOption = None,
    align: Annotated[
        int,
        typer.Option(
            "--align",
            metavar="BYTES",
            help="Alignment of each expert: a power of two from 4096 to 2097152.",
        ),
    ] = 4096,
    order: Annotated[
        Literal["file", "hot"],
        typer.Option(
            "--order",
            help="Experts of a layer as in the file, or the most used first, by past runs.",
        ),
    ] = "file",
    force: Annotated[
        bool, typer.Option("--force", metavar="", help="Replace a target that exists.")
    ] = False,
    verbose: options.Verbose = False,
) -> None:
    """Rewrite a GGUF file so that each expert is one read from disk.

    Weights are copied byte for byte. A run that was interrupted goes on where it stopped.
    """
    from colibri_mmap.cli.console import ProgressBar, messages, printable, results
    from colibri_mmap.format.pack import pack as write_container

    if model_option is not None and target is None and model is not None:
        target, model = Path(model), None  # the only argument
    given = options.needed_model(model, model_option)
    if target is None:
        raise typer.BadParameter("there is none: name the file to write", param_hint="'TARGET'")
    started = time.monotonic()
    try:
        with ProgressBar("bytes") as bar:
            write_container(
                given.path,
                target,
                align=align,
                order=_hot_order(given.path) if order == "hot" else None,
                force=force,
                progress=lambda done, total: bar("packing", done, total),
            )
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        raise
    seconds = time.monotonic() - started
    size = target.stat().st_size
    text = f"{target}: {byte_size(size)} in {seconds:.1f} s"
    results().print(printable(text), markup=False, soft_wrap=True)
    if given.pulled:
        hint = f"note: `colibri-mmap rm {given.text}` frees the room of the original"
        messages().print(printable(hint), style="dim", markup=False)


def _hot_order(source: Path) -> dict[int, list[int]]:
    """The experts of each layer by the uses that were counted, the most used first."""
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.usage import load_usage

    order = load_usage(open_gguf(source)).order()
    if not order:
        raise ArgumentError(
            f"{source}: no uses of its experts are known yet; generate some text with it first, "
            "without --no-learn"
        )
    return order


def verify(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    verbose: options.Verbose = False,
) -> None:
    """Check a model file: its structure and, if it is packed or was pulled, its checksums."""
    from colibri_mmap.cli.console import ProgressBar, printable, results
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.format.verify import verify as check_file
    from colibri_mmap.runtime.blobcheck import compare_with_names

    given = options.needed_model(model, model_option)
    path = given.path
    with ProgressBar("bytes") as bar:

        def report(done: int, total: int) -> None:
            bar("checking", done, total)

        found = check_file(path, report)
        shards = [] if found.has_checksums else [shard.path for shard in open_gguf(path).shards]
        compared = compare_with_names(shards, report) if shards else None
    if found.damaged:
        raise _mismatch(path, found.damaged, "pack or copy the file again")
    if compared is not None and compared.damaged:
        names = [file.name for file in compared.damaged]
        raise _mismatch(path.parent, names, _fetch_again(given))
    checked = found.checked_bytes if compared is None else compared.checked_bytes
    if found.has_checksums or compared is not None:
        text = f"{given.text}: sound, {byte_size(checked)} match their checksums"
    else:
        text = (
            f"{given.text}: its structure is sound; only packed files and pulled ones have "
            "checksums to compare"
        )
    results().print(printable(text), markup=False, soft_wrap=True)


def _mismatch(path: Path, damaged: Sequence[str], advice: str) -> FormatError:
    more = len(damaged) - NAMED
    names = ", ".join(damaged[:NAMED]) + (f" and {more} more" if more > 0 else "")
    return FormatError(path, names, f"the checksum does not match: {advice}")


def _fetch_again(model: options.GivenModel) -> str:
    if not model.pulled:
        return "delete it as `colibri-mmap list` names it, and pull it again"
    name = model.text
    return f"`colibri-mmap rm {name}` and `colibri-mmap pull {name}` fetch it again"
