"""Memory for the intermediate values of a forward pass: taken upwards, released by layer."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import ResourceError
from .pages import Reservation

_ALIGNMENT = 64
_SLACK = 64  # kernels may read, never write, this far past the end of a row
_LIMIT = 1 << 33


class Rows(NamedTuple):
    """float32 [count, width] at an address, row after row, `gap` bytes between them."""

    address: int
    count: int  # type: ignore[assignment]  # nobody counts values of the tuple
    width: int
    gap: int = 0

    @property
    def stride(self) -> int:
        return 4 * self.width + self.gap

    def split(self, parts: int) -> Rows:
        """The same memory with every row cut into `parts` rows, such as the heads of a token."""
        assert self.gap == 0
        return Rows(self.address, self.count * parts, self.width // parts)

    def join(self, parts: int) -> Rows:
        """The same memory with `parts` rows at a time as one row: the inverse of `split`."""
        assert self.gap == 0
        return Rows(self.address, self.count // parts, self.width * parts)

    def part(self, first: int, count: int) -> Rows:
        """`count` rows from row `first` on."""
        return Rows(self.address + first * self.stride, count, self.width, self.gap)

    def columns(self, first: int, width: int) -> Rows:
        """`width` values of every row from value `first` on."""
        return Rows(self.address + 4 * first, self.count, width, self.stride - 4 * width)


class Arena:
    """A stack of temporary arrays; the same sequence of requests gets the same addresses."""

    def __init__(self) -> None:
        self._reservation = Reservation(_LIMIT, "intermediate values")
        self._base = self._reservation.address
        self._bytes = self._reservation.bytes
        self._top = self._base

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` more bytes, 64-byte aligned, with unspecified content."""
        address = self._top
        self._top += (nbytes + _SLACK + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        if self._top > self._base + _LIMIT:
            raise ResourceError("one forward pass needs more than 8 GB of temporary memory")
        return address

    def rows(self, count: int, width: int) -> Rows:
        return Rows(self.take(4 * count * width), count, width)

    def copy_in(self, values: NDArray[np.generic]) -> int:
        """The address of a copy of an array."""
        address = self.take(values.nbytes)
        start = address - self._base
        self._bytes[start : start + values.nbytes] = (
            np.ascontiguousarray(values).view(np.uint8).ravel()
        )
        return address

    def view(self, rows: Rows) -> NDArray[np.float32]:
        """The values of rows taken from this arena; valid until they are released."""
        start, shape = rows.address - self._base, (rows.count, rows.width)
        return np.ndarray(shape, np.float32, self._bytes, start, (rows.stride, 4))

    def integers(self, address: int, count: int) -> NDArray[np.int64]:
        """int64 [count] at an address taken from this arena; valid until it is released."""
        start = address - self._base
        return self._bytes[start : start + 8 * count].view(np.int64)

    def temporaries(self) -> Temporaries:
        """Everything taken inside `with` is released at its end."""
        return Temporaries(self)

    def mark(self) -> int:
        """The present top, to be given to `release`."""
        return self._top

    def release(self, mark: int) -> None:
        """Everything taken since `mark` is free again."""
        self._top = mark


class Temporaries:
    """The span of an arena's use; a class, because a decode step has hundreds of them."""

    __slots__ = ("_arena", "_mark")

    def __init__(self, arena: Arena) -> None:
        self._arena = arena

    def __enter__(self) -> None:
        self._mark = self._arena.mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._arena.release(self._mark)
