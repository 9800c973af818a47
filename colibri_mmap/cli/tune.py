"""`tune`: measure the machine and keep the settings that are fastest for a model on it."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Annotated

import typer

from colibri_mmap.cli import options
from colibri_mmap.quantities import speed

if TYPE_CHECKING:
    from rich.table import Table

    from colibri_mmap.runtime.profile import MachineRates, Profile
    from colibri_mmap.runtime.tuning import Comparison, Tuning


def tune(
    model: options.ModelArgument = None,
    model_option: options.ModelOption = None,
    minutes: Annotated[
        float, typer.Option("--minutes", metavar="N", min=0, help="How long it may take, about.")
    ] = 5.0,
    ram: options.Ram = None,
    mode: options.ArithmeticMode = "int8",
    as_json: options.AsJson = False,
    verbose: options.Verbose = False,
) -> None:
    """Find the fastest settings for a model on this machine; later runs use them.

    Disk, memory and kernels are measured, then settings are compared in turn, A B A B, on the same
    tokens. Only what gains more than the measurements scatter is kept. Flags go before what is
    stored, and no setting changes a reply. Leave the machine alone meanwhile.
    """
    given = options.needed_model(model, model_option)

    from colibri_mmap.cli.console import ProgressBar, messages, printable, results, silent_keyboard
    from colibri_mmap.runtime.tuning import tune as find_settings

    console = messages()

    def report(comparison: Comparison) -> None:
        console.print(printable(_verdict(comparison)), style="dim", markup=False)

    with silent_keyboard(), ProgressBar() as bar:
        found = find_settings(
            given.path, seconds=60 * minutes, ram=ram, mode=mode, progress=bar, report=report
        )
    if as_json:
        print(json.dumps(_as_dict(found), indent=2))
    else:
        results().print(_table(found))


def _verdict(comparison: Comparison) -> str:
    gains = comparison.gains
    spread = f" ({min(gains):.2f} to {max(gains):.2f})" if len(gains) > 1 else ""
    verdict = "kept" if comparison.kept else "not kept"
    return f"{comparison.name}: {median(gains):.2f} times as fast{spread}, {verdict}"


def _as_dict(found: Tuning) -> dict[str, object]:
    return {
        "profile": asdict(found.profile),
        "comparisons": [{**asdict(c), "kept": c.kept} for c in found.comparisons],
        "untried": list(found.untried),
    }


def _table(found: Tuning) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 3))
    lines = [
        ("disk", _disk(found.profile.rates)),
        ("memory", f"{found.profile.rates.memory / 1e9:.1f} GB/s"),
        ("kernels", f"{found.profile.rates.kernels / 1e9:.1f} GB/s of weights"),
        ("fastest", _settings(found.profile)),
    ]
    if found.untried:
        lines.append(("not tried", f"{', '.join(found.untried)}: more --minutes may help"))
    for label, value in lines:
        table.add_row(Text(label, "dim"), Text(value))
    return table


def _disk(rates: MachineRates) -> str:
    if not rates.disk_sequential:
        return "not measured: this file system has no direct reads"
    depths = (rates.disk_depth_1, rates.disk_depth_4, rates.disk_depth_16)
    one, four, sixteen = (f"{rate / 1e9:.2f}" for rate in depths)
    return (
        f"{rates.disk_sequential / 1e9:.2f} GB/s in order; experts at random {one}, "
        f"{four} and {sixteen} GB/s with 1, 4 and 16 reads at a time"
    )


def _settings(profile: Profile) -> str:
    return (
        f"{profile.threads} threads, --io {profile.io}, --prefetch {profile.prefetch or 'off'}, "
        f"--prefetch-threads {profile.prefetch_threads}: "
        f"{speed(profile.tokens_per_second)} tokens/s; stored for later runs"
    )
