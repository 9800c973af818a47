"""How long opening a model takes: a large vocabulary, and one tensor per expert.

    python bench/reader.py

Prints the best of five runs and, for the vocabulary, one run of gguf-py's reader.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np

from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf

TOKENS, MERGES = 152_000, 151_000
LAYERS, EXPERTS = 75, 256


def best(action: Callable[[], object], runs: int = 5) -> float:
    """Milliseconds of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times) * 1e3


def write_vocabulary(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "bench")
    writer.add_token_list([f"token{i}" for i in range(TOKENS)])
    writer.add_token_merges([f"left{i} right{i}" for i in range(MERGES)])
    writer.add_tensor("output.weight", np.zeros(8, np.float32))
    write(writer)


def write_experts(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "bench")
    matrix = np.zeros((8, 8), np.int8)
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for name in ("gate", "up", "down"):
                writer.add_tensor(f"blk.{layer}.ffn_{name}.{expert}.weight", matrix)
    write(writer)


def write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        vocabulary, experts = Path(directory, "vocabulary.gguf"), Path(directory, "experts.gguf")
        write_vocabulary(vocabulary)
        write_experts(experts)
        tokens = "tokenizer.ggml.tokens"
        opened = best(lambda: open_gguf(vocabulary))
        decoded = best(lambda: open_gguf(vocabulary).strs(tokens))
        peer = best(lambda: gguf.GGUFReader(vocabulary), runs=1)
        print(
            f"{TOKENS} tokens, {MERGES} merges: open {opened:.0f} ms, with tokens {decoded:.0f} ms"
        )
        print(f"    gguf-py: {peer:.0f} ms")
        opened = best(lambda: open_gguf(experts))
        mapped = best(lambda: expert_layers(open_gguf(experts)))
        print(f"{3 * LAYERS * EXPERTS} expert tensors: open {opened:.0f} ms, map {mapped:.0f} ms")


if __name__ == "__main__":
    main()
