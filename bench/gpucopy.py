"""How fast a GPU moves memory: what the rates of kernels are measured against.

Every rate is over several GB, many times the L2 cache, and counts all that is read or written.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gpu import Card

_MOST = 4 << 30  # bytes of source and of target each
_BLOCK = 16 * 256 * 4  # bytes of a block of threads: four words of 16 bytes a thread
_ROUNDS = 9
_TEXT = """
extern "C" __global__ void copy_words(const uint4* from, uint4* to) {
    size_t at = blockIdx.x * (size_t)1024 + threadIdx.x;
    uint4 a = from[at], b = from[at + 256], c = from[at + 512], d = from[at + 768];
    to[at] = a; to[at + 256] = b; to[at + 512] = c; to[at + 768] = d;
}
extern "C" __global__ void read_words(const uint4* from, uint4* to) {
    size_t at = blockIdx.x * (size_t)1024 + threadIdx.x;
    uint4 a = from[at], b = from[at + 256], c = from[at + 512], d = from[at + 768];
    unsigned all = a.x & b.y & c.z & d.w & a.y & b.z & c.w & d.x & a.z & b.w & c.x & d.y;
    all &= a.w & b.x & c.y & d.z;
    if (all == 0xffffffffu) to[at] = a;  // which the content has nowhere
}
"""


def rates(card: Card) -> dict[str, float]:
    """Bytes per second of a copy by the driver, of one by a kernel, and of reading alone."""
    free, _ = card.device.memory_info()
    nbytes = min(_MOST, free // 4, 1 << 26 if card.device.kind == "host" else _MOST)
    nbytes -= nbytes % _BLOCK
    source, target = card.random_bytes(nbytes), card.device.allocate(nbytes)
    addresses = source.address, target.address
    found = {"copy by the driver": 2 * nbytes / _driver_seconds(card, *addresses, nbytes)}
    if card.device.kind == "cuda":
        for name, kernel, moved in (("copy", "copy_words", 2), ("reading", "read_words", 1)):
            seconds = _kernel_seconds(card, kernel, *addresses, nbytes)
            found[f"{name} by a kernel"] = moved * nbytes / seconds
    for memory in (source, target):
        memory.free()
    return found


def copy_rate(card: Card) -> float:
    """Bytes read and written per second by the faster of the copies."""
    return max(rate for name, rate in rates(card).items() if name.startswith("copy"))


def _driver_seconds(card: Card, source: int, target: int, nbytes: int) -> float:
    if card.device.kind == "host":
        start = time.perf_counter()
        ctypes.memmove(target, source, nbytes)
        return time.perf_counter() - start
    return _seconds(card, lambda: card.copy(target, source, nbytes))


def _kernel_seconds(card: Card, name: str, source: int, target: int, nbytes: int) -> float:
    import cupy

    kernel, stream = cupy.RawKernel(_TEXT, name), card.device.compute
    arguments = np.uint64(source), np.uint64(target)
    with stream:
        return _seconds(card, lambda: kernel((nbytes // _BLOCK,), (256,), arguments))


def _seconds(card: Card, work: Callable[[], Any]) -> float:
    """Median by the GPU's clock."""
    from cupy import cuda

    work()
    start, stop, times = cuda.Event(), cuda.Event(), []
    for _ in range(_ROUNDS):
        start.record(card.device.compute)
        work()
        stop.record(card.device.compute)
        stop.synchronize()
        times.append(cuda.get_elapsed_time(start, stop) / 1e3)
    return float(statistics.median(times))
