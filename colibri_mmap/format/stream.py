"""Reading large ranges once, in order, without filling memory or the page cache."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from colibri_mmap.errors import ModelReadError

CHUNK = 8 << 20
_MARGIN = 4 << 20  # the kernel keeps a large folio unless the dropped range covers all of it


class StreamReader:
    """Reads ranges of some files through one buffer and drops their pages behind."""

    def __init__(self, paths: tuple[Path, ...]) -> None:
        self._paths = paths
        self._files: dict[int, int] = {}
        self._buffer = memoryview(bytearray(CHUNK))

    def __enter__(self) -> StreamReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # also what was read ahead
            os.close(file)

    def chunks(self, shard: int, offset: int, nbytes: int) -> Iterator[memoryview]:
        """The bytes of a range; each chunk is valid until the next one is asked for."""
        path = self._paths[shard]
        end = offset + nbytes
        try:
            if shard not in self._files:
                self._files[shard] = os.open(path, os.O_RDONLY)
            file = self._files[shard]
            while offset < end:
                count = os.preadv(file, [self._buffer[: min(CHUNK, end - offset)]], offset)
                if count == 0:
                    raise ModelReadError(f"{path}: ends at byte {offset}: it shrank while read")
                yield self._buffer[:count]
                start = max(0, offset - _MARGIN)
                os.posix_fadvise(file, start, offset + count - start, os.POSIX_FADV_DONTNEED)
                offset += count
        except OSError as error:
            reason = f"reading at byte {offset} failed: {error.strerror}; check the disk"
            raise ModelReadError(f"{path}: {reason}") from error
