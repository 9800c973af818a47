"""`plan`: what of a model will live where, and what a token will cost."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colibri_mmap.cli import options
from colibri_mmap.quantities import byte_size, speed

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.runtime.budget import MemoryPlan
    from colibri_mmap.runtime.forecast import Forecast
    from colibri_mmap.runtime.profile import Profile


@dataclass(frozen=True, slots=True)
class Report:
    """All that `plan` tells; `summary` is that of format.describe."""

    summary: dict[str, Any]
    context: int
    limited_by: str
    memory: MemoryPlan
    expected: Forecast
    profile: Profile | None


def plan(
    model: options.ModelPath,
    ctx_size: options.ContextSize = 0,
    ram: options.Ram = None,
    no_profile: options.NoProfile = False,
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Show what will live where in memory, what a token will read, and how fast that can be.

    Nothing is read but the header of the file. A model that memory cannot hold the always needed
    parts of is refused, as it would be by chat.
    """
    report = _report(model, ctx_size, ram, no_profile)
    if as_json:
        print(json.dumps(_as_dict(report), indent=2))
        return
    from colibri_mmap.cli.console import messages, printable, results

    results().print(_table(report))
    for notice in report.memory.notices:
        messages().print(printable(f"note: {notice}"), style="dim", markup=False)


def _report(model: Path, ctx_size: int, ram: str | None, no_profile: bool) -> Report:
    from colibri_mmap.format.describe import describe
    from colibri_mmap.format.experts import expert_layers
    from colibri_mmap.format.gguf import open_gguf
    from colibri_mmap.runtime.forecast import RULE_OF_THUMB, forecast
    from colibri_mmap.runtime.limits import memory_limits
    from colibri_mmap.runtime.profile import load_profile
    from colibri_mmap.runtime.ram import PLANNED_CONTEXT, plan_ram, resident_trunk
    from colibri_mmap.runtime.trunk import trunk_ranges
    from colibri_mmap.runtime.usage import load_usage

    gguf = open_gguf(model)
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
    return Report(summary, context, limited_by, made, expected, profile)


def _as_dict(report: Report) -> dict[str, Any]:
    slowest, fastest = report.expected.tokens_per_second
    return {
        "files": report.summary["files"],
        "context": report.context,
        "limited_by": report.limited_by,
        "memory": {**asdict(report.memory), "expert_share": report.memory.expert_share},
        "per_token": {
            **asdict(report.expected),
            "tokens_per_second_slowest": slowest,
            "tokens_per_second_fastest": fastest,
        },
        "profile": asdict(report.profile) if report.profile else None,
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
    lines = [
        ("model", f"{_name(summary)}, {byte_size(summary['bytes'])}"),
        ("memory", f"{byte_size(memory.limit)} can be used, limited by {report.limited_by}"),
        ("  trunk", _trunk(memory, summary)),
        ("  context", f"{byte_size(memory.kv_bytes)} for {report.context} tokens"),
        ("  computing", byte_size(memory.anonymous_bytes)),
    ]
    if memory.expert_bytes:
        held = byte_size(min(memory.expert_budget, memory.expert_bytes))
        lines.append(
            ("  experts", f"{held} of {byte_size(memory.expert_bytes)}: {memory.expert_share:.0%}")
        )
    read, computed = byte_size(expected.read_bytes), byte_size(expected.computed_bytes)
    basis = ""
    if expected.read_bytes and memory.expert_bytes:
        basis = ", if all experts are equally likely"
        if expected.counted_tokens:
            basis = f", as {expected.counted_tokens:,} tokens so far were routed"
    lines.append(("per token", f"{computed} computed, {read} read from disk{basis}"))
    lines.append(("speed", _speed(report)))
    return lines


def _name(summary: dict[str, Any]) -> str:
    return str(summary["name"] or Path(summary["files"][0]["path"]).name)


def _trunk(memory: MemoryPlan, summary: dict[str, Any]) -> str:
    if not memory.trunk_bytes:
        return "larger than memory: a dense model of which each token reads everything"
    always = "that every token uses" if summary["experts"] else "the whole model"
    return f"{byte_size(memory.trunk_bytes)} {always}, always in memory"


def _speed(report: Report) -> str:
    slowest, fastest = (speed(value) for value in report.expected.tokens_per_second)
    between = slowest if slowest == fastest else f"{slowest} to {fastest}"
    text = f"{between} tokens/s, limited by the {report.expected.bottleneck}"
    if report.profile is None:
        return f"{text}; a rule of thumb, `tune` measures this machine"
    tuned = report.profile
    at = f" with --ram {tuned.ram}" if tuned.ram else ""
    return f"{text}; tune measured {speed(tuned.tokens_per_second)}{at}"
