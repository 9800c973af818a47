"""The session files of one model in a directory: found by tokens, bounded in size.

Every model has a folder of its own; the bound is that of all together, and a little more if several
processes write at the same time. A file's time of change says when it was last used; the parts of
one sequence differ by microseconds, later ones being older, so that a sequence is forgotten from
its end. Nothing here raises because of a disk or a bad file.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from .sessionfiles import (
    BLOCK,
    SUFFIX,
    TEMPORARY,
    BrokenFileError,
    ForeignFileError,
    Kind,
    Part,
    common_prefix,
    file_bytes,
    is_abandoned,
    read_part,
    read_payload,
    write_part,
)
from .snapshots import Bytes

_NAME = re.compile(rf"(span|edge)-\d+-[0-9a-f]{{32}}{re.escape(SUFFIX)}")
_FOLDER = re.compile("[0-9a-f]{32}")
_UNSEEN = 32  # of the bound, the part by which several processes may exceed it


@dataclass(frozen=True, slots=True)
class Saved:
    """The files that give the first `length` tokens of a sequence."""

    length: int = 0
    spans: Sequence[Part] = ()
    edge: Part | None = None


NOTHING = Saved()


class SessionDirectory:
    """Parts of sequences on disk; used by the thread that reads and the one that writes."""

    def __init__(
        self, directory: Path, model: str, most_bytes: int, notify: Callable[[str], None]
    ) -> None:
        """Index what is there of a model; `most_bytes` in all may be kept."""
        self._directory, self._most_bytes, self._notify = directory, most_bytes, notify
        self._model = xxhash.xxh3_128_digest(model.encode())
        self._folder = directory / self._model.hex()
        self._lock = threading.Lock()
        self._children: dict[bytes, list[Part]] = {}  # by parent
        self._room = 0  # bytes that may be written before files are looked for again
        self._complained = False
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            self._complain(error)

    # ------------------------------------------------------------------------------ reading
    def find(self, root: bytes, tokens: NDArray[np.int32], *, cuttable: bool) -> Saved:
        """The longest prefix of the tokens that the files give; with an edge if not `cuttable`."""
        spans: list[Part] = []
        edges: list[Part] = []
        key, covered = root, 0
        with self._lock:
            for start in range(0, len(tokens), BLOCK):
                rest = tokens[start : start + BLOCK]
                fits = [(common_prefix(p.tokens, rest), p) for p in self._children.get(key, ())]
                best = max(
                    (fit for fit in fits if fit[1].kind == Kind.SPAN),
                    key=lambda fit: fit[0],
                    default=None,
                )
                if best is None or not best[0]:
                    break
                common, span = best
                spans.append(span)
                edges += [
                    p for n, p in fits if p.kind == Kind.EDGE and n == len(p.tokens) <= common
                ]
                key, covered = span.key, start + common
                if common < BLOCK:
                    break
        if cuttable:
            return Saved(covered, spans)
        if not edges:
            return NOTHING
        edge = max(edges, key=lambda part: part.end)
        return Saved(edge.end, [span for span in spans if span.start < edge.end], edge)

    def read(self, part: Part, views: Sequence[Bytes]) -> bool:
        """Fill the views from a part's file; if that fails the file counts no more."""
        path = self._folder / part.name
        try:
            read_payload(path, self._model, part, views)
        except FileNotFoundError:  # another process has made room
            pass
        except BrokenFileError as error:
            path.unlink(missing_ok=True)
            self._notify(f"{path}: {error}: removed")
        except (ForeignFileError, OSError) as error:
            self._notify(f"{path}: cannot be used ({error})")
        else:
            with contextlib.suppress(OSError):
                self._touch(part, time.time_ns())
            return True
        self._forget(part)
        return False

    # ------------------------------------------------------------------------------ writing
    def has(self, part: Part, used_ns: int | None = None) -> bool:
        """Whether a file holds the part, or more of its block; it counts as used then."""
        count = len(part.tokens)
        with self._lock:
            siblings = list(self._children.get(part.parent, ()))
        for other in siblings:
            same = len(other.tokens) == count or part.kind == Kind.SPAN
            if (
                other.kind == part.kind
                and same
                and common_prefix(other.tokens, part.tokens) == count
            ):
                try:
                    if used_ns is not None:
                        self._touch(other, used_ns)
                except OSError:
                    self._forget(other)
                else:
                    return True
        return False

    def write(self, part: Part, payload: Bytes, used_ns: int) -> bool:
        """Keep a part, in place of spans that it contains; False where there is no room for it."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            stamp = _stamp(part, used_ns)
            if not self._make_room(file_bytes(part, payload.size), stamp):
                return False
            write_part(self._folder, self._model, part, payload, stamp)
        except OSError as error:
            self._complain(error)
            return False
        with self._lock:
            siblings = self._children.setdefault(part.parent, [])
            replaced = [other for other in siblings if _contains(part, other)]
            siblings.append(part)
        for other in replaced:
            self._remove(other)
        return True

    def usage(self) -> tuple[int, int]:
        """Files and bytes of all models."""
        sizes = [size for _, size, _ in self._files()]
        return len(sizes), sum(sizes)

    # ------------------------------------------------------------------------------ files
    def _open(self) -> None:
        bad: list[str] = []
        for path in sorted(self._folder.iterdir()):
            if path.name.endswith(TEMPORARY) and is_abandoned(path):
                path.unlink(missing_ok=True)
            if not _NAME.fullmatch(path.name):
                continue
            try:
                part = read_part(path, self._model)
                if part.name != path.name:
                    raise BrokenFileError("holds other tokens than its name says")
                self._children.setdefault(part.parent, []).append(part)
            except BrokenFileError as error:
                path.unlink(missing_ok=True)
                bad.append(f"{path.name} {error} and was removed")
            except (ForeignFileError, OSError) as error:
                bad.append(f"{path.name} cannot be used ({error})")
        if bad:
            more = f"; {len(bad) - 1} more likewise" if len(bad) > 1 else ""
            self._notify(f"sessions in {self._folder}: {bad[0]}{more}")

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Time of last use (ns), size and path of every session file, of any model."""
        for folder in _entries(self._directory):
            if _FOLDER.fullmatch(folder.name):
                for entry in _entries(Path(folder)):
                    if _NAME.fullmatch(entry.name):
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat()
                            yield status.st_mtime_ns, status.st_size, Path(entry)

    def _make_room(self, nbytes: int, stamp: int) -> bool:
        """Remove files that were last used before `stamp`, oldest first, as far as needed."""
        if nbytes > self._room:
            files = sorted(self._files())
            excess = sum(size for _, size, _ in files) + nbytes - self._most_bytes
            for used, size, path in files:
                if excess <= 0 or used >= stamp:
                    break
                path.unlink(missing_ok=True)
                self._forget_name(path.name)
                excess -= size
            # Some of what is free is not looked for again: other processes write here too.
            self._room = min(nbytes - excess, nbytes + self._most_bytes // _UNSEEN)
        self._room -= nbytes
        return self._room >= 0

    def _touch(self, part: Part, used_ns: int) -> None:
        stamp = _stamp(part, used_ns)
        os.utime(self._folder / part.name, ns=(stamp, stamp))

    def _remove(self, part: Part) -> None:
        self._forget(part)
        with contextlib.suppress(OSError):
            (self._folder / part.name).unlink()

    def _forget(self, part: Part) -> None:
        with self._lock:
            siblings = self._children.get(part.parent, [])
            if part in siblings:
                siblings.remove(part)

    def _forget_name(self, name: str) -> None:
        with self._lock:
            for siblings in self._children.values():
                siblings[:] = [part for part in siblings if part.name != name]

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            reason = error.strerror or error
            self._notify(
                f"{self._folder}: cannot be written ({reason}): conversations are in memory only"
            )


def _stamp(part: Part, used_ns: int) -> int:
    """Of the parts of a sequence the later ones are to be forgotten first."""
    return used_ns - part.start // BLOCK * 1000


def _contains(part: Part, other: Part) -> bool:
    """Whether a span makes another one of the same block needless."""
    count = len(other.tokens)
    return (
        part.kind == other.kind == Kind.SPAN
        and count < len(part.tokens)
        and common_prefix(part.tokens, other.tokens) == count
    )


def _entries(folder: Path) -> list[os.DirEntry[str]]:
    """What a folder holds; nothing if it is no folder or cannot be read."""
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError:
        return []
