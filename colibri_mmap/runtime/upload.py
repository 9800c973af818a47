"""From files to device memory: worker threads fill a ring of pinned buffers, a stream copies them.

A file mapping is pageable memory: the driver would copy it through a buffer of its own, and make
the caller wait. So the bytes are read into pinned memory by threads, which release Python's lock
while they do, and the device fetches them from there while the next buffer is being filled.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from .device import Address, DeviceBackend, DeviceError, Event

Fill: TypeAlias = Callable[[int, NDArray[np.uint8]], None]
"""Reads an expert, by its number, into a buffer of its size; OSError."""

RING_BYTES = 256 << 20  # of pinned memory, at most, unless two experts take more


class Priority(IntEnum):
    """What is brought first."""

    DEMAND, PREFETCH, WARM = range(3)


@dataclass(frozen=True, slots=True)
class Upload:
    """An expert on its way: its slot's address and size, and the event of the slot's last use."""

    number: int
    address: Address
    nbytes: int
    after: Event | None


@dataclass(slots=True, eq=False)
class _Buffer:
    """Pinned memory, and the event that tells that the device has fetched its content."""

    memory: NDArray[np.uint8]
    fetched: Event | None = None


class Uploader:
    """Brings experts to the device in the background.

    `arrived(upload, ready)` is called by the worker once the copy is on its stream, `ready` being
    the event behind it, and `failed(upload, error)` if there will be no copy. Without threads the
    caller of `submit` does the work.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        fill: Fill,
        largest: int,
        *,
        threads: int,
        arrived: Callable[[Upload, Event], None],
        failed: Callable[[Upload, Exception], None],
    ) -> None:
        """`largest`: bytes of the largest expert; ResourceError if there is no memory to pin."""
        self._backend, self._fill = backend, fill
        self._arrived, self._failed = arrived, failed
        self._copies = backend.stream()
        count = max(2, min(threads + 2, RING_BYTES // max(1, largest)))
        self._buffers = [_Buffer(backend.allocate_staging(largest)) for _ in range(count)]
        self._free = deque(self._buffers)  # the one used longest ago first
        self._waiting: tuple[deque[Upload], ...] = tuple(deque() for _ in Priority)
        lock = threading.Lock()
        self._changed, self._idle = threading.Condition(lock), threading.Condition(lock)
        self._busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name="colibri-upload", daemon=True)
            for _ in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, upload: Upload, priority: Priority) -> None:
        """Bring an expert to the device."""
        with self._changed:
            self._waiting[priority].append(upload)
            self._changed.notify()
        if not self._threads:
            taken = self._take()
            assert taken
            self._perform(*taken)

    def drain(self) -> None:
        """Wait until everything submitted has arrived or failed."""
        with self._idle:
            self._idle.wait_for(lambda: not self._busy and not any(self._waiting))

    def close(self) -> None:
        """End the threads; what they have not begun is dropped, what is on its way arrives."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with suppress(DeviceError):  # those that use what was brought have been told already
            for buffer in self._buffers:
                if buffer.fetched is not None:
                    self._backend.synchronize(buffer.fetched)

    def _work(self) -> None:
        while (taken := self._take()) is not None:
            self._perform(*taken)

    def _take(self) -> tuple[Upload, _Buffer] | None:
        """The next upload and a buffer for it; None when closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or (self._free and any(self._waiting)))
            if self._closed:
                return None
            self._busy += 1
            waiting = next(queue for queue in self._waiting if queue)
            return waiting.popleft(), self._free.popleft()

    def _perform(self, upload: Upload, buffer: _Buffer) -> None:
        try:
            self._arrived(upload, self._copy(upload, buffer))
        except (OSError, DeviceError) as error:
            self._failed(upload, error)
        finally:
            with self._changed:
                self._busy -= 1
                self._free.append(buffer)
                self._changed.notify()
                if not self._busy and not any(self._waiting):
                    self._idle.notify_all()

    def _copy(self, upload: Upload, buffer: _Buffer) -> Event:
        """Fill a buffer and have it copied to the slot; the event behind the copy."""
        if buffer.fetched is not None:
            self._backend.synchronize(buffer.fetched)  # the device still reads the buffer
        memory = buffer.memory[: upload.nbytes]
        self._fill(upload.number, memory)
        if upload.after is not None:
            self._backend.wait(self._copies, upload.after)  # kernels still read the slot
        self._backend.upload(upload.address, memory, self._copies)
        buffer.fetched = self._backend.record(self._copies, sleep=True)
        return buffer.fetched
