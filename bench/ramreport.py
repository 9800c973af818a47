"""The tables of bench/ram.py: what was measured in each cell, and whether it is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ram import Run

MOST_ANONYMOUS_MIB = 300
SPEED_RATIOS = {40: (2.0, 8.0), 70: (1.7, 6.0), 100: (1.0, 1.0)}
"""By limit in percent: over the peer at its best read-ahead, and at a wide one."""
WIDE_KB = 8192
MOST_BYTES_OVER_LRU = {40: 1.05, 70: 1.05}
PREFILL_RATIOS = {40: 2.0}
MOST_READS_PER_EXPERT = 1.1
READ_AHEAD_TOLERANCE = 0.1
"""Of our own speed, between the fastest and the slowest read-ahead."""

NAMES = {"ours": "ours", "peer": "llama.cpp"}
HEADER = (
    "| limit | engine | read-ahead KB | tokens/s | MB/token | LRU MB/token | faults/token "
    "| open s | prefill tokens/s | prefill GB | anonymous MB | others: reads, longest pause s |"
)


@dataclass(frozen=True, slots=True)
class Check:
    """A figure and the bar that it has to reach or must not exceed."""

    name: str
    values: list[float]
    at_least: float | None = None
    at_most: float | None = None

    @property
    def holds(self) -> bool:
        """Whether the median reaches the bar; what was not measured does not."""
        if not self.values:
            return False
        value = median(self.values)
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )


def spread(values: Sequence[float], digits: int) -> str:
    """Median and range."""
    if not values:
        return "-"
    text = f"{median(values):.{digits}f}"
    if len(values) > 1:
        text += f" ({min(values):.{digits}f} to {max(values):.{digits}f})"
    return text


def print_cells(runs: Sequence[Run]) -> None:
    """A Markdown table with a row for each cell."""
    print(HEADER)
    print("|---" * (HEADER.count("|") - 1) + "|")
    for cell in dict.fromkeys(run.cell for run in runs):
        own = [run for run in runs if run.cell == cell]
        good = [run for run in own if not run.failure]
        failures = "; ".join(run.failure for run in own if run.failure)
        columns = _columns(good) if good else [failures]
        place = [f"{cell.percent} %", NAMES[cell.engine], str(cell.read_ahead_kb)]
        print(f"| {' | '.join(place + columns)} |")


def _columns(runs: Sequence[Run]) -> list[str]:
    def of(phase: str, name: str, unit: float, digits: int) -> str:
        return spread([run.value(phase, name) / unit for run in runs], digits)

    lru = [run.lru_bytes_per_token / 1e6 for run in runs if run.lru_bytes_per_token is not None]
    faults = [run.value("decode", "major_faults") / run.value("decode", "tokens") for run in runs]
    return [
        of("decode", "tokens_per_second", 1, 2),
        of("decode", "bytes_read_per_token", 1e6, 1),
        spread(lru, 1),
        spread(faults, 0),
        of("open", "seconds", 1, 1),
        of("prefill", "tokens_per_second", 1, 1),
        of("prefill", "bytes_read", 1e9, 2),
        spread([run.result.peak_anonymous_bytes / 1e6 for run in runs], 0),
        f"{max(run.foreign_reads for run in runs):.2f}, "
        f"{max(run.result.longest_pause_seconds for run in runs):.1f}",
    ]


def print_checks(found: Sequence[Check]) -> None:
    """A Markdown table of the bars."""
    print("\n| | measured | bar | holds |\n|---|---|---|---|")
    for check in found:
        bar = f">= {check.at_least}" if check.at_least is not None else f"<= {check.at_most}"
        holds = "yes" if check.holds else "**no**"
        print(f"| {check.name} | {spread(check.values, 2)} | {bar} | {holds} |")


def checks(runs: Sequence[Run]) -> list[Check]:
    """What has to hold of our runs, as far as these runs tell."""
    ours = [run for run in runs if run.cell.engine == "ours"]
    if not ours:
        return []
    good = [run for run in ours if not run.failure]
    own = [(r.result.peak_anonymous_bytes - r.report["kv_bytes"]) / 2**20 for r in good]
    found = [
        Check("our runs that failed", [len(ours) - len(good)], at_most=0),
        Check(
            "anonymous MiB besides KV, highest", [max(own, default=0)], at_most=MOST_ANONYMOUS_MIB
        ),
    ]
    for percent in dict.fromkeys(run.cell.percent for run in runs):
        found += _checks_of_limit(percent, [run for run in runs if run.cell.percent == percent])
    return found


def _checks_of_limit(percent: int, runs: Sequence[Run]) -> Iterator[Check]:
    def values(engine: str, kb: int, value: Callable[[Run], float | None]) -> list[float]:
        cell = [r for r in runs if (r.cell.engine, r.cell.read_ahead_kb) == (engine, kb)]
        found = [value(run) for run in cell if not run.failure]
        return [number for number in found if number is not None]

    def speed(run: Run) -> float:
        return run.value("decode", "tokens_per_second")

    def prefill(run: Run) -> float:
        return run.value("prefill", "tokens_per_second")

    def ratios(kb: int, value: Callable[[Run], float]) -> list[float]:
        pairs = zip(values("ours", kb, value), values("peer", kb, value), strict=False)
        return [own / theirs for own, theirs in pairs]

    where = f"{percent} %: "
    peer_read_aheads = {run.cell.read_ahead_kb for run in runs if run.cell.engine == "peer"}
    measured = {kb: median(s) for kb in peer_read_aheads if (s := values("peer", kb, speed))}
    if percent in SPEED_RATIOS and measured:
        best = max(measured, key=lambda kb: measured[kb])
        at_best, at_wide = SPEED_RATIOS[percent]
        name = where + "tokens/s over llama.cpp at read-ahead "
        yield Check(f"{name}{best}, its best", ratios(best, speed), at_least=at_best)
        if WIDE_KB in measured:
            yield Check(f"{name}{WIDE_KB}", ratios(WIDE_KB, speed), at_least=at_wide)
        if percent in PREFILL_RATIOS:
            name = where + f"prefill over llama.cpp at read-ahead {best}"
            yield Check(name, ratios(best, prefill), at_least=PREFILL_RATIOS[percent])
    good = [run for run in runs if run.cell.engine == "ours" and not run.failure]
    if percent in MOST_BYTES_OVER_LRU:
        over = [
            run.value("decode", "bytes_read_per_token") / run.lru_bytes_per_token
            for run in good
            if run.lru_bytes_per_token
        ]
        name = where + "bytes per token over LRU"
        yield Check(name, over, at_most=MOST_BYTES_OVER_LRU[percent])
    reads = [run.reads_per_expert for run in good if run.reads_per_expert is not None]
    yield Check(where + "prefill reads per expert", reads, at_most=MOST_READS_PER_EXPERT)
    own = {run.cell.read_ahead_kb for run in good}
    medians = [median(values("ours", kb, speed)) for kb in own]
    if len(medians) > 1:
        name = where + "our fastest over our slowest read-ahead"
        yield Check(name, [max(medians) / min(medians)], at_most=1 + READ_AHEAD_TOLERANCE)
