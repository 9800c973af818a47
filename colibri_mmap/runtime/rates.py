"""How fast this machine moves a model's bytes: from disk, from memory, through the kernels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..errors import ResourceError
from ..format.experts import is_expert_tensor
from ..format.gguf import GGUF
from .diskspeed import DiskProbe
from .ops import Mode, Ops
from .pages import Reservation
from .pool import Pool
from .profile import MachineRates
from .warmup import compile_tasks, model_tasks
from .weights import Matrix, Weights

_DISK_SECONDS, _DISK_BYTES = 2.0, 1 << 30  # per way of reading, at most
_MEMORY_BYTES = 256 << 20  # larger than caches are
_SECONDS = 0.4
_MOST_MATRICES = 64


def measure_rates(
    gguf: GGUF, threads: int, mode: Mode, progress: Callable[[str, int, int], None]
) -> MachineRates:
    """All rates, in a few seconds; those of the disk are 0 where there are no direct reads."""
    progress("measuring the disk", 0, 0)
    try:
        probe = DiskProbe(gguf)
        sequential = probe.speed(probe.sequential_reads(), 2, _DISK_SECONDS, _DISK_BYTES)
        one, four, sixteen = (
            probe.speed(probe.random_reads(1024), depth, _DISK_SECONDS, _DISK_BYTES)
            for depth in (1, 4, 16)
        )
    except ResourceError:
        sequential = one = four = sixteen = 0.0
    progress("measuring memory and kernels", 0, 0)
    memory = _memory_rate(threads)
    compile_tasks(model_tasks(gguf, mode, "f16"), progress)
    kernels = _kernel_rate(gguf, threads, mode)
    return MachineRates(sequential, one, four, sixteen, memory, kernels)


def _memory_rate(threads: int) -> float:
    """Bytes per second that so many threads can read."""
    words = Reservation(_MEMORY_BYTES, "a measurement").bytes.view(np.int64)
    words.fill(1)
    parts = np.array_split(words, threads)
    done = [0] * threads
    started = time.perf_counter()

    def read(number: int, part: NDArray[np.int64]) -> None:
        while time.perf_counter() - started < _SECONDS:
            np.add.reduce(part)
            done[number] += part.nbytes

    workers = [threading.Thread(target=read, args=item) for item in enumerate(parts)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return sum(done) / (time.perf_counter() - started)


def _kernel_rate(gguf: GGUF, threads: int, mode: Mode) -> float:
    """Bytes of weights per second in products with one token, over matrices that every token uses.

    They are read into memory before.
    """
    weights, pool = Weights(gguf), Pool(threads)
    try:
        ops = Ops(pool, mode)
        matrices = _trunk_matrices(weights)
        inputs = {m: ops.arena.rows(1, m.columns) for m in matrices}
        for rows in inputs.values():
            ops.arena.view(rows)[:] = 1
        done, seconds, rounds = 0, 0.0, 0
        while seconds < _SECONDS or rounds < 2:
            started = time.perf_counter()
            for matrix, rows in inputs.items():
                with ops.temporaries():
                    ops.linear(rows, matrix)
            if rounds:  # the first one reads from disk
                seconds += time.perf_counter() - started
                done += sum(m.rows * m.row_bytes for m in matrices)
            rounds += 1
        return done / seconds
    finally:
        pool.close()
        weights.close()


def _trunk_matrices(weights: Weights) -> list[Matrix]:
    """Some of the larger ones."""
    infos = [
        info
        for name, info in weights.gguf.tensors.items()
        if len(info.shape) == 2 and not is_expert_tensor(name) and name != "token_embd.weight"
    ] or [weights.gguf.tensor("token_embd.weight")]
    infos.sort(key=lambda info: -info.nbytes)
    return [
        weights.matrix(info.name, rows=info.shape[1], columns=info.shape[0])
        for info in infos[:_MOST_MATRICES]
    ]
