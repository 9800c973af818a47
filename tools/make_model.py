"""Write a GGUF of random weights in the geometry of a real model, whole or with fewer layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from colibri_mmap.cli.console import ProgressBar, messages, printable
from colibri_mmap.demo.geometry import MODELS
from colibri_mmap.demo.randommodel import write_model
from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.format.gguf import open_gguf


def main(
    target: Annotated[Path, typer.Argument(help="GGUF to write.")],
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")],
    tokenizer: Annotated[Path, typer.Option(help="GGUF with a byte-level BPE tokenizer.")],
    layers: Annotated[int | None, typer.Option(help="Layers; without it all of them.")] = None,
    dense_layers: Annotated[
        int | None, typer.Option(help="How many of the first layers have no experts.")
    ] = None,
    sparse: Annotated[
        bool, typer.Option("--sparse", help="Experts are holes in the file: zeros on no space.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of all weights.")] = 1,
) -> None:
    """Write a GGUF of random weights in the geometry of a real model, in Q4_K_M."""
    try:
        if model not in MODELS:
            raise ArgumentError(f"--model {model}: choose {', '.join(MODELS)}")
        geometry = MODELS[model].shortened(layers, dense_layers)
        source = open_gguf(tokenizer)
        with ProgressBar("bytes") as bar:
            progress = partial(bar, "writing")
            write_model(target, source, geometry, seed=seed, sparse=sparse, progress=progress)
    except ColibriError as error:
        messages().print(f"error: {printable(str(error))}", markup=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
