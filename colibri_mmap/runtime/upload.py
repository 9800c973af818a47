"""From files to device memory: worker threads fill pinned buffers, a stream copies them.

A file mapping is pageable memory: the driver would copy it through a buffer of its own, and make
the caller wait. So the bytes are read into pinned memory by threads, which release Python's lock
while they do, and the device fetches them from there while the next buffer is being filled: each
thread has two buffers, which it uses by turns. They are small, to stay in the processor's caches,
and not so small that Python would be what takes time.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .device import ALIGNMENT, Address, DeviceBackend, DeviceError, Event, Stream

Fill: TypeAlias = Callable[[int, int, NDArray[np.uint8]], None]
"""Reads into a buffer what an expert, by its number, has from a byte of its slot on; OSError."""

PIECE_BYTES = 4 << 20  # of a buffer, at most


class Priority(IntEnum):
    """What is brought first."""

    DEMAND, PREFETCH, WARM = range(3)


class Upload(NamedTuple):
    """An expert on its way: its slot's address and size, and the event after its last use."""

    number: int
    address: Address
    nbytes: int
    after: Event


@dataclass(slots=True, eq=False)
class _Buffer:
    """Pinned memory, and the event that tells that the device has fetched its content."""

    memory: NDArray[np.uint8]
    fetched: Event | None = None


class _Lane:
    """The two buffers of a thread, and the way from there to the device."""

    def __init__(self, backend: DeviceBackend, fill: Fill, copies: Stream, nbytes: int) -> None:
        self._backend, self._fill, self._copies = backend, fill, copies
        self._buffers = [_Buffer(backend.allocate_staging(nbytes)) for _ in range(2)]

    def bring(self, upload: Upload, piece: int) -> Event:
        """Have an expert copied to its slot in pieces; the event behind the copies."""
        backend, copies = self._backend, self._copies
        ready: Event = None
        for start in range(0, upload.nbytes, piece):
            buffer = self._buffers[0]
            if buffer.fetched is not None:
                backend.synchronize(buffer.fetched)  # the device still reads the buffer
            memory = buffer.memory[: min(piece, upload.nbytes - start)]
            self._fill(upload.number, start, memory)
            if start == 0:
                backend.wait(copies, upload.after)  # kernels still read the slot
            backend.upload(upload.address + start, memory, copies)
            buffer.fetched = ready = backend.record(copies, sleep=True)
            self._buffers.reverse()
        return ready


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
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`largest`: bytes of the largest expert; ResourceError if there is no memory to pin."""
        assert piece_bytes % ALIGNMENT == 0
        self._backend, self._piece_bytes = backend, piece_bytes
        self._arrived, self._failed = arrived, failed
        self._copies = backend.stream()
        size = min(largest, piece_bytes)
        lanes = [_Lane(backend, fill, self._copies, size) for _ in range(max(1, threads))]
        self._own_lane = lanes[0]  # of the caller, where there are no threads
        self._waiting: tuple[deque[Upload], ...] = tuple(deque() for _ in Priority)
        # Taken as it is, not through a condition, which is Python code: a Ctrl-C might come there.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._idle = threading.Condition(self._lock)
        self._busy = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name="colibri-upload", daemon=True)
            for lane in lanes[:threads]
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, uploads: Sequence[Upload], priority: Priority) -> None:
        """Bring experts to the device, in this order."""
        with self._lock:
            self._waiting[priority].extend(uploads)
            self._changed.notify(len(uploads))
        if not self._threads:
            for _ in uploads:
                taken = self._take()
                assert taken
                self._perform(taken, self._own_lane)

    def drain(self) -> None:
        """Wait until everything submitted has arrived or failed."""
        with self._lock:
            self._idle.wait_for(lambda: not self._busy and not any(self._waiting))

    def close(self) -> None:
        """End the threads; what they have not begun is dropped, what is on its way arrives."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        with suppress(DeviceError):  # those that use what was brought have been told already
            self._backend.synchronize(self._backend.record(self._copies))

    def _work(self, lane: _Lane) -> None:
        while (taken := self._take()) is not None:
            self._perform(taken, lane)

    def _take(self) -> Upload | None:
        """The next upload; None when closed."""
        with self._lock:
            while not self._closed:
                for queue in self._waiting:
                    if queue:
                        self._busy += 1
                        return queue.popleft()
                self._changed.wait()
            return None

    def _perform(self, upload: Upload, lane: _Lane) -> None:
        # Pieces are of one size: Qwen's 2.6 MB at once, gpt-oss's 13.2 MB in four.
        parts = -(-upload.nbytes // self._piece_bytes)
        piece = -(-upload.nbytes // (parts * ALIGNMENT)) * ALIGNMENT
        try:
            self._arrived(upload, lane.bring(upload, piece))
        except (OSError, DeviceError) as error:
            self._failed(upload, error)
        finally:
            with self._lock:
                self._busy -= 1
                if not self._busy and not any(self._waiting):
                    self._idle.notify_all()
