"""What conversations have been, kept so that they go on without being read again.

Idle sequences stay in memory, least recently used first to go. What one has in common with a new
prompt is moved there if little else is lost, or copied. With a directory, a thread writes them to
disk part by part (sessiondirectory.py), and what is not in memory any more is read from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .kv import KVCache
from .scheduler import Sequence
from .sessiondirectory import NOTHING, Saved, SessionDirectory
from .sessionfiles import BLOCK, Kind, Part, chained, common_prefix
from .snapshots import Checkpoint, gather, without_the_closest

_TRIFLE = 32  # tokens that are sooner computed again than a sequence is copied or read
_SMALL_PART = 16  # what is lost of a sequence by less than one in so many is no reason to copy it
_MOST_CHECKPOINTS = 16  # of a sequence
_NEWEST = 4  # of them that are kept in any case: ends of prompts and replies

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """What the store holds now, and what it was good for; in bytes and tokens."""

    idle_sequences: int
    ram_bytes: int
    disk_files: int
    disk_bytes: int
    tokens_from_ram: int
    tokens_from_disk: int


@dataclass(slots=True, eq=False)
class _Idle:
    """A sequence that nobody uses; `tokens` are its ids."""

    sequence: Sequence
    tokens: Tokens
    written: bool = False

    @property
    def cache(self) -> KVCache:
        return self.sequence.cache


class PrefixStore:
    """Sequences by the tokens they begin with.

    `take`, `give` and `checkpoint` are called by one thread, `status` by any.
    """

    def __init__(
        self,
        new_sequence: Callable[[], Sequence],
        model: str,
        *,
        ram_bytes: int,
        directory: Path | None = None,
        disk_bytes: int = 0,
        length_limit: int = 0,
        keep_latest: bool = False,
        notify: Callable[[str], None] = lambda notice: None,
    ) -> None:
        """`model` names the file and all that decides about the content of a cache.

        In `directory` up to `disk_bytes` are kept. `length_limit` is the model's (scheduler.py).
        With `keep_latest` the sequence used last stays in memory, however large it is. `notify`
        gets one line when files cannot be used or written, from any thread.
        """
        self.model = model
        self._new_sequence, self.ram_bytes = new_sequence, ram_bytes
        self._cuttable = new_sequence().cache.cuttable
        self._length_limit, self._keep_latest = length_limit, keep_latest
        self._roots = [chained(f"{model} {kind}".encode(), _tokens(())) for kind in range(2)]
        self._idle: list[_Idle] = []  # the least recently used first
        self._from_ram = self._from_disk = 0
        self._lock = threading.RLock()  # guards the idle sequences and what follows
        self._changed = threading.Condition(self._lock)
        self._closing = False
        self._directory: SessionDirectory | None = None
        self._writer: threading.Thread | None = None
        if directory is not None:
            self._directory = SessionDirectory(directory, model, disk_bytes, notify)
            self._writer = threading.Thread(
                target=self._write, name="colibri-sessions", daemon=True
            )
            self._writer.start()

    # ------------------------------------------------------------------------------ the engine's
    def take(self, ids: Items[int]) -> Sequence:
        """A sequence that knows as much as possible of all ids but the last one; often none."""
        wanted, is_long = _tokens(ids[:-1]), self._is_long(len(ids))
        sequence: Sequence | None = None
        while sequence is None:
            saved = self._on_disk(wanted, is_long)
            with self._lock:
                found = self._in_memory(wanted, is_long)
                if found is not None and found[1] + _TRIFLE >= saved.length:
                    sequence = self._moved(*found)
                    self._from_ram += len(sequence.ids)
            if sequence is None:
                sequence = self._read(saved, ids)
        sequence.announced = len(ids)
        return sequence

    def give(self, sequence: Sequence) -> None:
        """Keep a sequence that is not used any more."""
        if not sequence.ids:
            return
        cache = sequence.cache
        self.checkpoint(sequence)
        for mirror in cache.mirrors:
            mirror.to_host(len(sequence.ids))
        cache.mirrors.clear()  # a device's memory is for sequences in use
        idle = _Idle(sequence, _tokens(sequence.ids), written=self._directory is None)
        with self._lock:
            if self._closing:
                return
            for other in [other for other in self._idle if self._is_part(other, idle)]:
                cache.checkpoints = _merged(cache.checkpoints, other.cache.checkpoints)
                self._idle.remove(other)
            self._idle.append(idle)
            self._make_room()
            self._changed.notify_all()

    def checkpoint(self, sequence: Sequence) -> None:
        """Make it possible to come back to what a sequence is now, where that takes memory."""
        cache = sequence.cache
        if cache.cuttable or not sequence.ids:
            return
        with suppress(MemoryError):
            cache.checkpoint(len(sequence.ids))
        kept = cache.checkpoints
        while len(kept) > _NEWEST and (
            len(kept) > _MOST_CHECKPOINTS or 2 * _checkpoint_bytes(kept) > self.ram_bytes
        ):
            kept = without_the_closest(kept, _NEWEST)
        cache.checkpoints = kept

    def close(self) -> None:
        """Write what is not written yet, and forget everything; a second call does nothing."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()
        if self._writer is not None:
            self._writer.join()
        self._idle.clear()

    def status(self) -> StoreStatus:
        """What there is now."""
        files, nbytes = self._directory.usage() if self._directory is not None else (0, 0)
        with self._lock:
            return StoreStatus(
                len(self._idle), self._held(), files, nbytes, self._from_ram, self._from_disk
            )

    # ------------------------------------------------------------------------------ in memory
    def _in_memory(self, wanted: Tokens, is_long: bool) -> tuple[_Idle, int] | None:
        """The sequence that knows most of the wanted tokens, and how many; the last used one."""
        best: tuple[_Idle, int] | None = None
        for idle in self._idle:
            if self._is_long(idle.sequence.announced) != is_long:
                continue
            length = idle.cache.kept(common_prefix(idle.tokens, wanted))
            if length and (best is None or length >= best[1]):
                best = idle, length
        return best

    def _moved(self, idle: _Idle, length: int) -> Sequence:
        """The sequence itself, cut to `length`, or a copy if both are worth their memory."""
        lost = len(idle.tokens) - length
        both = idle.cache.nbytes * (len(idle.tokens) + length) // len(idle.tokens)
        if lost <= max(_TRIFLE, length // _SMALL_PART) or both > self.ram_bytes:
            self._idle.remove(idle)
            idle.sequence.rewind(length)
            return idle.sequence
        sequence = self._new_sequence()
        sequence.cache.copy(idle.cache, length)
        sequence.ids.extend(idle.sequence.ids[:length])
        return sequence

    def _is_part(self, short: _Idle, whole: _Idle) -> bool:
        """Whether all that a sequence knows is known by another one too."""
        count = len(short.tokens)
        same_kind = self._is_long(short.sequence.announced) == self._is_long(
            whole.sequence.announced
        )
        return same_kind and common_prefix(short.tokens, whole.tokens) == count

    def _make_room(self) -> None:
        """Forget what was used least recently, but nothing that waits for being written alone."""
        while self._held() > self.ram_bytes:
            latest = self._idle[-1]
            others = sorted(self._idle[:-1], key=lambda idle: not idle.written)
            if others:
                self._idle.remove(others[0])
            elif latest.written and not self._keep_latest:
                self._idle.clear()
            else:
                return

    def _held(self) -> int:
        """The memory of idle sequences in bytes; a checkpoint that several have counts once."""
        checkpoints = {id(c): c for idle in self._idle for c in idle.cache.checkpoints}
        caches = sum(idle.cache.nbytes for idle in self._idle)
        return caches + _checkpoint_bytes(list(checkpoints.values()))

    def _is_long(self, length: int) -> bool:
        """Whether a sequence that gets `length` tokens is computed as a long one."""
        return 0 < self._length_limit < length

    # ------------------------------------------------------------------------------ on disk
    def _on_disk(self, wanted: Tokens, is_long: bool) -> Saved:
        if self._directory is None:
            return NOTHING
        return self._directory.find(self._roots[is_long], wanted, cuttable=self._cuttable)

    def _read(self, saved: Saved, ids: Items[int]) -> Sequence | None:
        """A new sequence with what is saved; None if a file turned out to be bad, and is gone."""
        sequence = self._new_sequence()
        if not saved.length:
            return sequence
        assert self._directory is not None
        cache = sequence.cache
        for span in saved.spans:
            if not self._directory.read(span, cache.span(span.start, span.end)):
                return None
        edge = np.empty(0, np.uint8)
        if saved.edge is not None:
            edge = np.empty(cache.edge_bytes(saved.length), np.uint8)
            if not self._directory.read(saved.edge, [edge]):
                return None
            cache.checkpoints = [Checkpoint(saved.length, edge)]
        cache.restore(saved.length, edge)
        sequence.ids.extend(ids[: saved.length])
        self._from_disk += saved.length
        return sequence

    def _write(self) -> None:
        """The writer's thread: idle sequences, the last used first, until the store is closed."""
        while True:
            with self._lock:
                while not (waiting := [idle for idle in self._idle if not idle.written]):
                    if self._closing:
                        return
                    self._changed.wait()
            idle = waiting[-1]
            with suppress(MemoryError):
                self._write_missing(idle)
            with self._lock:
                idle.written = True
                self._make_room()

    def _write_missing(self, idle: _Idle) -> None:
        """Write what the disk lacks of a sequence, as long as it is idle and there is room."""
        assert self._directory is not None
        used = time.time_ns()
        keys = [self._roots[self._is_long(idle.sequence.announced)]]
        for start in range(0, len(idle.tokens), BLOCK):
            part = Part(Kind.SPAN, keys[-1], start, idle.tokens[start : start + BLOCK])
            keys.append(part.key)
            if not self._directory.has(part, used) and not self._write_part(idle, part, used):
                return
        for saved in reversed(idle.cache.checkpoints):
            start = (saved.length - 1) // BLOCK * BLOCK
            tokens = idle.tokens[start : saved.length]
            part = Part(Kind.EDGE, keys[start // BLOCK], start, tokens)
            if not self._directory.has(part) and not self._directory.write(part, saved.edge, used):
                return

    def _write_part(self, idle: _Idle, part: Part, used: int) -> bool:
        """Write a span; it is copied first, for the sequence may be taken at any moment."""
        assert self._directory is not None
        with self._lock:
            if idle not in self._idle:
                return False
            payload = gather(idle.cache.span(part.start, part.end))
        return self._directory.write(part, payload, used)


def _tokens(ids: Items[int]) -> Tokens:
    return np.array(ids, np.int32)


def _checkpoint_bytes(checkpoints: Items[Checkpoint]) -> int:
    return sum(checkpoint.edge.nbytes for checkpoint in checkpoints)


def _merged(some: Items[Checkpoint], others: Items[Checkpoint]) -> list[Checkpoint]:
    """The checkpoints of two sequences with the same tokens, by length."""
    return [c for _, c in sorted({c.length: c for c in (*others, *some)}.items())]
