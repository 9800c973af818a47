"""Packing: from any GGUF model to a container, resumable, in little memory (docs/format.md).

The container grows under a temporary name beside its target. Each unit (the trunk, then each layer)
is made durable before the journal says so; the header, and with it the magic number, comes last.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from pathlib import Path

import xxhash

from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.format.container import ALIGNMENT
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.journal import Journal
from colibri_mmap.format.layout import ContainerPlan, RecordPlan, plan_container
from colibri_mmap.format.stream import CHUNK, StreamReader

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""

_SYNC_EVERY = 64 << 20  # bytes that may wait in the page cache


def pack(
    source: str | PathLike[str],
    target: str | PathLike[str],
    *,
    align: int = ALIGNMENT,
    order: Mapping[int, Sequence[int]] | None = None,
    progress: Progress | None = None,
    force: bool = False,
) -> Path:
    """Write the container of a model to `target` and return its path.

    `align` is the alignment of expert slabs, `order` may list a layer's experts as they shall be
    stored, `force` allows replacing a file. A rerun after an interruption continues and gives the
    same bytes.
    """
    gguf = open_gguf(source)
    target = Path(target)
    plan = plan_container(gguf, align, order)
    blank = plan.header({})
    size = len(blank) + sum(unit.nbytes for unit in plan.units())
    partial = target.with_name(f".{target.name}.partial")
    journal_path = target.with_name(f".{target.name}.journal")
    try:
        _check_target(gguf, target, force)
        _check_space(partial, size)
        resumable = partial.exists() and partial.stat().st_size == size
        with Journal(journal_path, _identity(gguf, blank), resumable) as journal:
            _write(gguf, plan, partial, size, journal, progress)
            partial.rename(target)
            _sync_directory(target.parent)
            journal.remove()
    except OSError as error:
        raise _translated(error, target) from error
    return target


def _check_target(gguf: GGUF, target: Path, force: bool) -> None:
    if not target.parent.is_dir():
        raise ArgumentError(f"{target.parent}: no such directory; create it first")
    if not target.exists():
        return
    if any(target.samefile(shard.path) for shard in gguf.shards):
        raise ArgumentError(f"{target}: is the model itself; name another target")
    if not target.is_file():
        raise ArgumentError(f"{target}: is not a file; name the container to write")
    if not force:
        raise ArgumentError(f"{target}: exists; use --force to replace it")


def _check_space(partial: Path, size: int) -> None:
    written = partial.stat().st_blocks * 512 if partial.exists() else 0
    disk = os.statvfs(partial.parent)
    free = disk.f_bavail * disk.f_frsize
    if size - written > free:
        raise ResourceError(
            f"{partial.parent}: the container needs {size - written} bytes, {free} are free;"
            " free some space or name another disk"
        )


def _identity(gguf: GGUF, blank: bytes) -> str:
    """Changes whenever a rerun would write other bytes: with source, options or format."""
    sources = []
    for shard in gguf.shards:
        status = shard.path.stat()
        sources.append([str(shard.path.resolve()), status.st_size, status.st_mtime_ns])
    return xxhash.xxh3_128_hexdigest(blank + json.dumps(sources).encode())


def _write(
    gguf: GGUF,
    plan: ContainerPlan,
    partial: Path,
    size: int,
    journal: Journal,
    progress: Progress | None,
) -> None:
    """Write what the journal does not list, then the header, all durable on return."""
    units = plan.units()
    total = sum(unit.nbytes for unit in units)
    start = size - total
    done = sum(unit.nbytes for unit in units if unit.name in journal.finished)
    paths = tuple(shard.path for shard in gguf.shards)
    with partial.open("r+b" if journal.finished else "wb", buffering=0) as file:
        os.ftruncate(file.fileno(), size)
        with StreamReader(paths) as reader:
            writer = _Writer(file.fileno(), reader, done, total, progress)
            for unit in units:
                if unit.name not in journal.finished:
                    writer.position = start + unit.offset
                    checksums = [writer.copy(record) for record in unit.records()]
                    writer.sync()
                    journal.finish(unit.name, checksums)
        header = plan.header(journal.finished)
        os.pwrite(file.fileno(), header, 0)
        os.fsync(file.fileno())


class _Writer:
    """Appends records at a position of the partial file and keeps its pages from piling up."""

    def __init__(
        self, file: int, reader: StreamReader, done: int, total: int, progress: Progress | None
    ) -> None:
        self.position = 0
        self._file = file
        self._reader = reader
        self._done = done
        self._total = total
        self._progress = progress
        self._unsynced = 0
        self._zeros = memoryview(bytes(CHUNK))

    def copy(self, record: RecordPlan) -> int:
        """Write a record and return its checksum."""
        digest = xxhash.xxh3_64()
        start = self.position
        for piece in record.pieces:
            self._fill(start + piece.at, digest)
            source = piece.source
            for chunk in self._reader.chunks(source.shard, source.offset, source.nbytes):
                self._append(chunk, digest)
        self._fill(start + record.nbytes, digest)
        return digest.intdigest()

    def sync(self) -> None:
        """Make what was written durable and drop its pages."""
        os.fdatasync(self._file)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._unsynced = 0

    def _fill(self, end: int, digest: xxhash.xxh3_64) -> None:
        while self.position < end:
            self._append(self._zeros[: end - self.position], digest)

    def _append(self, data: memoryview, digest: xxhash.xxh3_64) -> None:
        digest.update(data)
        while data:
            count = os.pwrite(self._file, data, self.position)
            self.position += count
            self._done += count
            self._unsynced += count
            data = data[count:]
        if self._unsynced >= _SYNC_EVERY:
            self.sync()
        if self._progress:
            self._progress(self._done, self._total)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _translated(error: OSError, target: Path) -> Exception:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{target.parent}: the disk is full; free some space and run again")
    return ResourceError(f"{target}: cannot be written: {error.strerror}")
