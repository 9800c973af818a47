"""Replay a routing trace through cache policies: what each would read at several cache sizes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from colibri_mmap.cli.console import messages, printable
from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.quantities import byte_size
from colibri_mmap.runtime.budget import parse_size
from colibri_mmap.runtime.replay import POLICY_NAMES, PolicyName, ReplayResult, replay
from colibri_mmap.runtime.tracefile import RoutingTrace, read_trace

Results = dict[int, dict[PolicyName, ReplayResult]]


def main(
    path: Annotated[Path, typer.Argument(metavar="TRACE", help="Recorded routing.")],
    cache: Annotated[
        str,
        typer.Option(help="Cache sizes, by commas: shares of all experts, or bytes as 500M."),
    ] = "10%,20%,40%,70%",
    lfu_weight: Annotated[
        float, typer.Option(help="Weight of frequency against recency in the hybrid, 0 to 1.")
    ] = 0.3,
    skip: Annotated[int, typer.Option(help="Forward passes that fill the cache, uncounted.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print bytes per token and hit rate of LRU, LFU, the hybrid and Belady's optimum."""
    try:
        if not 0 <= lfu_weight <= 1:
            raise ArgumentError(f"--lfu-weight must be from 0 to 1, not {lfu_weight}")
        trace = read_trace(path)
        if not 0 <= skip < len(trace.passes):
            raise ArgumentError(
                f"{path}: has {len(trace.passes)} forward passes, of which {skip} cannot be skipped"
            )
        whole = trace.header.n_experts * sum(trace.header.expert_bytes)
        sizes = [parse_size(size, whole) for size in cache.split(",")]
    except ColibriError as error:
        messages().print(f"error: {printable(str(error))}", markup=False)
        raise typer.Exit(1) from error
    results: Results = {
        size: {
            name: replay(trace, size, name, lfu_weight=lfu_weight, skip_passes=skip)
            for name in POLICY_NAMES
        }
        for size in sizes
    }
    if as_json:
        print(json.dumps(_as_dict(trace, results)))
    else:
        Console().print(_table(trace, results, whole))


def _as_dict(trace: RoutingTrace, results: Results) -> dict[str, object]:
    rows = [
        {
            "cache_bytes": size,
            "policy": name,
            **asdict(result),
            "hit_rate": result.hit_rate,
            "bytes_per_token": result.bytes_per_token,
        }
        for size, by_policy in results.items()
        for name, result in by_policy.items()
    ]
    return {"model": asdict(trace.header), "tokens": trace.tokens, "results": rows}


def _table(trace: RoutingTrace, results: Results, whole: int) -> Table:
    header = trace.header
    table = Table(
        title=f"{printable(header.name or header.architecture)}: {len(header.layers)} layers of "
        f"{header.n_experts} experts, {byte_size(whole)}; {trace.tokens} tokens",
        caption="read per token, in parts of lru's, and hit rate",
    )
    table.add_column("cache")
    for name in POLICY_NAMES:
        table.add_column(name, justify="right")
    for size, by_policy in results.items():
        lru = by_policy["lru"].bytes_read
        cells = [
            f"{byte_size(result.bytes_per_token)} {result.bytes_read / max(1, lru):.2f} "
            f"{result.hit_rate:.1%}"
            for result in by_policy.values()
        ]
        table.add_row(f"{byte_size(size)} {size / whole:.0%}", *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
