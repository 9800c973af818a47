"""The comparison under memory limits: its runs end to end, and the bars for its figures."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from cgroup import Result
from groups import require_memory_limits
from ram import Cell, Run
from ramreport import Check, checks, spread

from colibri_mmap.errors import ResourceError

try:
    require_memory_limits()
    refusal = ""
except ResourceError as error:
    refusal = str(error)
limited = pytest.mark.skipif(bool(refusal), reason=refusal)

QUIET: dict[str, Any] = {
    "command": [],
    "status": 0,
    "timed_out": False,
    "oom_killed": False,
    "limit_bytes": 10**9,
    "wall_seconds": 1.0,
    "user_seconds": 1.0,
    "system_seconds": 1.0,
    "other_processor_seconds": 0.0,
    "longest_pause_seconds": 0.0,
    "peak_anonymous_bytes": 200 << 20,
    "peak_usage_bytes": 10**9,
    "limit_hits": 0,
    "major_faults": 0,
    "minor_faults": 0,
    "process_bytes_read": 10**9,
    "device_bytes_read": 10**9,
    "read_ahead_kb": 128,
    "output": "",
}


def run(engine: str, kb: int, speed: float, *, prefill: float = 100.0, read: float = 1e8) -> Run:
    """A run at 40 % whose LRU cache would have read 1e8 bytes per token."""
    report = {
        "kv_bytes": 1 << 20,
        "prefill": {"tokens_per_second": prefill},
        "decode": {"tokens_per_second": speed, "bytes_read_per_token": read},
    }
    cell, result = Cell(40, engine, kb, 512), Result(**QUIET)
    return Run(cell, result, report, "", *((1e8, 1.0) if engine == "ours" else ()))


def failing(runs: list[Run]) -> list[str]:
    """The checks that do not hold, by name."""
    return [check.name for check in checks(runs) if not check.holds]


GOOD = [
    run("ours", 128, 6.0, prefill=100.0),
    run("peer", 128, 3.0, prefill=50.0),
    run("ours", 8192, 6.2),
    run("peer", 8192, 0.7),
    run("ours", 0, 5.9),
]


def test_good_figures_reach_every_bar() -> None:
    assert failing(GOOD) == []
    assert len(checks(GOOD)) == 8


@pytest.mark.parametrize(
    ("place", "worse", "missed"),
    [
        (0, run("ours", 128, 5.9), "40 %: tokens/s over llama.cpp at read-ahead 128, its best"),
        (3, run("peer", 8192, 0.8), "40 %: tokens/s over llama.cpp at read-ahead 8192"),
        (1, run("peer", 128, 3.0, prefill=51), "40 %: prefill over llama.cpp at read-ahead 128"),
        (4, run("ours", 0, 5.5), "40 %: our fastest over our slowest read-ahead"),
    ],
)
def test_one_worse_figure_misses_its_bar(place: int, worse: Run, missed: str) -> None:
    assert failing([*GOOD[:place], worse, *GOOD[place + 1 :]]) == [missed]


def test_the_peer_is_taken_at_its_best_read_ahead() -> None:
    runs = [*GOOD[:3], run("peer", 8192, 3.05), GOOD[4]]
    assert "40 %: tokens/s over llama.cpp at read-ahead 8192, its best" in [
        check.name for check in checks(runs)
    ]


def test_bytes_are_judged_by_the_median_run() -> None:
    low, high = (run("ours", 128, 6.0, read=read) for read in (1.00e8, 1.10e8))
    peers = [run("peer", 128, 3.0, prefill=50.0)]
    assert failing([low, low, high, *peers * 3]) == []
    assert failing([low, high, high, *peers * 3]) == ["40 %: bytes per token over LRU"]


def test_a_failed_run_of_ours_is_a_miss() -> None:
    killed = Run(Cell(40, "ours", 128, 512), Result(**QUIET | {"oom_killed": True}), {}, "killed")
    assert failing([*GOOD, killed]) == ["our runs that failed"]


def test_a_bar_without_figures_does_not_hold() -> None:
    assert not Check("nothing", [], at_most=1).holds


def test_spread_is_median_and_range() -> None:
    assert spread([], 1) == "-"
    assert spread([2.345], 1) == "2.3"
    assert spread([1, 4, 2], 1) == "2.0 (1.0 to 4.0)"


@limited
@pytest.mark.slow
def test_runs_of_this_engine_from_end_to_end(bench: Path, mini: Path, tmp_path: Path) -> None:
    model = shutil.copy(mini / "qwen3moe" / "qwen3moe.BF16.gguf", tmp_path / "model.gguf")
    limit = 800_000_000 * 100 // Path(model).stat().st_size  # percent
    figures = tmp_path / "figures.json"
    program = [sys.executable, str(bench / "ram.py"), str(model), "--engines", "ours"]
    program += ["--limits", str(limit), "--read-ahead", "128", "--pairs", "1", "--decode", "4"]
    done = subprocess.run(
        [*program, "--json", str(figures)], capture_output=True, text=True, timeout=300
    )
    assert "error" not in done.stderr
    assert f"| {limit} % | ours | 128 |" in done.stdout
    runs = json.loads(figures.read_text())["runs"]
    assert [run["cell"]["read_ahead_kb"] for run in runs] == [128, 0]
    for run in runs:
        assert run["failure"] == ""
        assert run["report"]["prefill"]["tokens"] == 64
        assert 1 <= run["report"]["decode"]["tokens"] <= 4
        assert run["lru_bytes_per_token"] == 0  # everything fits
        assert 20e6 < run["result"]["peak_anonymous_bytes"] < 500e6
        assert run["result"]["process_bytes_read"] > 200_000  # cold: the whole model
