"""`inspect`: what a model file holds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from colibri_mmap.cli import options
from colibri_mmap.quantities import byte_size, count

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.format.gguf import GGUF


def inspect(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", metavar="", help="List the tensors as well.")
    ] = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what a model file holds, without reading its weights."""
    given = options.needed_model(model, model_option)

    from colibri_mmap.format.describe import describe
    from colibri_mmap.format.gguf import open_gguf

    gguf = open_gguf(given.path)
    summary = describe(gguf)
    if as_json:
        print(
            json.dumps(
                {**summary, **({"tensor_list": _tensors(gguf)} if tensors else {})}, indent=2
            )
        )
        return
    from colibri_mmap.cli.console import results

    console = results()
    console.print(_overview(given.name, summary), markup=False)
    if tensors:
        console.print()
        console.print(_tensor_table(gguf))


def _overview(name: str, summary: dict[str, Any]) -> Table:
    """One line for each thing that a person asks first."""
    from rich.table import Table
    from rich.text import Text

    from colibri_mmap.cli.console import printable

    table = Table.grid(padding=(0, 3))
    for label, value in (
        ("name", f"{name} ({summary['name']})" if summary["name"] else name),
        ("files", _files(summary)),
        ("architecture", _architecture(summary)),
        ("experts", _experts(summary)),
        ("parameters", _parameters(summary)),
        ("weights", _weights(summary)),
        ("KV cache", _kv_cache(summary)),
        ("container", _container(summary)),
    ):
        if value:
            table.add_row(Text(label, "dim"), Text(printable(value)))
    return table


def _files(summary: dict[str, Any]) -> str:
    files = summary["files"]
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    size = byte_size(summary["bytes"])
    return f"{files[0]['path']}{more}, {size}, GGUF version {summary['version']}"


def _architecture(summary: dict[str, Any]) -> str:
    parts = [summary["architecture"]]
    if summary["layers"] is not None:
        parts.append(f"{summary['layers']} layers")
    if summary["context_length"] is not None:
        parts.append(f"context of {summary['context_length']} tokens")
    return ", ".join(parts)


def _experts(summary: dict[str, Any]) -> str:
    if not summary["experts"]:
        return "none: a dense model"
    sizes = summary["expert_bytes"]
    size = (
        byte_size(sizes[0])
        if len(sizes) == 1
        else f"{byte_size(sizes[0])} to {byte_size(sizes[-1])}"
    )
    reads = (
        "one read" if summary["reads_per_expert"] == 1 else f"{summary['reads_per_expert']} reads"
    )
    return (
        f"{summary['experts']} in each of {summary['moe_layers']} layers, "
        f"{summary['experts_per_token']} per token; {size} each, in {reads}"
    )


def _parameters(summary: dict[str, Any]) -> str:
    total = count(summary["parameters"])
    if not summary["experts"]:
        return total
    return f"{total}, of which {count(summary['active_parameters'])} work on a token"


def _weights(summary: dict[str, Any]) -> str:
    types = ", ".join(
        f"{name} {byte_size(size)}" for name, size in summary["bytes_by_type"].items()
    )
    if not summary["experts"]:
        return types
    trunk, experts = byte_size(summary["trunk_bytes"]), byte_size(summary["experts_bytes"])
    return f"{experts} experts, {trunk} the rest: {types}"


def _kv_cache(summary: dict[str, Any]) -> str:
    """Bytes in f16, the default."""
    return f"{byte_size(2 * summary['kv']['values_per_token'])} per token" if summary["kv"] else ""


def _container(summary: dict[str, Any]) -> str:
    container = summary["container"]
    if container is None:
        return "not packed" if summary["experts"] else ""
    slabs = " and ".join(byte_size(size) for size in container["slab_bytes"])
    return (
        f"version {container['version']}, {container['slabs']} slabs of {slabs}, "
        f"aligned to {container['align']} bytes"
    )


def _tensors(gguf: GGUF) -> list[dict[str, Any]]:
    return [
        {
            "name": info.name,
            "type": info.type.name,
            "shape": list(info.shape),
            "bytes": info.nbytes,
            "shard": info.shard,
            "offset": info.offset,
        }
        for info in gguf.tensors.values()
    ]


def _tensor_table(gguf: GGUF) -> Table:
    from rich.table import Table
    from rich.text import Text

    from colibri_mmap.cli.console import printable

    table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("tensor")
    table.add_column("type")
    table.add_column("shape")
    table.add_column("bytes", justify="right")
    for info in gguf.tensors.values():
        shape = " x ".join(map(str, info.shape))
        table.add_row(Text(printable(info.name)), info.type.name, shape, f"{info.nbytes:,}")
    return table
