"""How fast the disk under a model is: direct reads of its own bytes, past the page cache."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack

from ..errors import ResourceError
from ..format.experts import expert_layers
from ..format.gguf import GGUF
from .pages import PAGE, Reservation

_PIECE = 4 << 20  # bytes of a sequential read
Read = tuple[int, int, int]
"""Shard, offset and size in bytes; offset and size are whole pages."""


class DiskProbe:
    """Reads parts of a model by O_DIRECT; ResourceError where the file system cannot do that."""

    def __init__(self, gguf: GGUF, seed: int = 0) -> None:
        self._gguf = gguf
        self._random = random.Random(seed)
        self._layers = list(expert_layers(gguf).values())

    def random_reads(self, count: int) -> list[Read]:
        """Whole experts in random order; pieces of the file for a model that has none."""
        if not self._layers:
            return self._random.choices(self.sequential_reads(), k=count)
        reads: list[Read] = []
        while len(reads) < count:
            layer = self._random.choice(self._layers)
            for extent in layer.extents(self._random.randrange(layer.n_experts)):
                start = extent.offset // PAGE * PAGE
                end = -(-(extent.offset + extent.nbytes) // PAGE) * PAGE
                reads.append((extent.shard, start, end - start))
        return reads

    def sequential_reads(self) -> list[Read]:
        """All files from start to end."""
        return [
            (number, start, _PIECE)
            for number, shard in enumerate(self._gguf.shards)
            for start in range(0, shard.size, _PIECE)
        ]

    def speed(self, reads: Sequence[Read], depth: int, seconds: float, nbytes: int) -> float:
        """Bytes per second of `depth` threads that do these reads, for so long or so much at most;
        0 if nothing was read."""
        with ExitStack() as stack:
            files = []
            for shard in self._gguf.shards:
                try:
                    file = os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
                except OSError as error:
                    raise ResourceError(
                        f"{shard.path}: the disk cannot be measured, since this file system has "
                        f"no direct reads ({error.strerror})"
                    ) from error
                stack.callback(os.close, file)
                files.append(file)
            return _timed(files, reads, depth, seconds, nbytes)


def _timed(
    files: list[int], reads: Sequence[Read], depth: int, seconds: float, nbytes: int
) -> float:
    done, largest = [0] * depth, max(size for _, _, size in reads)
    errors: list[OSError] = []
    queue, lock = iter(reads), threading.Lock()
    started = time.perf_counter()

    def work(number: int) -> None:
        buffer = Reservation(largest, "reading").buffer
        while time.perf_counter() - started < seconds and sum(done) < nbytes:
            with lock:
                read = next(queue, None)
            if read is None:
                return
            shard, offset, size = read
            try:
                done[number] += os.preadv(files[shard], [buffer[:size]], offset)
            except OSError as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=work, args=(number,)) for number in range(depth)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise ResourceError(f"the disk cannot be measured: {errors[0].strerror}") from errors[0]
    return sum(done) / (time.perf_counter() - started)
