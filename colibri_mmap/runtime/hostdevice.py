"""A device that is none: device memory is host memory, kernels are functions on it.

Eager, everything runs when it is asked for. Deferred, streams are queues: nothing runs until the
host waits, or now and then, in a random order among those that streams and events allow. A missing
fence is invisible to an eager device and corrupts data on a deferred one.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .device import ALIGNMENT, Address, Dimensions, KernelLaunch, OutOfDeviceMemory

Executor: TypeAlias = Callable[[str, Dimensions, Dimensions, Sequence[int | float]], None]
"""Runs a kernel: name, grid, block, arguments."""

DEFAULT_MEMORY = 2 << 30
_STEP_CHANCE = 0.3  # that something runs when work is given to a deferred device
_MOST_STEPS = 4
_LARGEST_GRID, _LARGEST_BLOCK = (2**31 - 1, 65535, 65535), (1024, 1024, 64)  # CUDA's limits
_MOST_THREADS = 1024  # of a block


class HostEvent:
    """Done once its place in the stream was reached."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = False


@dataclass(slots=True, eq=False)
class HostStream:
    """Operations to be run in order; an event is waited for."""

    operations: deque[Callable[[], None] | HostEvent] = field(default_factory=deque)


class HostMemory:
    """An allocation; it counts against the device's memory until freed."""

    def __init__(self, device: HostBackend, nbytes: int) -> None:
        self._device, self._bytes = device, np.empty(nbytes + ALIGNMENT, np.uint8)
        self._bytes[:] = 0xA5  # what is read before it was written shall be noticed
        self.address = Address(-(-self._bytes.ctypes.data // ALIGNMENT) * ALIGNMENT)
        self.nbytes = nbytes

    def free(self) -> None:
        """Give the memory back; safe to call twice."""
        self._device.forget(self)

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The content [nbytes], for tests."""
        start = self.address - self._bytes.ctypes.data
        return self._bytes[start : start + self.nbytes]


class HostBackend:
    """The DeviceBackend on host memory. `memory` bytes can be allocated; the rest is refused."""

    kind: Literal["host"] = "host"

    def __init__(
        self,
        executor: Executor,
        *,
        deferred: bool = False,
        seed: int = 0,
        memory: int = DEFAULT_MEMORY,
    ) -> None:
        self.name = "host memory in place of a GPU"
        self._executor, self._deferred, self._total = executor, deferred, memory
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._allocations: set[HostMemory] = set()
        self._streams: list[HostStream] = []
        self._launched: set[str] = set()
        self.compute = self.stream()

    # -------------------------------------------------------------------------- memory
    def memory_info(self) -> tuple[int, int]:
        with self._lock:
            return self._total - sum(memory.nbytes for memory in self._allocations), self._total

    def allocate(self, nbytes: int) -> HostMemory:
        with self._lock:
            free, total = self.memory_info()
            if nbytes > free:
                raise OutOfDeviceMemory(self.name, nbytes, free, total)
            memory = HostMemory(self, nbytes)
            self._allocations.add(memory)
        return memory

    def forget(self, memory: HostMemory) -> None:
        """Take an allocation off the books; its bytes live as long as something refers to it."""
        with self._lock:
            self._allocations.discard(memory)

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        return np.full(nbytes, 0x5A, np.uint8)

    # -------------------------------------------------------------------------- work
    def stream(self) -> HostStream:
        stream = HostStream()
        with self._lock:
            self._streams.append(stream)
        return stream

    def upload(self, address: int, source: NDArray[np.uint8], stream: HostStream) -> None:
        assert source.flags.c_contiguous
        self._give(stream, lambda: _copy(address, source.ctypes.data, source.nbytes))

    def download(self, target: NDArray[np.uint8], address: int, stream: HostStream) -> None:
        assert target.flags.c_contiguous
        self._give(stream, lambda: _copy(target.ctypes.data, address, target.nbytes))

    def prepare(self, kernels: Iterable[str]) -> None:
        """Nothing is compiled here."""

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: HostStream,
    ) -> None:
        assert _can_be_launched(grid, block), f"{kernel}: CUDA refuses {grid} blocks of {block}"
        self._launched.add(kernel)
        fixed = tuple(arguments)
        self._give(stream, lambda: self._executor(kernel, grid, block, fixed))

    def joined(self, launches: Sequence[KernelLaunch]) -> Callable[[], None]:
        assert self._launched.issuperset(each.kernel for each in launches), "a first launch"

        def launch() -> None:
            for each in launches:
                self.launch(*each, self.compute)

        return launch

    def matmul(
        self,
        out: int,
        x: int,
        w: int,
        tokens: int,
        rows: int,
        columns: int,
        stream: HostStream,
    ) -> None:
        def multiply() -> None:
            left, right = _floats(x, tokens, columns), _floats(w, rows, columns)
            np.matmul(left, right.T, out=_floats(out, tokens, rows))

        self._give(stream, multiply)

    # -------------------------------------------------------------------------- order
    def record(self, stream: HostStream, *, sleep: bool = False) -> HostEvent:
        event = HostEvent()
        self._give(stream, lambda: setattr(event, "done", True))
        return event

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        self._give(stream, event)

    def done(self, event: HostEvent) -> bool:
        return event.done

    def synchronize(self, event: HostEvent) -> None:
        self._run_until(lambda: event.done)

    def close(self) -> None:
        self._run_until(lambda: not any(stream.operations for stream in self._streams))

    def _give(self, stream: HostStream, operation: Callable[[], None] | HostEvent) -> None:
        with self._lock:
            stream.operations.append(operation)
            if not self._deferred:
                self._run_until(lambda: not stream.operations)
            elif self._random.random() < _STEP_CHANCE:
                for _ in range(self._random.randrange(_MOST_STEPS)):
                    self._step()

    def _run_until(self, condition: Callable[[], bool]) -> None:
        with self._lock:
            while not condition():
                assert self._step(), "a stream waits for an event that nothing records"

    def _step(self) -> bool:
        """Run the next operation of a random stream that can go on; whether there was one."""
        able = [stream for stream in self._streams if _can_go_on(stream)]
        if not able:
            return False
        operation = self._random.choice(able).operations.popleft()
        if not isinstance(operation, HostEvent):
            operation()
        return True


def open_host_device() -> HostBackend:
    """The eager device with the kernels' twins, as COLIBRI_DEVICE=host asks for it."""
    from .hostkernels import execute

    return HostBackend(execute)


def _can_be_launched(grid: Dimensions, block: Dimensions) -> bool:
    """Whether a GPU takes such a launch: none may be empty, each has its limits."""
    largest = _LARGEST_GRID + _LARGEST_BLOCK
    fits = all(0 < n <= most for n, most in zip((*grid, *block), largest, strict=True))
    return fits and math.prod(block) <= _MOST_THREADS


def _can_go_on(stream: HostStream) -> bool:
    if not stream.operations:
        return False
    first = stream.operations[0]
    return not isinstance(first, HostEvent) or first.done


def _copy(target: int, source: int, nbytes: int) -> None:
    ctypes.memmove(target, source, nbytes)


def _floats(address: int, rows: int, columns: int) -> NDArray[np.float32]:
    """The matrix [rows, columns] at an address."""
    memory = (ctypes.c_uint8 * (rows * columns * 4)).from_address(address)
    return np.frombuffer(memoryview(memory), np.float32).reshape(rows, columns)
