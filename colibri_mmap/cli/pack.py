"""`pack` and `verify`: write a container and check its bytes."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import typer

from colibri_mmap.cli import options
from colibri_mmap.quantities import byte_size
from colibri_mmap.errors import ArgumentError, FormatError

NAMED = 3  # damaged parts that the error of `verify` names
Source = Annotated[
    Path,
    typer.Argument(
        metavar="PATH|NAME",
        parser=options.model_file,
        help="A GGUF file, any shard of a split one, its directory, or the name of a pulled model: "
        "owner/name:QUANT.",
    ),
]


def pack(
    source: Source,
    target: Annotated[Path, typer.Argument(help="The file to write.")],
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
    force: Annotated[bool, typer.Option("--force", help="Replace a target that exists.")] = False,
    verbose: options.Verbose = False,
) -> None:
    """Rewrite a GGUF file so that each expert is one read from disk.

    Weights are copied byte for byte. A run that was interrupted goes on where it stopped.
    """
    from colibri_mmap.cli.console import ProgressBar, printable, results
    from colibri_mmap.format.pack import pack as write_container

    started = time.monotonic()
    try:
        with ProgressBar("bytes") as bar:
            write_container(
                source,
                target,
                align=align,
                order=_hot_order(source) if order == "hot" else None,
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
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH|NAME",
            parser=options.model_file,
            help="A packed file, any GGUF file, or the name of a pulled model.",
        ),
    ],
    verbose: options.Verbose = False,
) -> None:
    """Check a model file: its structure and, if it is packed, every checksum."""
    from colibri_mmap.cli.console import ProgressBar, printable, results
    from colibri_mmap.format.verify import verify as check_file

    with ProgressBar("bytes") as bar:
        found = check_file(path, lambda done, total: bar("checking", done, total))
    if found.damaged:
        names = ", ".join(found.damaged[:NAMED])
        more = len(found.damaged) - NAMED
        raise FormatError(
            path,
            names + (f" and {more} more" if more > 0 else ""),
            "the checksum does not match: pack or copy the file again",
        )
    if found.has_checksums:
        text = f"{path}: sound, {byte_size(found.checked_bytes)} match their checksums"
    else:
        text = f"{path}: its structure is sound; only packed files have checksums to compare"
    results().print(printable(text), markup=False, soft_wrap=True)
