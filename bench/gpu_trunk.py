"""What the kernels between a block's products take on this machine's GPU.

    python bench/gpu_trunk.py [--tokens 1] [--context 1024 8192 32768] [--prompt 512]

Every kernel is launched many times in one graph, over the caches of several layers in turn, so that
keys and values come from memory. Times are those of the host, per launch; COLIBRI_DEVICE=host
rehearses without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from colibri_mmap.runtime import trunkkernels as kernels
from colibri_mmap.runtime.arena import Rows
from colibri_mmap.runtime.device import DeviceBackend, KernelLaunch, probe
from colibri_mmap.runtime.devicearena import DeviceArena, UploadRing
from colibri_mmap.runtime.kv import KVShape
from colibri_mmap.runtime.trunkkernels import AttentionGrid, Slices

CACHE_BYTES = 256 << 20  # of all layers: more than a GPU's L2 holds
PROMPT_LAYERS = 4  # that are measured with prompts, which are busy with a layer for long
PROMPT_AT = (0, 4096)  # tokens before a prompt
LAUNCHES = 96


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    width: int
    heads: int
    shape: KVShape


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 32, KVShape(4, 128, 128)),
    Model("gpt-oss-20b", 2880, 64, KVShape(8, 64, 64)),
    Model("Mixtral-8x7B", 4096, 32, KVShape(8, 128, 128)),
)


class Bench:
    def __init__(self, device: DeviceBackend) -> None:
        self.device, self.real = device, device.kind == "cuda"
        self.arena, self.ring = DeviceArena(device), UploadRing(device)

    def put(self, values: np.ndarray) -> int:
        address = self.arena.take(values.nbytes)
        self.ring.upload(address, values)
        return address

    def rows(self, count: int, width: int) -> Rows:
        return Rows(self.put(np.ones((count, width), np.float32)), count, width)

    def microseconds(
        self, launches: Sequence[Sequence[KernelLaunch]], least: int = LAUNCHES
    ) -> float:
        """Of one of several pieces of work, which take turns; the median of five rounds."""
        for each in launches[0]:
            self.device.launch(*each, self.device.compute)
        turns = -(-least // len(launches)) if self.real else 1
        again = self.device.joined([each for work in launches for each in work] * turns)
        rounds = []
        for _ in range(6):
            self.finish()
            start = time.perf_counter()
            again()
            self.finish()
            rounds.append(time.perf_counter() - start)
        return statistics.median(rounds[1:]) / (turns * len(launches)) * 1e6

    def finish(self) -> None:
        self.device.synchronize(self.device.record(self.device.compute))


def attention(
    bench: Bench, model: Model, tokens: int, context: int, kv_type: str
) -> tuple[float, float]:
    """Microseconds of a layer's attention, and bytes of keys and values per microsecond."""
    shape, group = model.shape, model.heads // model.shape.heads
    ring = -(-context // 64) * 64
    element = 2 if kv_type == "f16" else 4
    sizes = [ring * n * element for n in (shape.key_size, shape.padded_value_size)]
    nbytes = shape.heads * sum(sizes)
    layers = max(1, CACHE_BYTES // nbytes) if bench.real else 1
    slices = Slices(
        bench.put(np.array([0, tokens, context - tokens, 0], np.int32)), 1, tokens, context
    )
    grid = AttentionGrid.of(slices, shape, group)
    q = bench.rows(tokens, model.heads * shape.key_size)
    k = bench.rows(tokens, shape.heads * shape.key_size)
    out = bench.rows(tokens, model.heads * shape.value_size)
    partial = bench.arena.take(grid.partial_bytes(tokens, model.heads, shape.value_size))

    def work() -> Iterator[list[KernelLaunch]]:
        for _ in range(min(layers, PROMPT_LAYERS) if tokens > 1 else layers):
            keys = bench.put(np.zeros(nbytes, np.uint8))
            place = (keys, keys + shape.heads * sizes[0], *sizes, ring)
            where = (shape, kv_type, slices, bench.put(np.array(place, np.uint64)))
            how = (grid, partial, 0.1, (1 << 30, 1 << 30), 0)
            yield [
                kernels.append_kv(k, k, *where),
                *kernels.attention(q, out, *where, *how),
            ]

    taken = bench.microseconds(list(work()), LAUNCHES if tokens == 1 else PROMPT_LAYERS)
    return taken, nbytes / taken


def small(bench: Bench, model: Model, tokens: int) -> dict[str, float]:
    """Microseconds of the other kernels."""
    x, y = (bench.rows(tokens, model.width) for _ in range(2))
    q = bench.rows(tokens, model.heads * model.shape.key_size)
    table = bench.rows(tokens, model.shape.key_size // 2)
    weight = bench.put(np.ones(max(model.width, model.shape.key_size), np.float32))
    by_head = q.split(model.heads)
    size = model.shape.key_size
    return {
        name: bench.microseconds([[launch]])
        for name, launch in {
            "norm": kernels.rms_norm(x, y, weight, 1e-6),
            "norm of heads": kernels.rms_norm(by_head, by_head, weight, 1e-6),
            "rope": kernels.rope(q, model.heads, size, table, table, half_split=True),
            "add": kernels.add_rows(x, y),
        }.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--context", type=int, nargs="+", default=[1024, 8192, 32768])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    options = parser.parse_args()
    device = probe()
    if isinstance(device, str):
        sys.exit(device)
    print(f"{device.name}, {options.tokens} tokens")
    for model in MODELS:
        bench = Bench(device)
        others = ", ".join(f"{n} {us:.1f}" for n, us in small(bench, model, options.tokens).items())
        print(f"{model.name}: {others} us")
        for kv_type in ("f16", "f32"):
            for context in options.context:
                with bench.arena.temporaries():
                    taken, rate = attention(bench, model, options.tokens, context, kv_type)
                result = f"{taken:8.1f} us, K and V at {rate / 1e3:.1f} GB/s"
                print(f"  {kv_type} attention at {context:6d}: {result}")
            for before in PROMPT_AT if options.prompt else ():
                with bench.arena.temporaries():
                    end = before + options.prompt
                    taken, _ = attention(bench, model, options.prompt, end, kv_type)
                print(f"  {kv_type} {options.prompt} tokens at {before:5d}: {taken:8.1f} us")
        bench.finish()
        bench.arena.close()
    device.close()


if __name__ == "__main__":
    main()
