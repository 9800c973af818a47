"""Turn a dense llama-type GGUF into a Mixture of Experts; colibri_mmap.demo.upcycle says how."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from colibri_mmap.cli.console import ProgressBar, messages, printable
from colibri_mmap.demo.upcycle import Recipe, upcycle
from colibri_mmap.errors import ColibriError


def main(
    source: Annotated[Path, typer.Argument(help="Dense llama-type GGUF.")],
    target: Annotated[Path, typer.Argument(help="GGUF to write.")],
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts used per token.")] = 2,
    perturbation: Annotated[float, typer.Option(help="Largest change of a block's scale.")] = 0.03,
    seed: Annotated[int, typer.Option(help="Seed of experts and routers.")] = 0,
) -> None:
    """Write a Mixture-of-Experts GGUF whose experts are small variations of the dense model's."""
    try:
        recipe = Recipe(experts, top_k, perturbation, seed)
        with ProgressBar("bytes") as bar:
            upcycle(source, target, recipe, progress=partial(bar, "upcycling"))
    except ColibriError as error:
        messages().print(f"error: {printable(str(error))}", markup=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
