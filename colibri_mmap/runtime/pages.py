"""The only file that speaks to the kernel about memory: mappings, read-ahead, eviction, faults.

What each call really does is measured in docs/io.md; the traps that shape this file: one WILLNEED
reads at most `read_ahead_kb`, so ranges are announced in pieces; fadvise(DONTNEED) frees nothing
that is still mapped, so the mapping lets go first; mlock on cold pages reads too much, so pages are
populated before.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelReadError, ResourceError

PAGE = mmap.PAGESIZE
ANNOUNCED_PIECE = 128 << 10  # bytes: the smallest read_ahead_kb that systems are shipped with

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.13 on
_MAP_FIXED = 0x10
_MADV_RANDOM = 1
_MADV_DONTNEED = 4
_MADV_POPULATE_READ = 22  # Linux 5.14
_libc = ctypes.CDLL(None, use_errno=True)  # a CDLL call releases the GIL, mmap.madvise does not
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mmap.argtypes = (
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
)
_libc.mmap.restype = ctypes.c_void_p


class MappedFile:
    """A whole file mapped read-only and shared: its pages are the page cache's own.

    `bytes` uint8 [size] and every address in it die with `close`. Offsets and sizes are in bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Map `path`, which had `size` bytes when its header was checked."""
        self.path, self.size = path, size
        try:
            self.fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelReadError(f"{path}: cannot be opened ({error.strerror})") from error
        try:
            self._map = mmap.mmap(self.fd, 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            os.close(self.fd)
            raise ModelReadError(f"{path}: cannot be mapped ({error}); check the file") from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if self.bytes.size != size:
            self.close()
            raise ModelReadError(f"{path}: changed while it was opened; try again")
        self.address = self.bytes.ctypes.data
        self._version = self._current_version()
        self._single_pages: list[tuple[int, int]] = []
        self._locked: list[tuple[int, int]] = []

    @property
    def changed(self) -> bool:
        """Whether someone has written to the file since it was mapped."""
        return self._current_version() != self._version

    def _current_version(self) -> tuple[int, int]:
        status = os.fstat(self.fd)
        return status.st_mtime_ns, status.st_size

    def remap(self) -> None:
        """Map the file anew over whatever replaced its pages; advice and locks are renewed."""
        shared = mmap.MAP_SHARED | _MAP_FIXED
        found = _libc.mmap(self.address, self.size, mmap.PROT_READ, shared, self.fd, 0)
        assert found == self.address
        single_pages, self._single_pages = self._single_pages, []
        for offset, nbytes in single_pages:
            self.expect_single_pages(offset, nbytes)
        locked, self._locked = self._locked, []
        for offset, nbytes in locked:
            self.lock(offset, nbytes)

    def announce(self, offset: int, nbytes: int) -> None:
        """Start reading a range into the page cache, without waiting and no byte too many."""
        start = offset // PAGE * PAGE
        for piece in range(start, offset + nbytes, ANNOUNCED_PIECE):
            length = min(ANNOUNCED_PIECE, offset + nbytes - piece)
            os.posix_fadvise(self.fd, piece, length, os.POSIX_FADV_WILLNEED)

    def populate(self, offset: int, nbytes: int) -> None:
        """Wait until a range is in memory and mapped; OSError if a page cannot be read."""
        start = (self.address + offset) // PAGE * PAGE
        end = -(-(self.address + offset + nbytes) // PAGE) * PAGE
        if _libc.madvise(start, end - start, _MADV_POPULATE_READ) == 0:
            return
        code = ctypes.get_errno()
        if code != errno.EINVAL:
            raise OSError(errno.EIO if code == errno.EFAULT else code, "the pages cannot be read")
        self._read_through(offset, nbytes)

    def _read_through(self, offset: int, nbytes: int) -> None:
        """What `populate` does before Linux 5.14: plain reads fill the cache and report errors."""
        buffer = bytearray(1 << 20)
        end = offset + nbytes
        while offset < end:
            count = os.preadv(self.fd, [memoryview(buffer)[: end - offset]], offset)
            if count == 0:
                raise OSError(errno.EIO, "the file ends early")
            offset += count

    def expect_single_pages(self, offset: int, nbytes: int) -> None:
        """Touches of a range are far apart: a fault reads one page, and nothing around it."""
        start = -(-(self.address + offset) // PAGE) * PAGE
        end = (self.address + offset + nbytes) // PAGE * PAGE
        if end > start:
            _libc.madvise(start, end - start, _MADV_RANDOM)
            self._single_pages.append((offset, nbytes))

    def evict(self, offset: int, nbytes: int) -> None:
        """Let the page cache forget the pages that lie wholly inside a range."""
        start = -(-(self.address + offset) // PAGE) * PAGE
        end = (self.address + offset + nbytes) // PAGE * PAGE
        if end > start:
            _libc.madvise(start, end - start, _MADV_DONTNEED)
            os.posix_fadvise(self.fd, start - self.address, end - start, os.POSIX_FADV_DONTNEED)

    def resident_bytes(self, offset: int, nbytes: int) -> int:
        """How much of a range is in the page cache, by mincore: whole pages it touches.

        For a file of another user mincore calls everything resident.
        """
        start = (self.address + offset) // PAGE * PAGE
        pages = -(-(self.address + offset + nbytes - start) // PAGE)
        states = np.empty(pages, np.uint8)
        if _libc.mincore(start, pages * PAGE, states.ctypes.data) != 0:
            return 0
        return int(np.count_nonzero(states & 1)) * PAGE

    def lock(self, offset: int, nbytes: int) -> bool:
        """Keep a populated range in memory until `close`; False where that is not allowed."""
        start = (self.address + offset) // PAGE * PAGE
        if _libc.mlock(start, self.address + offset + nbytes - start) != 0:
            return False
        self._locked.append((offset, nbytes))
        return True

    def close(self) -> None:
        """Unmap, unless an array of the caller's still refers to the pages; then that does it."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            del self._map


class Reservation:
    """Zeroed anonymous memory whose pages are taken from the machine only when they are written."""

    def __init__(self, nbytes: int, purpose: str) -> None:
        """`purpose` is what the error says the memory is for."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise ResourceError(
                f"cannot reserve {nbytes / 1e9:.1f} GB of address space for {purpose} ({error}); "
                "raise the limit (ulimit -v)"
            ) from error
        self.buffer = memoryview(self._map)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data


def forget_file(handle: int) -> None:
    """Let the page cache forget an open file, as far as it is written to the disk."""
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def has_populate_read() -> bool:
    """Whether this kernel can populate a mapping and report errors (Linux 5.14)."""
    page = Reservation(PAGE, "a test")
    return bool(_libc.madvise(page.address, PAGE, _MADV_POPULATE_READ) == 0)


@dataclass(frozen=True, slots=True)
class IoCounters:
    """What this process has read from disk so far (bytes), and its page faults."""

    bytes_read: int
    major_faults: int

    def __sub__(self, earlier: IoCounters) -> IoCounters:
        return IoCounters(
            self.bytes_read - earlier.bytes_read, self.major_faults - earlier.major_faults
        )


def io_counters() -> IoCounters:
    """The counters now; bytes are 0 where the kernel does not account them."""
    bytes_read = 0
    try:
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("read_bytes:"):
                bytes_read = int(line.split()[1])
    except OSError:
        pass
    return IoCounters(bytes_read, resource.getrusage(resource.RUSAGE_SELF).ru_majflt)
