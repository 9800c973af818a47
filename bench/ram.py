"""A model larger than memory: this engine against llama.cpp, at limits below the model's size.

Every run is a process of its own in a memory group of a part of the file's size. It starts with an
empty page cache and reads given tokens: a prompt, then one after another. At the first read-ahead
the engines alternate (A B A B ...) and the ratio of each pair counts; the others are measured once,
and 0 for this engine only. Bytes are compared with an LRU cache that replays the routing of the
same run within the memory that it had for experts. Needs root.

    sudo .venv/bin/python bench/ram.py MODEL.gguf --peer-python PEER/bin/python --json ram.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from cgroup import Result, run_limited
from ramreport import checks, print_cells, print_checks
from routing import ModelBytes, Needs

from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.tokenizer import Tokenizer

LONG_PROMPT, SHORT_PROMPT = 512, 64  # tokens
_LEAST_DECODED = 32
_LONG_PROMPT_UP_TO = 40  # percent; above it decoding alone is of interest
_TIMEOUT_SECONDS = 240.0
_ATTEMPTS = 5  # at a run that is disturbed
_MOST_FOREIGN_READS = 0.2  # of the run's own bytes
_LONGEST_PAUSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Cell:
    """What is varied: limit in percent of the file, "ours" or "peer", read-ahead, prompt tokens."""

    percent: int
    engine: str
    read_ahead_kb: int
    prompt: int

    def __str__(self) -> str:
        return f"{self.percent} %, {self.engine}, read-ahead {self.read_ahead_kb}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a cell: what the harness saw, what the program reported, or why it failed.

    Of our routing: bytes per token of an LRU cache, and how often the prompt read each expert.
    """

    cell: Cell
    result: Result
    report: dict[str, Any]
    failure: str
    lru_bytes_per_token: float | None = None
    reads_per_expert: float | None = None

    @property
    def foreign_reads(self) -> float:
        """Bytes that the rest of the machine read from the disk, over those of the run."""
        everything = self.result.device_bytes_read or 0
        return everything / max(1, self.result.process_bytes_read) - 1

    def value(self, phase: str, name: str) -> float:
        return float(self.report[phase][name])


class Bench:
    """Runs on one model."""

    def __init__(self, arguments: argparse.Namespace, directory: Path) -> None:
        self._arguments = arguments
        gguf = open_gguf(arguments.model)
        self._files = [shard.path for shard in gguf.shards]
        self._bytes = ModelBytes.of(gguf)
        self._ids = _token_ids(Tokenizer.from_gguf(gguf), arguments)
        self._ids_file, self._trace = directory / "ids.json", directory / "trace"

    def compile_kernels(self) -> None:
        """Let this engine fill its cache of compiled kernels, outside of all limits."""
        cell = Cell(100, "ours", 0, SHORT_PROMPT)
        if run_limited(self._command(cell), capture=True).status:
            raise SystemExit("error: this engine fails on the model even without a limit")

    def run(self, cell: Cell) -> Run:
        """Measure one cell, again if the rest of the machine disturbed it."""
        for attempt in range(_ATTEMPTS):
            time.sleep(self._arguments.pause)
            run = self._run_once(cell)
            pause = run.result.longest_pause_seconds
            if run.foreign_reads <= _MOST_FOREIGN_READS and pause <= _LONGEST_PAUSE_SECONDS:
                break
            print(
                f"{cell}: disturbed in attempt {attempt + 1}: others read {run.foreign_reads:.2f} "
                f"of its bytes, longest pause {pause:.1f} s",
                file=sys.stderr,
                flush=True,
            )
        return run

    def _run_once(self, cell: Cell) -> Run:
        result = run_limited(
            self._command(cell),
            limit=int(cell.percent / 100 * self._bytes.total),
            files=self._files,
            drop=True,
            read_ahead_kb=cell.read_ahead_kb,
            first=True,
            timeout=_TIMEOUT_SECONDS,
            capture=True,
        )
        if result.oom_killed:
            return Run(cell, result, {}, "out of memory")
        if result.timed_out:
            return Run(cell, result, {}, f"no end within {_TIMEOUT_SECONDS:.0f} s")
        if result.status:
            return Run(cell, result, {}, f"status {result.status}")
        report = json.loads(result.output.splitlines()[-1])
        if cell.engine == "peer":
            return Run(cell, result, report, "")
        assert result.limit_bytes is not None
        used = result.peak_anonymous_bytes + self._bytes.resident_trunk + report["reserve_bytes"]
        needs = Needs.of(self._trace, result.limit_bytes - used)
        reads_per_expert = report["prefill"]["bytes_read"] / needs.prompt_experts
        return Run(cell, result, report, "", needs.lru_per_token, reads_per_expert)

    def _command(self, cell: Cell) -> list[str]:
        self._ids_file.write_text(json.dumps(self._ids[: cell.prompt + self._arguments.decode]))
        program = [str(Path(__file__).with_name("given.py")), str(self._arguments.model)]
        program += [str(self._ids_file), "--prompt", str(cell.prompt)]
        program += ["--seconds", str(self._arguments.seconds)]
        program += ["--threads", str(self._arguments.threads)]
        if cell.engine == "peer":
            return [self._arguments.peer_python, *program, "--peer"]
        for setting in self._arguments.set:
            program += ["--set", setting]
        self._trace.unlink(missing_ok=True)
        return [sys.executable, *program, "--trace", str(self._trace)]


def _token_ids(tokenizer: Tokenizer, arguments: argparse.Namespace) -> list[int]:
    """Tokens of prompt and decoding: of a text, or random ones for a model of random weights."""
    count = LONG_PROMPT + arguments.decode
    if arguments.text is None:
        rng = np.random.default_rng(1)
        drawn: list[int] = rng.integers(tokenizer.vocab_size, size=count).tolist()
        return drawn
    ids = tokenizer.encode(arguments.text.read_text(), add_special=False)[:count]
    if len(ids) < LONG_PROMPT + _LEAST_DECODED:
        raise ArgumentError(
            f"{arguments.text}: has {len(ids)} tokens, {LONG_PROMPT + _LEAST_DECODED} are needed"
        )
    return ids


def plan(arguments: argparse.Namespace) -> Iterator[Cell]:
    """All runs in their order."""
    main, *others = arguments.read_ahead
    for percent in arguments.limits:
        prompt = LONG_PROMPT if percent <= _LONG_PROMPT_UP_TO else SHORT_PROMPT
        for kb in [main] * arguments.pairs + others:
            for engine in arguments.engines:
                yield Cell(percent, engine, kb, prompt)
        if "ours" in arguments.engines:
            yield Cell(percent, "ours", 0, prompt)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", help="interpreter with llama-cpp-python")
    parser.add_argument("--engines", nargs="+", choices=["ours", "peer"], default=["ours", "peer"])
    parser.add_argument("--limits", nargs="+", type=int, default=[40, 70, 100], help="percent")
    parser.add_argument("--read-ahead", nargs="+", type=int, default=[128, 8192], metavar="KB")
    parser.add_argument("--pairs", type=int, default=3, help="at the first read-ahead")
    parser.add_argument("--text", type=Path, help="the tokens to read; otherwise random ones")
    parser.add_argument("--decode", type=int, default=128, help="tokens behind it, at most")
    parser.add_argument("--seconds", type=float, default=8, help="of decoding, at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE for this engine")
    parser.add_argument("--pause", type=float, default=0, help="seconds between runs")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    if "peer" in arguments.engines and not arguments.peer_python:
        parser.error("--peer-python is needed, or --engines ours")
    runs: list[Run] = []
    stopped = ""
    try:
        with tempfile.TemporaryDirectory() as directory:
            measure(arguments, Path(directory), runs)
    except (ColibriError, KeyboardInterrupt, SystemExit) as error:
        stopped = f"error: {error or 'interrupted'}"  # what has been measured is still reported
    found = checks(runs)
    if arguments.json:
        setting = {name: str(value) for name, value in vars(arguments).items()}
        figures = {"setting": setting, "runs": [asdict(run) for run in runs]}
        figures["checks"] = [asdict(check) for check in found]
        arguments.json.write_text(json.dumps(figures, indent=1))
    print_cells(runs)
    print_checks(found)
    sys.exit(stopped or not all(check.holds for check in found))


def measure(arguments: argparse.Namespace, directory: Path, runs: list[Run]) -> None:
    """Append all runs of the plan to `runs`, which keeps those before an error."""
    bench = Bench(arguments, directory)
    if "ours" in arguments.engines:
        bench.compile_kernels()
    for cell in plan(arguments):
        run = bench.run(cell)
        runs.append(run)
        speed = "" if run.failure else f"{run.value('decode', 'tokens_per_second'):.2f} tokens/s"
        print(f"{cell}: {run.failure or speed}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
