"""The thread pool: Python threads parked in a nogil loop that run phases of jobs.

A launch is a list of phases; all jobs of a phase may run at the same time, the next phase starts
when they are done. Jobs are cut into items of `chunk` units; the threads, the caller among them,
claim items one by one, so that a busy core costs little. Fork and join take about a microsecond:
the workers spin for a while before they sleep on a futex. Who computes an item changes nothing.
"""

from __future__ import annotations

import platform
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from .simd import INLINE, load_i64, store_i64
from .task import SCRATCH_BYTES, Task

Job = tuple[int, ...]  # task address, units, chunk, arguments...

JOB_WORDS = 24
ARGUMENTS = 4  # words before the arguments: task, units, chunk, first item
_TASK, _UNITS, _CHUNK, _FIRST = (8 * word for word in range(ARGUMENTS))
_JOB_BYTES = 8 * JOB_WORDS
_PHASE_BYTES = 8 * 3  # jobs address, number of jobs, number of items

# The control block, one cache line per word. NEXT holds epoch << 32 | next item.
_EPOCH, _NEXT, _DONE, _SLEEPERS, _JOBS, _JOB_COUNT, _ITEMS, _STOP = (64 * line for line in range(8))
_CLOSED = 0x7FFFFFFF
_SPINS = 20_000  # about half a millisecond: longer than the Python code between two launches
_FUTEX_WAIT, _FUTEX_WAKE = 128, 129  # with FUTEX_PRIVATE_FLAG
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98}.get(platform.machine(), 202)
_I64 = ir.IntType(64)


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, _I64.as_pointer())


@intrinsic
def _load_acquire(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_word(builder, arguments[0]), "acquire", 8)

    return types.int64(address), generate


@intrinsic
def _store_release(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.cast(builder, arguments[1], signature.args[1], types.int64)
        builder.store_atomic(number, _word(builder, arguments[0]), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(address, value), generate


@intrinsic
def _add_atomic(typing: Any, address: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = context.cast(builder, arguments[1], signature.args[1], types.int64)
        return builder.atomic_rmw("add", _word(builder, arguments[0]), number, "seq_cst")

    return types.int64(address, value), generate


@intrinsic
def _compare_and_swap(typing: Any, address: Any, old: Any, new: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        where = _word(builder, arguments[0])
        result = builder.cmpxchg(where, arguments[1], arguments[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@intrinsic
def _pause(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() == "x86_64":
            kind = ir.FunctionType(ir.VoidType(), [])
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, kind, name), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _yield_core(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, kind, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _futex(typing: Any, address: Any, operation: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        given = [
            context.cast(builder, a, t, types.int64)
            for a, t in zip(arguments, signature.args, strict=True)
        ]
        zero = ir.Constant(_I64, 0)
        return builder.call(function, [ir.Constant(_I64, _SYS_FUTEX), *given, zero, zero, zero])

    return types.int64(address, operation, value), generate


@intrinsic
def _call_task(typing: Any, address: Any, arguments_at: Any, lo: Any, hi: Any, scratch: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_I64] * 4)
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), generate


@njit(**INLINE)
def _run_item(jobs, count, item, scratch):
    """Find the job of an item by bisection and run it."""
    low, high = 0, count - 1
    while low < high:
        middle = (low + high + 1) >> 1
        if load_i64(jobs + middle * _JOB_BYTES + _FIRST) <= item:
            low = middle
        else:
            high = middle - 1
    job = jobs + low * _JOB_BYTES
    units, chunk = load_i64(job + _UNITS), load_i64(job + _CHUNK)
    lo = (item - load_i64(job + _FIRST)) * chunk
    hi = min(units, lo + chunk)
    _call_task(load_i64(job + _TASK), job + 8 * ARGUMENTS, lo, hi, scratch)


@njit(**INLINE)
def _work(control, scratch):
    """Claim and run items of the open phase until none is left."""
    while True:
        word = _load_acquire(control + _NEXT)
        item = word & 0xFFFFFFFF
        if item >= _load_acquire(control + _ITEMS):
            return
        if _compare_and_swap(control + _NEXT, word, word + 1):
            # The unfinished item keeps the phase open, so the job table stays as it is.
            _run_item(load_i64(control + _JOBS), load_i64(control + _JOB_COUNT), item, scratch)
            _add_atomic(control + _DONE, 1)


@njit("void(int64, int64)", nogil=True, boundscheck=False, cache=True)
def _worker(control, scratch):
    """The life of a worker thread."""
    last = 0
    while True:
        spins = 0
        epoch = _load_acquire(control + _EPOCH)
        while epoch == last:
            _pause()
            spins += 1
            if spins > _SPINS:
                _add_atomic(control + _SLEEPERS, 1)
                _futex(control + _EPOCH, _FUTEX_WAIT, last)
                _add_atomic(control + _SLEEPERS, -1)
                spins = 0
            epoch = _load_acquire(control + _EPOCH)
        last = epoch
        if load_i64(control + _STOP) != 0:
            return
        _work(control, scratch)


@njit("void(int64, int64, int64, int64)", nogil=True, boundscheck=False, cache=True)
def _run(control, phases, count, scratch):
    """Run the phases one after another; the calling thread takes part."""
    for phase in range(phases, phases + count * _PHASE_BYTES, _PHASE_BYTES):
        jobs, job_count, items = load_i64(phase), load_i64(phase + 8), load_i64(phase + 16)
        if items <= 1:
            if items == 1:
                _run_item(jobs, job_count, 0, scratch)
            continue
        epoch = load_i64(control + _EPOCH) + 1
        _store_release(control + _NEXT, (epoch << 32) | _CLOSED)
        _store_release(control + _DONE, 0)
        store_i64(control + _JOBS, jobs)
        store_i64(control + _JOB_COUNT, job_count)
        _store_release(control + _ITEMS, items)
        _store_release(control + _NEXT, epoch << 32)
        _store_release(control + _EPOCH, epoch)
        if _load_acquire(control + _SLEEPERS) > 0:
            _futex(control + _EPOCH, _FUTEX_WAKE, 0x7FFFFFFF)
        _work(control, scratch)
        spins = 0
        while _load_acquire(control + _DONE) < items:
            _pause()
            spins += 1
            if spins > _SPINS:
                _yield_core()


@njit("void(int64)", nogil=True, boundscheck=False, cache=True)
def _stop(control):
    store_i64(control + _STOP, 1)
    _add_atomic(control + _EPOCH, 1)
    _futex(control + _EPOCH, _FUTEX_WAKE, 0x7FFFFFFF)


def job(task: Task, units: int, chunk: int, *arguments: int) -> Job:
    """`units` of work for a task, handed out `chunk` at a time."""
    return (task.address, units, chunk, *arguments)


class Launch:
    """Phases of jobs in the form the workers read.

    `jobs` int64 [n, JOB_WORDS] may be changed between runs, as long as units and chunks stay.
    """

    def __init__(self, phases: Iterable[Sequence[Job]]) -> None:
        phases = [phase for phase in phases if phase]
        self.jobs = np.zeros((sum(map(len, phases)), JOB_WORDS), np.int64)
        self.phases = np.zeros((len(phases), 3), np.int64)
        row = 0
        for index, phase in enumerate(phases):
            self.phases[index, 0] = self.jobs.ctypes.data + row * _JOB_BYTES
            self.phases[index, 1] = len(phase)
            items = 0
            for task, units, chunk, *arguments in phase:
                words = self.jobs[row]
                words[0], words[1], words[2], words[3] = task, units, chunk, items
                words[ARGUMENTS : ARGUMENTS + len(arguments)] = arguments
                items += -(-units // chunk)
                row += 1
            self.phases[index, 2] = items
        self.address, self.count = self.phases.ctypes.data, len(phases)


class Pool:
    """`threads` threads, the caller included; one launch at a time.

    The threads end with `close`, or when the pool is no longer referred to.
    """

    def __init__(self, threads: int) -> None:
        assert threads >= 1
        self.threads = threads
        memory = np.zeros(threads * SCRATCH_BYTES + 4096, np.uint8)
        self._control = -(-memory.ctypes.data // 64) * 64
        scratch = self._control + 1024
        self._scratch = [scratch + n * SCRATCH_BYTES for n in range(threads)]
        workers = [
            threading.Thread(
                target=_worker, args=(self._control, own), name="colibri-kernel", daemon=True
            )
            for own in self._scratch[1:]
        ]
        for worker in workers:
            worker.start()
        self._end = weakref.finalize(self, _end_workers, self._control, workers, memory)

    def run(self, launch: Launch) -> None:
        """Run a launch to its end; other Python threads go on meanwhile."""
        _run(self._control, launch.address, launch.count, self._scratch[0])

    def close(self) -> None:
        """End the threads; the pool cannot be used afterwards."""
        self._end()


def _end_workers(control: int, workers: list[threading.Thread], memory: NDArray[np.uint8]) -> None:
    """Stop and join the workers, which use `memory` until then."""
    _stop(control)
    for worker in workers:
        worker.join()
