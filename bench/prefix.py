"""The time to the first token of a prompt: unknown, known from before, and known from disk.

python bench/prefix.py MODEL [--tokens 4096] [--rounds 3]

Each round takes a prompt of its own: one process reads it and asks again with a few tokens more,
another one asks once more after it has ended.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from colibri_mmap import Engine, Sampling

MORE = 8  # tokens that are new each time
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def ask(engine: Engine, ids: list[int]) -> tuple[float, list[int]]:
    """Seconds to the first token, and four tokens."""
    started = time.perf_counter()
    tokens = engine.generate(ids, 4, GREEDY)
    first = next(tokens)
    return time.perf_counter() - started, [first.id, *(token.id for token in tokens)]


def run(model: str, folder: Path, tokens: int, seed: int, lengths: list[int]) -> None:
    """Print a line for each length: seconds, tokens that were known, what was said."""
    ids = np.random.default_rng(seed).integers(100, 20_000, tokens + 2 * MORE).tolist()
    with Engine.open(model, ctx=tokens + 64) as engine:
        ask(engine, ids[-16:])  # warms up
        engine.store = engine.prefix_store(ram_bytes=4 << 30, directory=folder, disk_bytes=8 << 30)
        for length in lengths:
            seconds, said = ask(engine, ids[:length])
            print(seconds, engine.stats.cached_tokens, *said)
        engine.store.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        folder, seed, *lengths = options.child
        run(options.model, Path(folder), options.tokens, int(seed), [int(n) for n in lengths])
        return
    times: dict[str, list[float]] = {"unknown": [], "known": [], "from disk": []}
    for seed in range(options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, options.model, "--tokens", str(options.tokens)]
            lengths = [str(options.tokens), str(options.tokens + MORE)]
            lines = []
            for some in (lengths, lengths[1:]):
                arguments = [*command, "--child", folder, str(seed), *some]
                done = subprocess.run(arguments, check=True, capture_output=True, text=True)
                lines += [line.split() for line in done.stdout.splitlines()]
            assert lines[1][2:] == lines[2][2:], "the reply differs after a restart"
            for name, line in zip(times, lines, strict=True):
                times[name].append(float(line[0]))
                print(f"{name:10s} {float(line[0]):7.3f} s, {line[1]} tokens known", flush=True)
    whole = median(times["unknown"])
    for name, values in times.items():
        print(f"{name:10s} median {median(values):7.3f} s, {whole / median(values):6.1f} x")


if __name__ == "__main__":
    main()
