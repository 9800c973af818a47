"""How fast experts get into VRAM: the cache's uploads against bare copies, on the same device.

    pinned      one buffer of pinned memory copied again and again: what the bus can do
    pageable    the same from ordinary memory, which the driver copies first
    fill        reading experts of a file in the page cache into pinned buffers, by threads, alone
    cache       VramCache.warm: read, copied and booked, until the last byte is in VRAM

python bench/gpu_uploads.py prints one JSON object; the cache should reach 85 % of pinned.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.runtime.device import DeviceBackend, probe
from colibri_mmap.runtime.upload import PIECE_BYTES, Fill
from colibri_mmap.runtime.vram import VramCache
from colibri_mmap.runtime.vrampolicy import SlotPolicy

EXPERT_BYTES = {"Qwen3-30B-A3B Q4_K": 2_654_208, "gpt-oss-120b MXFP4": 13_226_496}
THREADS = (1, 2, 4, 8, 12)
WANTED = 0.85  # of the pinned rate
_REPEATS = 5
_LAST = 64  # experts among which is the last that is copied

Rates = dict[str, float]


def measure_uploads(
    backend: DeviceBackend, *, total: int = 4 << 30, file_bytes: int = 1 << 30
) -> dict[str, Rates]:
    """GB/s of each way, by size of expert; `total` bytes are brought to the device each time."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "experts"
        piece = np.random.default_rng(0).integers(0, 256, 1 << 24, np.uint8)
        with path.open("wb") as file:
            for _ in range(file_bytes // piece.nbytes):
                file.write(piece)
        for name, nbytes in EXPERT_BYTES.items():
            results[name] = _measure(backend, path, nbytes, max(1, total // nbytes))
    return results


def _measure(backend: DeviceBackend, path: Path, nbytes: int, count: int) -> Rates:
    pinned = backend.allocate_staging(nbytes)
    pinned[:] = 1
    rates = {
        "pinned": _bare_rate(backend, pinned, count),
        "pageable": _bare_rate(backend, pinned.copy(), count),
    }
    places = path.stat().st_size // nbytes
    with path.open("rb") as file:
        fd = file.fileno()

        def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
            at = number % places * nbytes + start
            if os.preadv(fd, [staging.data], at) != len(staging):
                raise OSError("the file ends early")

        for threads in THREADS:
            rates[f"fill, {threads} threads"] = _fill_rate(backend, fill, nbytes, count, threads)
            rates[f"cache, {threads} threads"] = _cache_rate(backend, fill, nbytes, count, threads)
    best = max(rate for name, rate in rates.items() if name.startswith("cache"))
    rates["cache to pinned"] = round(best / rates["pinned"], 3)
    return rates


def _rate(nbytes: int, work: Callable[[], object]) -> float:
    """GB/s in the median of some repeats, after one that is not counted."""
    times = []
    for _ in range(_REPEATS + 1):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return round(nbytes / median(times[1:]) / 1e9, 2)


def _bare_rate(backend: DeviceBackend, source: NDArray[np.uint8], count: int) -> float:
    target, stream = backend.allocate(source.nbytes), backend.stream()

    def copy() -> None:
        for _ in range(count):
            backend.upload(target.address, source, stream)
        backend.synchronize(backend.record(stream))

    try:
        return _rate(count * source.nbytes, copy)
    finally:
        target.free()


def _fill_rate(
    backend: DeviceBackend,
    fill: Fill,
    nbytes: int,
    count: int,
    threads: int,
) -> float:
    buffers = [backend.allocate_staging(min(nbytes, PIECE_BYTES)) for _ in range(threads)]

    def part(index: int) -> None:
        buffer = buffers[index]
        for number in range(index, count, threads):
            for start in range(0, nbytes, len(buffer)):
                fill(number, start, buffer[: nbytes - start])

    with ThreadPoolExecutor(threads) as pool:
        return _rate(count * nbytes, lambda: list(pool.map(part, range(threads))))


def _cache_rate(
    backend: DeviceBackend,
    fill: Fill,
    nbytes: int,
    count: int,
    threads: int,
) -> float:
    """Filling an empty cache; making and freeing it are not counted."""
    sizes, rates, times = np.full(count, nbytes, np.int64), np.ones(count), []
    for _ in range(_REPEATS + 1):
        policy = SlotPolicy(sizes, int(sizes.sum()), layers=1, rates=rates)
        cache = VramCache(backend, policy, fill, threads=threads)
        start = time.perf_counter()
        cache.warm()
        cache.drain()
        cache.use(np.arange(count)[-_LAST:])  # the compute stream waits for what was copied last
        backend.synchronize(backend.record(backend.compute))
        times.append(time.perf_counter() - start)
        assert cache.take_stats().failed == 0
        cache.close()
    return round(count * nbytes / median(times[1:]) / 1e9, 2)


if __name__ == "__main__":
    found = probe()
    if isinstance(found, str):
        sys.exit(found)
    print(json.dumps({"device": found.name, "uploads": measure_uploads(found)}, indent=1))
    found.close()
