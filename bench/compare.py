"""This engine against llama.cpp on one model, in interleaved runs: A B A B ...

Every run is a process of its own, alone on the machine, with the same model, prompt and number of
threads; the machine's mood then hits both sides. Printed are medians, ranges, and the ratio of each
pair, which is the number to trust. `--cold` drops the model from the page cache before every run,
otherwise it is read into it once; the bytes that each run read from disk are reported either way.

    .venv/bin/python bench/compare.py MODEL.gguf --peer-python PEER/bin/python --no-repack
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from colibri_mmap.cli.bench import PARAGRAPH
from colibri_mmap.format.gguf import open_gguf

METRICS = ("prefill_tokens_per_second", "decode_tokens_per_second")
ENGINES = ("ours", "peer")


def drop_from_cache(paths: list[Path]) -> None:
    """Evict files from the page cache; pages that another process maps stay."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_into_cache(paths: list[Path]) -> None:
    """Read files once from beginning to end."""
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass


def run(command: list[str]) -> dict[str, Any]:
    """The JSON a program prints, with the bytes its process read from disk."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    output = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"failed with status {process.returncode}: {' '.join(command)}")
    report: dict[str, Any] = json.loads(output)
    return report | {"bytes_read": usage.ru_inblock * 512}


def processor() -> str:
    """The processor's name as Linux gives it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "unknown")


def commands(arguments: argparse.Namespace) -> dict[str, list[str]]:
    """One run of each engine as a command line."""
    threads, prompt, decode = map(str, (arguments.threads, arguments.prompt, arguments.decode))
    model = str(arguments.model)
    ours = [sys.executable, "-m", "colibri_mmap.cli", "bench", "-m", model, "--json"]
    ours += ["-t", threads, "-p", prompt, "-n", decode, "-r", "1", "--mode", arguments.mode]
    peer = [arguments.peer_python, str(Path(__file__).with_name("peer.py")), model]
    peer += ["--text", PARAGRAPH, "--threads", threads, "--prompt", prompt, "--decode", decode]
    peer += ["--repack" if arguments.repack else "--no-repack"]
    return {"ours": ours, "peer": peer}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare with llama.cpp in interleaved runs.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--peer-python", required=True, help="interpreter with llama-cpp-python")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--mode", default="int8", help="arithmetic of this engine")
    parser.add_argument("--repack", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--cold", action="store_true", help="empty page cache before each run")
    arguments = parser.parse_args()
    paths = [shard.path for shard in open_gguf(arguments.model).shards]
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in ENGINES}
    if not arguments.cold:
        read_into_cache(paths)
    for number in range(arguments.pairs):
        for engine, command in commands(arguments).items():
            if arguments.cold:
                drop_from_cache(paths)
            report = run(command)
            runs[engine].append(report)
            speeds = ", ".join(f"{report[metric]:.1f}" for metric in METRICS)
            print(f"pair {number + 1} {engine}: {speeds} tokens/s", file=sys.stderr)
    setting = vars(arguments) | {"model": arguments.model.name, "cpu": processor()}
    del setting["peer_python"]
    print(json.dumps({"setting": setting, "engine": runs["peer"][0]["engine"]}))
    print_table(runs)


def print_table(runs: dict[str, list[dict[str, Any]]]) -> None:
    """A Markdown table for LOG.md: medians (lowest to highest), and ratios pair by pair."""
    print("| | ours | llama.cpp | ratio of pairs |\n|---|---|---|---|")
    for metric in METRICS:
        ours, peer = ([report[metric] for report in runs[engine]] for engine in ENGINES)
        ratios = [a / b for a, b in zip(ours, peer, strict=True)]
        cells = (spread(ours, 1), spread(peer, 1), spread(ratios, 2))
        print(f"| {metric.replace('_', ' ')} | {' | '.join(cells)} |")
    read = [spread([report["bytes_read"] / 1e9 for report in runs[e]], 2) for e in ENGINES]
    print(f"| GB read from disk per run | {' | '.join(read)} | |")


def spread(values: list[float], digits: int) -> str:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


if __name__ == "__main__":
    main()
