"""Turn a dense llama-type GGUF into a Mixture of Experts; colibri_mmap.demo.upcycle says how."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from colibri_mmap.demo.upcycle import Recipe, upcycle
from colibri_mmap.errors import ColibriError


def main(
    source: Annotated[Path, typer.Argument(help="Dense llama-type GGUF.")],
    target: Annotated[Path, typer.Argument(help="GGUF to write.")],
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts used per token.")] = 2,
    perturbation: Annotated[float, typer.Option(help="Largest change of a block's scale.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Seed of experts and routers.")] = 0,
) -> None:
    """Write a Mixture-of-Experts GGUF whose experts are small variations of the dense model's."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=False))
    try:
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("upcycling")
            upcycle(
                source,
                target,
                Recipe(experts, top_k, perturbation, seed),
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )
    except ColibriError as error:
        console.print(f"error: {error}", markup=False, soft_wrap=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
