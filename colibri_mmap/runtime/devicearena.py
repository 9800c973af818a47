"""Device memory for the intermediate values of a step, and the ways between it and the host."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arena import Arena, Rows
from .device import ALIGNMENT, Address, DeviceBackend, DeviceMemory, Event

CHUNK_BYTES = 32 << 20  # that the arena grows by, at least
_HALF_BYTES = 4 << 20  # of the ring of staging memory
_MOST_PLACES = 256  # of rows that are read to the host


def aligned(nbytes: int) -> int:
    """Rounded up to what device memory is aligned to."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class DeviceArena:
    """A stack of temporary arrays; the same sequence of requests gets the same addresses.

    It grows by chunks, which stay. Work is ordered by the compute stream, so that memory may be
    taken anew as soon as the launches that use it were made.
    """

    def __init__(self, backend: DeviceBackend, nbytes: int = 0) -> None:
        """`nbytes` are taken now: OutOfDeviceMemory."""
        self._backend = backend
        self._chunks: list[DeviceMemory] = [backend.allocate(nbytes)] if nbytes else []
        self._top = (0, 0)  # chunk, bytes of it

    @property
    def nbytes(self) -> int:
        """What the arena holds of the device's memory."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def take(self, nbytes: int) -> Address:
        """The address of `nbytes` more bytes with unspecified content."""
        chunk, used = self._top
        needed = aligned(nbytes)
        while chunk < len(self._chunks) and used + needed > self._chunks[chunk].nbytes:
            chunk, used = chunk + 1, 0
        if chunk == len(self._chunks):
            self._chunks.append(self._backend.allocate(max(needed, CHUNK_BYTES)))
        self._top = (chunk, used + needed)
        return Address(self._chunks[chunk].address + used)

    def rows(self, count: int, width: int) -> Rows:
        return Rows(self.take(4 * count * width), count, width)

    def mark(self) -> tuple[int, int]:
        """The present top, to be given to `release`."""
        return self._top

    def release(self, mark: tuple[int, int]) -> None:
        """Everything taken since `mark` is free again."""
        self._top = mark

    def temporaries(self) -> DeviceTemporaries:
        """Everything taken inside `with` is released at its end."""
        return DeviceTemporaries(self)

    def close(self) -> None:
        """Give the memory back; nothing may use it any more."""
        while self._chunks:
            self._chunks.pop().free()
        self._top = (0, 0)


class DeviceTemporaries:
    """The span of an arena's use, and of the host's where one is given."""

    __slots__ = ("_arena", "_host", "_host_mark", "_mark")

    def __init__(self, arena: DeviceArena, host: Arena | None = None) -> None:
        self._arena, self._host = arena, host

    def __enter__(self) -> None:
        self._mark = self._arena.mark()
        self._host_mark = self._host.mark() if self._host else 0

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._arena.release(self._mark)
        if self._host is not None:
            self._host.release(self._host_mark)


class UploadRing:
    """Copies of arrays on their way to the device, in pinned memory of two halves.

    A half is written again when what it held has arrived.
    """

    def __init__(self, backend: DeviceBackend, half_bytes: int = _HALF_BYTES) -> None:
        self._backend, self._half_bytes = backend, half_bytes
        self._memory = backend.allocate_staging(2 * half_bytes)
        self._left: list[Event] = [None, None]  # when the copies out of a half are done
        self._half, self._used = 0, 0

    def upload(self, address: int, *arrays: NDArray[Any]) -> None:
        """Copy arrays, which may be changed at once, in the order of the compute stream.

        They come one behind another, each aligned.
        """
        sources = [np.ascontiguousarray(values).view(np.uint8).reshape(-1) for values in arrays]
        starts = [0]
        for source in sources[:-1]:
            starts.append(starts[-1] + aligned(len(source)))
        total = starts[-1] + len(sources[-1])
        if total <= self._half_bytes:
            place = self._take(total)
            for start, source in zip(starts, sources, strict=True):
                place[start : start + len(source)] = source
            if total:
                self._backend.upload(address, place, self._backend.compute)
            return
        for begin, source in zip(starts, sources, strict=True):
            for start in range(0, len(source), self._half_bytes):
                piece = source[start : start + self._half_bytes]
                place = self._take(len(piece))
                place[:] = piece
                self._backend.upload(address + begin + start, place, self._backend.compute)

    def _take(self, nbytes: int) -> NDArray[np.uint8]:
        if self._used + nbytes > self._half_bytes:
            other = 1 - self._half
            self._left[self._half] = self._backend.record(self._backend.compute)
            if self._left[other] is not None:
                self._backend.synchronize(self._left[other])
            self._half, self._used = other, 0  # last: a Ctrl-C may end the wait
        start = self._half * self._half_bytes + self._used
        self._used += -(-nbytes // 64) * 64
        return self._memory[start : start + nbytes]


class DeviceReading:
    """Device rows on their way to the host's arena; see `Downloads`."""

    __slots__ = ("_backend", "_event", "_host", "_values")

    def __init__(
        self, backend: DeviceBackend, event: Event, host: Arena, values: list[NDArray[np.float32]]
    ) -> None:
        self._backend, self._event, self._host, self._values = backend, event, host, values

    def wait(self) -> tuple[Rows, ...]:
        """The rows, in the host's arena."""
        self._backend.synchronize(self._event)
        found = []
        for values in self._values:
            rows = self._host.rows(*values.shape)
            self._host.view(rows)[:] = values
            found.append(rows)
        return tuple(found)


class Downloads:
    """Brings rows to the host through pinned memory, one reading at a time."""

    def __init__(self, backend: DeviceBackend, host: Arena) -> None:
        self._backend, self._host = backend, host
        self._memory = backend.allocate_staging(1 << 20)
        self._places: dict[tuple[Rows, ...], list[NDArray[np.float32]]] = {}

    def start(self, *rows: Rows) -> DeviceReading:
        """Begin to copy rows, as they are after what was launched so far."""
        backend = self._backend
        places = self._places.get(rows)
        if places is None:
            places = self._find_places(rows)
        for values, r in zip(places, rows, strict=True):
            if values.size:
                backend.download(values.view(np.uint8), r.address, backend.compute)
        return DeviceReading(backend, backend.record(backend.compute), self._host, places)

    def _find_places(self, rows: tuple[Rows, ...]) -> list[NDArray[np.float32]]:
        """Where rows come to lie, which is kept: a step of one token asks for the same ones."""
        total = sum(4 * r.count * r.width for r in rows)
        if total > len(self._memory):
            self._memory = self._backend.allocate_staging(1 << (total - 1).bit_length())
            self._places.clear()
        elif len(self._places) > _MOST_PLACES:
            self._places.clear()
        places, start = [], 0
        for r in rows:
            assert r.gap == 0
            place = self._memory[start : start + 4 * r.count * r.width]
            places.append(place.view(np.float32).reshape(r.count, r.width))
            start += len(place)
        self._places[rows] = places
        return places
