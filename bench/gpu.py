"""What the GPU kernels give on this machine's GPU.

    python bench/gpu.py [--section vectors|copy|kernels|latency] [--model Qwen3] ...

vectors   products of tests/data/gpu, computed again: every type of weights
copy      within the device: bytes read and written per second; and read alone
kernels   experts of a layer: bytes of weights per second, against the copy of the same run
latency   small launches, on the GPU alone and as the host gives them

Times are of the GPU: launches are captured as a graph and replayed, over weights of several times
the L2 cache, so that every read is one of memory. COLIBRI_DEVICE=host rehearses without a GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "runtime")]

from gpucopy import copy_rate, rates  # noqa: E402

from colibri_mmap.format.quants import GGMLType, row_bytes  # noqa: E402
from colibri_mmap.runtime.device import ALIGNMENT, probe  # noqa: E402
from colibri_mmap.runtime.devicekernels import (  # noqa: E402
    SILU,
    DeviceKernels,
    ExpertShape,
    ExpertStep,
    ExpertTables,
)

_HALVES = ((True, False), (False, True), (True, True))  # gate and up, down, both
TYPES = tuple(GGMLType[name] for name in ("Q4_K", "Q6_K", "Q8_0", "Q4_0", "MXFP4"))
COLUMNS = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Model:
    """Experts of one layer, and how many of them a token chooses."""

    name: str
    width: int
    hidden: int
    chosen: int
    types: tuple[GGMLType, ...] = TYPES


MODELS = (
    Model("Qwen3-30B-A3B", 2048, 768, 8),
    Model("Mixtral-8x7B", 4096, 14336, 2),
    Model("gpt-oss", 2880, 2880, 4, (GGMLType.MXFP4,)),
)


class Card:
    """The device with its kernels, and a clock: the GPU's own, or the host's for a rehearsal."""

    def __init__(self, device: Any) -> None:
        self.device = device
        self.kernels = DeviceKernels(device)
        self._graphs: list[Any] = []

    def seconds(self, work: Callable[[], object], atleast: float, *, graph: bool = True) -> float:
        """Median time of `work`, which only launches, on the GPU; cuBLAS cannot be in a graph."""
        work()  # compiles
        self.finish()
        if self.device.kind == "host":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        from cupy import cuda

        stream = self.device.compute
        again = work
        if graph:
            stream.begin_capture()
            work()
            captured = stream.end_capture()
            self._graphs.append(captured)
            again = lambda: captured.launch(stream)  # noqa: E731
        start, stop = cuda.Event(), cuda.Event()
        times: list[float] = []
        while sum(times) < atleast or len(times) < 5:
            start.record(stream)
            again()
            stop.record(stream)
            stop.synchronize()
            times.append(cuda.get_elapsed_time(start, stop) / 1e3)
        return statistics.median(times)

    def finish(self) -> None:
        """Wait for all work."""
        self.device.synchronize(self.device.record(self.device.compute))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Within the device."""
        if self.device.kind == "host":
            ctypes.memmove(target, source, nbytes)
            return
        from cupy.cuda import runtime

        stream = self.device.compute.ptr
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDeviceToDevice, stream)

    def upload(self, address: int, data: Any) -> None:
        staging = self.device.allocate_staging(data.nbytes)
        staging[:] = data
        self.device.upload(address, staging, self.device.compute)
        self.finish()

    def random_bytes(self, nbytes: int) -> Any:
        """Device memory of any content."""
        memory = self.device.allocate(nbytes)
        filled = min(nbytes, 32 << 20)
        self.upload(memory.address, np.random.default_rng(1).integers(0, 256, filled, np.uint8))
        while filled < nbytes:
            more = min(filled, nbytes - filled)
            self.copy(memory.address + filled, memory.address, more)
            filled += more
        return memory


# ------------------------------------------------------------------ sections
def show_vectors(card: Card, options: argparse.Namespace) -> None:
    from devicecases import Workbench
    from devicevectors import DEVIATION, compare

    def say(name: str, deviation: float) -> None:
        print(f"  {name:24s} {deviation:.1e}{'' if deviation <= DEVIATION else '  DIFFERS'}")

    worst = compare(Workbench(card.device), say)
    print(f"  {'as expected' if worst <= DEVIATION else 'NOT as expected'}, worst {worst:.1e}")


def show_copy(card: Card, options: argparse.Namespace) -> None:
    for name, rate in rates(card).items():
        print(f"  {name:20s} {rate / 1e9:6.0f} GB/s")


class Layers:
    """Enough layers of experts for `nbytes`; all tokens choose the same experts of a layer."""

    def __init__(
        self, card: Card, shape: ExpertShape, chosen: int, count: int, nbytes: int
    ) -> None:
        self.card, self.shape, self.count = card, shape, count
        device, self.pairs = card.device, chosen * count
        self.gate_bytes = row_bytes(shape.type, shape.width) * shape.hidden
        self.down_bytes = row_bytes(shape.down_type, shape.hidden) * shape.width
        parts = [
            -(-n // ALIGNMENT) * ALIGNMENT for n in (self.gate_bytes,) * 2 + (self.down_bytes,)
        ]
        layers = max(2, -(-nbytes // (chosen * sum(parts))))
        self.weights = card.random_bytes(layers * chosen * sum(parts))
        starts = self.weights.address + np.arange(layers * chosen) * sum(parts)
        self.tables: list[tuple[ExpertTables, Any]] = []
        for layer in starts.reshape(layers, chosen):
            addresses = np.zeros((6, chosen), np.int64)
            addresses[:3] = layer + np.cumsum([0, *parts[:2]])[:, None]
            tokens = np.repeat(np.arange(count), chosen)
            experts = np.tile(np.arange(chosen), count)
            weights = np.full(len(tokens), 1 / chosen, np.float32)
            tables = ExpertTables.of(addresses, experts, tokens, weights, count)
            memory, content = device.allocate(tables.nbytes), np.empty(tables.nbytes, np.uint8)
            tables.write(content)
            card.upload(memory.address, content)
            self.tables.append((tables, memory))
        kernels = card.kernels
        self.x = device.allocate(4 * count * shape.width)
        card.upload(self.x.address, np.ones(count * shape.width, np.float32).view(np.uint8))
        self.scratch = device.allocate(kernels.packed_bytes(count, shape.width))
        self.packed = kernels.pack(
            shape.type, self.x.address, count, shape.width, shape.width, self.scratch.address
        )
        self.work = device.allocate(kernels.experts_bytes(shape, self.pairs))
        self.out = device.allocate(4 * count * shape.width)

    @property
    def nbytes(self) -> tuple[int, int, int]:
        """Of all gates and ups, all downs, both."""
        matrices = len(self.tables) * self.tables[0][0].groups
        gate_up, down = 2 * matrices * self.gate_bytes, matrices * self.down_bytes
        return gate_up, down, gate_up + down

    def run(self, gate_up: bool, down: bool) -> None:
        """Every layer once."""
        for tables, memory in self.tables:
            step = ExpertStep(
                *(self.card.kernels, self.shape, tables, memory.address, self.packed),
                *(self.work.address, self.out.address, self.shape.width, True),
            )
            if gate_up:
                step.gate_up()
            if down:
                step.down()

    def free(self) -> None:
        for _, memory in self.tables:
            memory.free()
        for memory in (self.weights, self.x, self.scratch, self.work, self.out):
            memory.free()


def show_kernels(card: Card, options: argparse.Namespace) -> None:
    """GB/s of weights, which are only read; in brackets: of the copy's reads and writes."""
    copy = copy_rate(card)
    print(f"  copy {copy / 1e9:.0f} GB/s. GB/s of weights (of the copy); us a layer")
    print(f"  {'':22s} tokens  {'gate_up':>13s}  {'down':>13s}  {'all':>13s}  us")
    for model, type, count in _cases(options.model):
        shape = ExpertShape(type, type, model.width, model.hidden, SILU)
        layers = Layers(card, shape, model.chosen, count, options.weights << 20)
        times = [card.seconds(partial(layers.run, *parts), options.seconds) for parts in _HALVES]
        cells = [
            f"{nbytes / time / 1e9:6.0f} ({nbytes / time / copy:4.0%})"
            for nbytes, time in zip(layers.nbytes, times, strict=True)
        ]
        each = times[-1] / len(layers.tables) * 1e6
        print(f"  {model.name:14s} {type.name:7s} {count:6d}  {'  '.join(cells)}  {each:.1f}")
        layers.free()


def _cases(name: str) -> Iterator[tuple[Model, GGMLType, int]]:
    for model in MODELS:
        if name in model.name:
            for type in model.types:
                for count in COLUMNS:
                    yield model, type, count


def show_latency(card: Card, options: argparse.Namespace) -> None:
    """Small launches, 100 in a graph; and how fast the host gives them."""
    kernels, device, repeat = card.kernels, card.device, 100
    memory = card.random_bytes(64 << 20)
    scratch, out = device.allocate(1 << 20), device.allocate(1 << 20)
    x = device.allocate(1 << 20)
    card.upload(x.address, np.ones(1 << 18, np.float32).view(np.uint8))
    packed = kernels.pack(GGMLType.Q4_K, x.address, 1, 2048, 2048, scratch.address)
    floats = kernels.pack(GGMLType.F32, x.address, 1, 2048, 2048, 0)

    def quantise() -> None:
        kernels.pack(GGMLType.Q4_K, x.address, 1, 2048, 2048, scratch.address)

    def product(type: GGMLType, rows: int) -> Callable[[], None]:
        given = floats if type is GGMLType.F32 else packed
        return lambda: kernels.matvec(memory.address, type, rows, 2048, given, out.address, rows)

    cases = [("quantise 2048", quantise)]
    for type, rows in (("F32", 128), ("Q4_K", 512), ("Q4_K", 4096), ("Q6_K", 4096), ("Q8_0", 4096)):
        cases.append((f"{type} {rows} x 2048", product(GGMLType[type], rows)))
    for name, work in cases:
        on_card = card.seconds(partial(_repeated, work, repeat), options.seconds) / repeat
        card.finish()
        start = time.perf_counter()
        _repeated(work, repeat)
        host = (time.perf_counter() - start) / repeat
        card.finish()
        print(f"  {name:18s} {on_card * 1e6:6.2f} us on the GPU, {host * 1e6:6.1f} us to launch")
    for used in (memory, scratch, out, x):
        used.free()


def _repeated(work: Callable[[], None], times: int) -> None:
    for _ in range(times):
        work()


def show_prompts(card: Card, options: argparse.Namespace) -> None:
    """A prompt's tokens times a matrix: by the products of few tokens, and dequantised."""
    for name, rows, columns in (
        *(("Q4_K", *shape) for shape in ((768, 2048), (4096, 2048), (14336, 4096))),
        *(("Q6_K", *shape) for shape in ((4096, 2048), (4096, 14336))),
    ):
        for count in (32, 128, 512):
            times = _prompt_times(card, GGMLType[name], rows, columns, count, options.seconds)
            ways = f"{times[0] * 1e6:8.1f} us, dequantised {times[1] * 1e6:8.1f} us"
            print(f"  {name} {rows} x {columns}, {count:3d} tokens: {ways}")


def _prompt_times(
    card: Card, type: GGMLType, rows: int, columns: int, count: int, seconds: float
) -> tuple[float, ...]:
    kernels, device = card.kernels, card.device
    memory = card.random_bytes(rows * row_bytes(type, columns))
    sizes = (4 * rows * columns, 4 * count * columns, 4 * count * rows)
    floats, x, out = (device.allocate(size) for size in sizes)
    scratch = device.allocate(kernels.packed_bytes(count, columns))
    card.upload(x.address, np.ones(count * columns, np.float32).view(np.uint8))

    def rounded() -> None:
        packed = kernels.pack(type, x.address, count, columns, columns, scratch.address)
        kernels.matvec(memory.address, type, rows, columns, packed, out.address, rows)

    def dequantised() -> None:
        kernels.dequantise(memory.address, type, rows, columns, floats.address)
        shape = (count, rows, columns)
        device.matmul(out.address, x.address, floats.address, *shape, device.compute)

    times = tuple(card.seconds(work, seconds, graph=False) for work in (rounded, dequantised))
    for used in (memory, floats, x, out, scratch):
        used.free()
    return times


SECTIONS: dict[str, Callable[[Card, argparse.Namespace], None]] = {
    "vectors": show_vectors,
    "copy": show_copy,
    "kernels": show_kernels,
    "latency": show_latency,
    "prompts": show_prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--section", choices=SECTIONS, action="append")
    parser.add_argument("--seconds", type=float, default=0.05, help="of the GPU, per number")
    parser.add_argument("--weights", type=int, default=600, help="MB: several times the L2 cache")
    parser.add_argument("--model", default="", help="only those whose name contains this")
    options = parser.parse_args()
    start = time.perf_counter()
    found = probe()
    if isinstance(found, str):
        raise SystemExit(f"no GPU: {found}")
    card = Card(found)
    print(f"{card.device.name}, ready after {time.perf_counter() - start:.1f} s")
    for name in options.section or SECTIONS:
        print(f"{name}:")
        SECTIONS[name](card, options)


if __name__ == "__main__":
    main()
