"""The trunk: what every token needs (attention, norms, routers, shared experts, output head).

It is read in file order when a model is opened and, where memory is short, locked, so that the
stream of experts cannot wash it out. An embedding that the output does not share lies outside it: a
token needs one row of that, and a fault may read no more.
"""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ModelReadError
from ..format.experts import is_expert_tensor, skipped_blocks
from ..format.gguf import GGUF
from .pages import PAGE, MappedFile

_STEP = 8 << 20  # bytes read ahead of what is waited for


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes of a shard that belong to the trunk; `tensor` is the first one in it."""

    shard: int
    offset: int
    nbytes: int
    tensor: str


def trunk_ranges(gguf: GGUF) -> list[Range]:
    """The trunk in file order, neighbours merged."""
    tied = "output.weight" not in gguf.tensors
    skipped = tuple(f"blk.{number}." for number in skipped_blocks(gguf))
    tensors = sorted(
        (info.shard, info.offset, info.nbytes, name)
        for name, info in gguf.tensors.items()
        if not is_expert_tensor(name)
        and not name.startswith(skipped)
        and (tied or name != "token_embd.weight")
    )
    ranges: list[Range] = []
    for shard, offset, nbytes, name in tensors:
        last = ranges[-1] if ranges else None
        if last and last.shard == shard and offset - last.offset - last.nbytes < PAGE:
            nbytes += offset - last.offset
            ranges[-1] = Range(shard, last.offset, nbytes, last.tensor)
        else:
            ranges.append(Range(shard, offset, nbytes, name))
    return ranges


def mark_embedding(gguf: GGUF, files: list[MappedFile]) -> None:
    """Make a fault in an embedding outside the trunk read one page: rows are used at random."""
    if "output.weight" in gguf.tensors and "token_embd.weight" in gguf.tensors:
        info = gguf.tensors["token_embd.weight"]
        files[info.shard].expect_single_pages(info.offset, info.nbytes)


def may_lock(nbytes: int) -> bool:
    """Whether the system lets this process lock so much memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return os.geteuid() == 0 or soft == resource.RLIM_INFINITY or soft >= nbytes


class Trunk:
    """Reads the trunk in a thread of its own, from the start; `wait` before the first use."""

    def __init__(self, files: list[MappedFile], ranges: list[Range], *, lock: bool) -> None:
        self._files, self._ranges = files, ranges
        self.nbytes = sum(r.nbytes for r in ranges)
        self.locked = lock
        self._done_bytes = 0
        self._error: ModelReadError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="colibri-trunk", daemon=True)
        self._thread.start()

    def wait(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Until all of it is in memory; ModelReadError names the shard and tensor that failed.

        `progress(done, total)` in bytes is called now and then.
        """
        while self._thread.is_alive():
            self._thread.join(0.1)
            if progress is not None:
                progress(self._done_bytes, self.nbytes)
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _read(self) -> None:
        steps = [
            (r, start, min(_STEP, r.nbytes - start))
            for r in self._ranges
            for start in range(0, r.nbytes, _STEP)
        ]
        for index, (r, start, nbytes) in enumerate(steps):
            for ahead, ahead_start, ahead_bytes in steps[index : index + 2]:
                self._files[ahead.shard].announce(ahead.offset + ahead_start, ahead_bytes)
            if self._stop.is_set():
                return
            file = self._files[r.shard]
            try:
                file.populate(r.offset + start, nbytes)
            except OSError as error:
                self._error = ModelReadError(
                    f"{file.path}: tensor {r.tensor!r} or one after it cannot be read "
                    f"({error.strerror}); check the disk, and the file with colibri-mmap verify"
                )
                return
            if self.locked:
                self.locked = file.lock(r.offset + start, nbytes)
            self._done_bytes += nbytes
