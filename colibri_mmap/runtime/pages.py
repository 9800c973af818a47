"""The only file that speaks to the kernel about memory: file mappings, reservations, counters."""

from __future__ import annotations

import mmap
import resource
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelReadError, ResourceError

_MAP_NORESERVE = 0x4000  # Linux; Python's mmap names it from 3.13 on


class MappedFile:
    """A whole file mapped read-only and shared: its pages are the page cache's own.

    `bytes` uint8 [size] and every address in it die with `close`.
    """

    def __init__(self, path: Path, size: int) -> None:
        """Map `path`, which had `size` bytes when its header was checked."""
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelReadError(f"{path}: cannot be mapped ({error}); check the file") from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        if self.bytes.size != size:
            raise ModelReadError(f"{path}: changed while it was opened; try again")
        self.address = self.bytes.ctypes.data

    def close(self) -> None:
        """Unmap, unless an array of the caller's still refers to the pages; then that does it."""
        del self.bytes
        try:
            self._map.close()
        except BufferError:
            del self._map


class Reservation:
    """Zeroed anonymous memory whose pages are taken from the machine only when they are written."""

    def __init__(self, nbytes: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self._map = mmap.mmap(-1, max(nbytes, 1), flags=flags)
        except (OSError, ValueError, OverflowError) as error:
            raise ResourceError(
                f"cannot reserve {nbytes / 1e9:.1f} GB of address space ({error}); "
                "choose a smaller context with --ctx-size or raise the limit (ulimit -v)"
            ) from error
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.address = self.bytes.ctypes.data


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
