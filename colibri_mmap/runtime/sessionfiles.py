"""Files that keep parts of KV caches between runs: one part of one token sequence each.

    offset  bytes
    0       8     b"colibKV1"
    8       4     version (uint32; all numbers are little-endian)
    12      4     kind: 0 a span, 1 an edge (snapshots.py)
    16      16    model: xxh3-128 of its identity
    32      16    parent: xxh3-128 chain over the tokens before `start`
    48      8     start: a multiple of BLOCK
    56      8     count: tokens in this file, 1 to BLOCK
    64      8     size of the payload
    72      16    xxh3-128 of the payload
    88      8     xxh3-64 of the bytes before and the tokens
    96      4 n   the tokens (int32), zeros to a multiple of 64, the payload

A span holds the keys and values of its tokens, an edge what belongs to all tokens up to its end.
Files are written under a temporary name that is locked meanwhile, and never changed.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from .pages import forget_file
from .snapshots import Bytes

VERSION = 1  # goes up with every change of what models write into their caches
BLOCK = 512  # tokens of a file at most
SUFFIX = ".kvpart"
TEMPORARY = ".writing"

_MAGIC = b"colibKV1"
_HEADER = struct.Struct("<8sII16s16sQQQ16s")
_CHECKSUM = struct.Struct("<Q")
_TOKENS_AT = _HEADER.size + _CHECKSUM.size
_ALIGNMENT = 64
_MOST_VIEWS = os.sysconf("SC_IOV_MAX")


class Kind(IntEnum):
    """What a file holds."""

    SPAN = 0
    EDGE = 1


class BrokenFileError(Exception):
    """A file of ours whose bytes are not what was written."""


class ForeignFileError(Exception):
    """A file that is not ours to judge: another format, version or model."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Which tokens a file belongs to: int32 `tokens` from `start` on, after those of `parent`."""

    kind: Kind
    parent: bytes
    start: int
    tokens: NDArray[np.int32]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def key(self) -> bytes:
        """The parent of what comes after."""
        return chained(self.parent, self.tokens)

    @property
    def name(self) -> str:
        """Its file's name: the same for the same tokens."""
        return f"{self.kind.name.lower()}-{self.end}-{self.key.hex()}{SUFFIX}"


def chained(parent: bytes, tokens: NDArray[np.int32]) -> bytes:
    """The key of a sequence that goes on with `tokens`."""
    return xxhash.xxh3_128_digest(parent + tokens.astype("<i4").tobytes())


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading tokens two sequences share."""
    count = min(len(a), len(b))
    different = a[:count] != b[:count]
    return int(different.argmax()) if different.any() else count


def file_bytes(part: Part, payload: int) -> int:
    """The size of a part's file with so many bytes of payload."""
    return _payload_at(len(part.tokens)) + payload


def write_part(folder: Path, model: bytes, part: Part, payload: Bytes, used_ns: int) -> None:
    """Write a part's file, last used at `used_ns`; OSError if that fails."""
    digest = xxhash.xxh3_128_digest(payload.data)
    fixed = _HEADER.pack(
        _MAGIC,
        VERSION,
        part.kind,
        model,
        part.parent,
        part.start,
        len(part.tokens),
        payload.size,
        digest,
    )
    tokens = part.tokens.astype("<i4").tobytes()
    head = fixed + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fixed + tokens)) + tokens
    head += bytes(-len(head) % _ALIGNMENT)
    handle, name = tempfile.mkstemp(dir=folder, suffix=TEMPORARY)
    temporary = Path(name)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        for data in (memoryview(head), payload.data):
            while len(data):
                data = data[os.write(handle, data) :]
        os.fsync(handle)
        forget_file(handle)  # memory is for weights
        os.utime(handle, ns=(used_ns, used_ns))
        temporary.replace(folder / part.name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)


def read_part(path: Path, model: bytes) -> Part:
    """What a file holds by its header; BrokenFileError, ForeignFileError, OSError."""
    with path.open("rb") as file:
        part, _, _ = _read_header(file.fileno(), model)
    return part


def read_payload(path: Path, model: bytes, part: Part, views: Sequence[Bytes]) -> None:
    """Read a part's payload into the views; their content is undefined if that fails.

    BrokenFileError, ForeignFileError, OSError.
    """
    with path.open("rb") as file:
        found, digest, position = _read_header(file.fileno(), model)
        total = sum(view.size for view in views)
        if os.fstat(file.fileno()).st_size != position + total or found.name != part.name:
            raise BrokenFileError("has another size than this model's")
        checksum = xxhash.xxh3_128()
        for start in range(0, len(views), _MOST_VIEWS):
            some = views[start : start + _MOST_VIEWS]
            _read_fully(file.fileno(), some, position)
            position += sum(view.size for view in some)
            for view in some:
                checksum.update(view.data)
        forget_file(file.fileno())
    if checksum.digest() != digest:
        raise BrokenFileError("has a wrong checksum")


def is_abandoned(temporary: Path) -> bool:
    """Whether nobody is writing a temporary file any more."""
    try:
        with temporary.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _payload_at(count: int) -> int:
    """Where the payload of a file with `count` tokens begins."""
    return -(-(_TOKENS_AT + 4 * count) // _ALIGNMENT) * _ALIGNMENT


def _read_header(handle: int, model: bytes) -> tuple[Part, bytes, int]:
    """The part, the payload's checksum and where the payload is."""
    head = os.pread(handle, _TOKENS_AT + 4 * BLOCK, 0)
    if head[: len(_MAGIC)] != _MAGIC[: len(head)]:
        raise ForeignFileError("is not a file of a session")
    if len(head) < _TOKENS_AT:
        raise BrokenFileError("is cut off")
    _, version, kind, of, parent, start, count, size, digest = _HEADER.unpack_from(head)
    if version != VERSION:
        raise ForeignFileError(f"has version {version}, this program writes {VERSION}")
    tokens = head[_TOKENS_AT : _TOKENS_AT + 4 * count]
    (checksum,) = _CHECKSUM.unpack_from(head, _HEADER.size)
    sound = xxhash.xxh3_64_intdigest(head[: _HEADER.size] + tokens) == checksum
    if not sound or not 1 <= count <= BLOCK or start % BLOCK or kind not in list(Kind):
        raise BrokenFileError("has a damaged header")
    if of != model:
        raise ForeignFileError("belongs to another model")
    payload_at = _payload_at(count)
    if os.fstat(handle).st_size != payload_at + size:
        raise BrokenFileError("is cut off")
    part = Part(Kind(kind), parent, start, np.frombuffer(tokens, "<i4").astype(np.int32))
    return part, digest, payload_at


def _read_fully(handle: int, views: Sequence[Bytes], position: int) -> None:
    pending = [view.data for view in views]
    while pending:
        count = os.preadv(handle, pending, position)
        if count == 0:
            raise BrokenFileError("is cut off")
        position += count
        while pending and count >= len(pending[0]):
            count -= len(pending.pop(0))
        if count:
            pending[0] = pending[0][count:]
