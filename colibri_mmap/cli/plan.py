"""`plan`: what of a model will live where, and what a token will cost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from colibri_mmap.cli import options
from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.quantities import byte_size, speed

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.format.gguf import GGUF
    from colibri_mmap.runtime.budget import MemoryPlan
    from colibri_mmap.runtime.forecast import Forecast
    from colibri_mmap.runtime.profile import Profile
    from colibri_mmap.runtime.vramsettings import VramSettings
    from colibri_mmap.runtime.vramtier import DevicePlan


@dataclass(frozen=True, slots=True)
class Gpu:
    """What would live on a GPU; `name` None: one that was only assumed."""

    name: str | None
    total_bytes: int
    placed: DevicePlan


@dataclass(frozen=True, slots=True)
class Report:
    """All that `plan` tells; `summary` is that of format.describe."""

    name: str
    summary: dict[str, Any]
    context: int
    limited_by: str
    memory: MemoryPlan
    gpu: Gpu | None
    expected: Forecast
    profile: Profile | None
    notices: tuple[str, ...]


def plan(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    ctx_size: options.ContextSize = 0,
    ram: options.Ram = None,
    vram: options.Vram = "auto",
    gpu_layers: options.GpuLayers = "auto",
    no_profile: options.NoProfile = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what will live where in memory, what a token will read, and how fast that can be.

    Nothing is read but the header of the file. A model that memory cannot hold the always needed
    parts of is refused, as it would be by chat. Without a GPU, --vram 8G shows what would live on
    one with so much memory.
    """
    from colibri_mmap.cli.memory import vram_settings

    given = options.needed_model(model, model_option)
    report = _report(given, ctx_size, ram, vram_settings(vram, gpu_layers), no_profile)
    if as_json:
        print(json.dumps(_as_dict(report), indent=2))
        return
    from colibri_mmap.cli.console import messages, printable, results

    results().print(_table(report))
    for notice in report.notices:
        messages().print(printable(f"note: {notice}"), style="dim", markup=False)


def _report(
    model: options.GivenModel,
    ctx_size: int,
    ram: str | None,
    vram: VramSettings,
    no_profile: bool,
) -> Report:
    from colibri_mmap.format.describe import describe
    from colibri_mmap.format.experts import expert_layers
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.forecast import RULE_OF_THUMB, forecast
    from colibri_mmap.runtime.limits import memory_limits
    from colibri_mmap.runtime.profile import load_profile
    from colibri_mmap.runtime.ram import PLANNED_CONTEXT, plan_ram, resident_trunk
    from colibri_mmap.runtime.trunk import trunk_ranges
    from colibri_mmap.runtime.usage import load_usage

    gguf = open_gguf(model.path)
    layers, limits, summary = expert_layers(gguf), memory_limits(), describe(gguf)
    context = ctx_size or min(summary["context_length"] or PLANNED_CONTEXT, PLANNED_CONTEXT)
    values = summary["kv"]["values_per_token"] if summary["kv"] else 0
    trunk = resident_trunk(gguf, layers, limits)
    made = plan_ram(gguf, layers, trunk, 2 * values * context, ram, limits)
    profile = None if no_profile else load_profile(gguf)
    expected = forecast(
        gguf,
        layers,
        made,
        sum(part.nbytes for part in trunk_ranges(gguf)),
        load_usage(gguf),
        profile.rates if profile else RULE_OF_THUMB,
    )
    limited_by = f"--ram {ram}" if ram and not made.notices else limits.source
    gpu, notices = _gpu(gguf, vram, context)
    notices = (*made.notices, *notices)
    return Report(model.name, summary, context, limited_by, made, gpu, expected, profile, notices)


def _gpu(gguf: GGUF, settings: VramSettings, context: int) -> tuple[Gpu | None, tuple[str, ...]]:
    """The plan for the GPU that is there, or else for one of the size of --vram; and notes."""
    from colibri_mmap.runtime.budget import parse_size
    from colibri_mmap.runtime.device import probe
    from colibri_mmap.runtime.vramsettings import find_device

    if settings.vram == "off":
        find_device(settings, "int8")  # which refuses --gpu-layers beside it
        return None, ()
    name, found = None, probe()
    if not isinstance(found, str):
        with closing(found):
            name, (free, total) = found.name, found.memory_info()
    elif settings.vram == "auto" or "%" in settings.vram:
        if settings.demanded:
            raise ArgumentError(
                f"there is no GPU to plan for ({found}); --vram 8G plans for one of this size"
            )
        return None, ()
    else:
        free = total = parse_size(settings.vram, 0)
        settings = replace(settings, vram="auto")

    from colibri_mmap.runtime.vramtier import plan_device  # a second to import

    try:
        placed = plan_device(gguf, free, total, settings, context=context, kv_type="f16")
    except ResourceError as error:
        if name is None or settings.demanded:
            raise
        return None, (f"the GPU would not be used: {error}",)
    return Gpu(name, total, placed), placed.plan.notices


def _as_dict(report: Report) -> dict[str, Any]:
    slowest, fastest = report.expected.tokens_per_second
    return {
        "name": report.name,
        "general_name": report.summary["name"],
        "files": report.summary["files"],
        "context": report.context,
        "limited_by": report.limited_by,
        "memory": {**asdict(report.memory), "expert_share": report.memory.expert_share},
        "gpu": _gpu_as_dict(report.gpu) if report.gpu else None,
        "per_token": {
            **asdict(report.expected),
            "tokens_per_second_slowest": slowest,
            "tokens_per_second_fastest": fastest,
        },
        "profile": asdict(report.profile) if report.profile else None,
    }


def _gpu_as_dict(gpu: Gpu) -> dict[str, Any]:
    plan, layers, blocks, obstacle = gpu.placed
    return {
        "name": gpu.name,
        "total_bytes": gpu.total_bytes,
        "layers": layers,
        "blocks": blocks,
        "obstacle": obstacle or None,
        "plan": {**asdict(plan), "expert_share": plan.expert_share},
    }


def _table(report: Report) -> Table:
    from rich.table import Table
    from rich.text import Text

    from colibri_mmap.cli.console import printable

    table = Table.grid(padding=(0, 3))
    for label, value in _lines(report):
        table.add_row(Text(label, "dim"), Text(printable(value)))
    return table


def _lines(report: Report) -> list[tuple[str, str]]:
    summary, memory, expected = report.summary, report.memory, report.expected
    general_name = f" ({summary['name']})" if summary["name"] else ""
    lines = [
        ("model", f"{report.name}{general_name}, {byte_size(summary['bytes'])}"),
        ("memory", f"{byte_size(memory.limit)} can be used, limited by {report.limited_by}"),
        ("  trunk", _trunk(memory, summary)),
        ("  context", f"{byte_size(memory.kv_bytes)} for {report.context} tokens"),
        ("  computing", byte_size(memory.anonymous_bytes)),
    ]
    if memory.expert_bytes:
        share = _share(memory.expert_budget, memory.expert_bytes, memory.expert_share)
        lines.append(("  experts", share))
    if report.gpu:
        lines += _gpu_lines(report.gpu, report.context, bool(summary["experts"]))
    read, computed = byte_size(expected.read_bytes), byte_size(expected.computed_bytes)
    basis = ""
    if expected.read_bytes and memory.expert_bytes:
        basis = ", if all experts are equally likely"
        if expected.counted_tokens:
            basis = f", as {expected.counted_tokens:,} tokens so far were routed"
    lines.append(("per token", f"{computed} computed, {read} read from disk{basis}"))
    lines.append(("speed", _speed(report)))
    return lines


def _gpu_lines(gpu: Gpu, context: int, experts: bool) -> Iterator[tuple[str, str]]:
    plan, layers, blocks, obstacle = gpu.placed
    name = gpu.name or "assumed"
    total, limit = byte_size(gpu.total_bytes), byte_size(plan.limit)
    yield "GPU", f"{name}, {total}, {limit} can be used"
    why_not = f"; {obstacle}" if layers < blocks and obstacle else ""
    trunk = f"{layers} of {blocks} layers"
    if layers:
        trunk += f", {byte_size(plan.trunk_bytes)}, and {byte_size(plan.kv_bytes)} for "
        trunk += f"{context} tokens"
    yield "  trunk", trunk + why_not
    yield "  computing", byte_size(plan.scratch_bytes)
    if plan.expert_bytes:
        yield "  experts", _share(plan.expert_budget, plan.expert_bytes, plan.expert_share)
    elif experts:
        yield "  experts", "none: there are no GPU kernels for their types"


def _share(held: int, total: int, share: float) -> str:
    return f"{byte_size(min(held, total))} of {byte_size(total)}: {share:.0%}"


def _trunk(memory: MemoryPlan, summary: dict[str, Any]) -> str:
    if not memory.trunk_bytes:
        return "larger than memory: a dense model of which each token reads everything"
    always = " that every token uses" if summary["experts"] else ", the whole model"
    return f"{byte_size(memory.trunk_bytes)}{always}, always in memory"


def _speed(report: Report) -> str:
    slowest, fastest = (speed(value) for value in report.expected.tokens_per_second)
    between = slowest if slowest == fastest else f"{slowest} to {fastest}"
    text = f"{between} tokens/s, limited by the {report.expected.bottleneck}"
    if report.gpu:
        text += ", without the GPU"
    if report.profile is None:
        return f"{text}; a rule of thumb, `tune` measures this machine"
    tuned = report.profile
    at = f" with --ram {tuned.ram}" if tuned.ram else ""
    return f"{text}; tune measured {speed(tuned.tokens_per_second)}{at}"
