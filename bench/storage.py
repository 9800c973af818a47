"""The disk under a file as a measurement needs it: counters, read-ahead, and a cold page cache."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_mmap.errors import ResourceError

_SECTOR = 512  # bytes: the unit of the kernel's counters, whatever the disk's own is
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """A block device by its directory in /sys; a partition shares the queue of its disk."""

    directory: Path

    @classmethod
    def under(cls, path: Path) -> BlockDevice | None:
        """The device that holds `path`, or None where the file system has none of its own."""
        number = path.stat().st_dev
        directory = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
        return cls(directory.resolve()) if directory.exists() else None

    @property
    def _read_ahead_file(self) -> Path:
        queue = self.directory / "queue"
        return (queue if queue.exists() else self.directory.parent / "queue") / "read_ahead_kb"

    @property
    def read_ahead_kb(self) -> int:
        return int(self._read_ahead_file.read_text())

    def bytes_read(self) -> int:
        """What all processes together have read from it since it appeared."""
        return int((self.directory / "stat").read_text().split()[2]) * _SECTOR

    @contextmanager
    def read_ahead(self, kb: int) -> Iterator[None]:
        """Set read_ahead_kb within the block; the old value returns at its end."""
        before = self.read_ahead_kb
        try:
            self._read_ahead_file.write_text(str(kb))
            yield
        finally:
            self._read_ahead_file.write_text(str(before))


@contextmanager
def alone_on_disk() -> Iterator[None]:
    """Wait until other measurements have ended, and keep new ones waiting: all share one disk."""
    with _DROP_CACHES.open("wb") as file:  # which root may not read
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def cached_bytes(path: Path) -> int:
    """How much of a file is in the page cache, by mincore; of a file of others it says all."""
    size = path.stat().st_size
    if size == 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped,
    ):
        view = np.frombuffer(mapped, np.uint8)
        residency = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
        failed = libc.mincore(
            ctypes.c_void_p(view.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(residency.ctypes.data),
        )
        del view  # or the map could not be closed
        if failed:
            raise ResourceError(f"{path}: mincore failed: {os.strerror(ctypes.get_errno())}")
    return int((residency & 1).sum()) * mmap.PAGESIZE


def drop_page_cache(files: Sequence[Path], patience: float = 20.0) -> None:
    """Empty the machine's page cache.

    Pages of these files that another process maps stay: after `patience` seconds a ResourceError.
    """
    deadline = time.monotonic() + patience
    while True:
        os.sync()
        _DROP_CACHES.write_text("1")
        kept = {path: nbytes for path in files if (nbytes := cached_bytes(path))}
        if not kept:
            return
        if time.monotonic() > deadline:
            break
        time.sleep(0.5)
    path, nbytes = next(iter(kept.items()))
    raise ResourceError(
        f"{path}: {nbytes / 1e6:.1f} MB stay in the page cache; end the process that has it mapped"
    )
