"""The header of one GGUF file, read and checked completely without touching tensor data.

    "GGUF" | version u32 | tensor count u64 | key count u64
    per key:     name string | value type u32 | value
    per tensor:  name string | dimension count u32 | dimensions u64 ... | type u32 | offset u64
    zeros up to a multiple of general.alignment | tensor data, offsets counted from here

All little-endian; a string is its length as u64, then UTF-8 bytes. Versions 2 and 3 share this
layout. Source: docs/gguf.md of ggml.
"""

from __future__ import annotations

import mmap
import stat
from dataclasses import dataclass
from math import prod
from pathlib import Path
from struct import Struct
from typing import NoReturn

from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.format.arrays import NUMBER_CODES, U64, GGUFArray, Value, ValueType
from colibri_mmap.format.quants import GGMLType, row_bytes

DEFAULT_ALIGNMENT = 32

# Far above any real model; they bound the time a hostile header can take.
MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 20
MAX_STRINGS = 1 << 22
MAX_TEXT_BYTES = 1 << 22
MAX_KEY_BYTES = (1 << 16) - 1  # limits of the GGUF specification from here on
MAX_NAME_BYTES = 64
MAX_DIMENSIONS = 4
MIN_ALIGNMENT = 8

_U32 = Struct("<I")
_PREAMBLE = Struct("<4sIQQ")
_SMALLEST_KEY = 8 + 1 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8
_MISTAKEN = {
    b"vers": "a Git LFS pointer in place of the model; `git lfs pull` fetches it",
    b"<!DO": "a web page; download the file itself",
    b"<!do": "a web page; download the file itself",
}
_NUMBERS = {type: Struct("<" + code) for type, code in NUMBER_CODES.items()}
_TENSOR_TAILS = {n: Struct(f"<{n}QIQ") for n in range(1, MAX_DIMENSIONS + 1)}


@dataclass(frozen=True, slots=True)
class Shard:
    """One file of a model; `data_offset` is where its tensor data begin."""

    path: Path
    size: int
    version: int
    alignment: int
    data_offset: int


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies.

    `shape` is in ggml order, row length first; `offset` is absolute in the file of its shard.
    """

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header; `spans` are the byte ranges of its key-value pairs in the mapped file."""

    shard: Shard
    metadata: dict[str, Value]
    spans: dict[str, tuple[int, int]]
    tensors: tuple[TensorInfo, ...]
    window: memoryview


def read_header(path: Path, shard: int = 0) -> Header:
    """Read and check the header of one file, the `shard`-th of its model."""
    cursor = _Cursor(path, _map(path))
    version, tensor_count, key_count = _read_preamble(cursor)
    metadata: dict[str, Value] = {}
    spans: dict[str, tuple[int, int]] = {}
    for _ in range(key_count):
        start = cursor.position
        key = cursor.text(f"key {len(metadata)} at byte {start}", MAX_KEY_BYTES)
        if not key or "\0" in key:
            cursor.fail(f"key {len(metadata)} at byte {start}", "the name is empty or holds a NUL")
        if key in metadata:
            cursor.fail(f"key {key!r}", "is given twice")
        metadata[key] = _read_value(cursor, key)
        spans[key] = (start, cursor.position)
    alignment = _alignment(cursor, metadata)
    tensors = tuple(_read_tensor(cursor, number, shard) for number in range(tensor_count))
    data_offset = -(-cursor.position // alignment) * alignment
    tensors = _place_tensors(cursor, tensors, alignment, data_offset)
    info = Shard(path, len(cursor.data), version, alignment, data_offset)
    return Header(info, metadata, spans, tensors, cursor.data)


def _map(path: Path) -> memoryview:
    """A read-only view of a whole file; only pages that are looked at are read."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for a writer
            raise ArgumentError(f"{path}: not a regular file; name a .gguf file or its directory")
        if status.st_size < _PREAMBLE.size:
            reason = f"{status.st_size} bytes are too few for a GGUF file; download it again"
            raise FormatError(path, "byte 0", reason)
        with path.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be opened: {error.strerror}") from error


class _Cursor:
    """A position in a mapped file that never moves past its end."""

    __slots__ = ("data", "path", "position")

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data
        self.position = 0

    def fail(self, place: str, reason: str) -> NoReturn:
        raise FormatError(self.path, place, reason)

    def advance(self, size: int, place: str) -> int:
        """Step over `size` bytes and return where they start."""
        start = self.position
        if size > len(self.data) - start:
            self.fail(
                place,
                f"{size} bytes from byte {start} reach beyond the end of the file "
                f"({len(self.data)} bytes): it is truncated or corrupt",
            )
        self.position = start + size
        return start

    def number(self, layout: Struct, place: str) -> int:
        value: int = layout.unpack_from(self.data, self.advance(layout.size, place))[0]
        return value

    def text(self, place: str, limit: int) -> str:
        size = self.number(U64, place)
        if size > limit:
            self.fail(place, f"a string of {size} bytes is longer than the limit of {limit}")
        start = self.advance(size, place)
        try:
            return str(self.data[start : start + size], "utf-8")
        except UnicodeDecodeError:
            self.fail(place, "the string is not valid UTF-8")


def _read_preamble(cursor: _Cursor) -> tuple[int, int, int]:
    """Version, tensor count and key count."""
    start = cursor.advance(_PREAMBLE.size, "byte 0")
    magic, version, tensor_count, key_count = _PREAMBLE.unpack_from(cursor.data, start)
    if magic != b"GGUF":
        found = _MISTAKEN.get(magic, f"it starts with {magic!r} instead of b'GGUF'")
        cursor.fail("byte 0", f"not a GGUF file: {found}")
    version &= 0xFFFF  # the upper half is free for flags; big-endian files have the number there
    if version == 0:
        cursor.fail("byte 4", "big-endian GGUF is not supported; convert the model on this machine")
    if version == 1:
        cursor.fail("byte 4", "GGUF version 1 is no longer supported; convert the model again")
    if version > 3:
        cursor.fail("byte 4", f"GGUF version {version} is newer than this program reads (2 and 3)")
    rest = len(cursor.data) - _PREAMBLE.size
    if key_count > min(MAX_KEYS, rest // _SMALLEST_KEY):
        cursor.fail("byte 16", f"{key_count} keys cannot fit: the file is corrupt")
    if tensor_count > min(MAX_TENSORS, rest // _SMALLEST_TENSOR):
        cursor.fail("byte 8", f"{tensor_count} tensors cannot fit: the file is corrupt")
    return version, tensor_count, key_count


def _value_type(cursor: _Cursor, place: str) -> ValueType:
    number = cursor.number(_U32, place)
    if number > ValueType.FLOAT64:
        cursor.fail(place, f"unknown value type {number}")
    return ValueType(number)


def _read_value(cursor: _Cursor, key: str) -> Value:
    place = f"key {key!r}"
    type = _value_type(cursor, place)
    if type is ValueType.STRING:
        return cursor.text(place, MAX_TEXT_BYTES)
    if type is not ValueType.ARRAY:
        return cursor.number(_NUMBERS[type], place)
    type = _value_type(cursor, place)
    length = cursor.number(U64, place)
    start = cursor.position
    if type is ValueType.ARRAY:
        cursor.fail(place, "arrays of arrays are not supported")
    if type is ValueType.STRING:
        _skip_strings(cursor, place, length)
    else:
        cursor.advance(length * _NUMBERS[type].size, place)
    return GGUFArray(cursor.path, key, type, length, cursor.data[start : cursor.position])


def _skip_strings(cursor: _Cursor, place: str, count: int) -> None:
    """Step over strings, checking only their lengths: a vocabulary is decoded on demand."""
    if count > min(MAX_STRINGS, (len(cursor.data) - cursor.position) // 8):
        cursor.fail(place, f"an array of {count} strings cannot fit: the file is corrupt")
    unpack = U64.unpack_from
    data, position = cursor.data, cursor.position
    last = len(data) - 8
    for _ in range(count):
        if position > last:
            cursor.fail(place, "the strings reach beyond the end of the file")
        position += 8 + unpack(data, position)[0]
    cursor.advance(position - cursor.position, place)


def _alignment(cursor: _Cursor, metadata: dict[str, Value]) -> int:
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < MIN_ALIGNMENT or alignment & (alignment - 1):
        cursor.fail(
            "key 'general.alignment'",
            f"must be a power of two of at least {MIN_ALIGNMENT}, is {alignment!r}",
        )
    return alignment


def _read_tensor(cursor: _Cursor, number: int, shard: int) -> TensorInfo:
    """One tensor description; its offset is still relative to the data."""
    start = cursor.position
    name = cursor.text(f"tensor {number} at byte {start}", MAX_NAME_BYTES)
    place = f"tensor {name!r}"
    dimensions = cursor.number(_U32, place)
    tail = _TENSOR_TAILS.get(dimensions)
    if tail is None:
        cursor.fail(place, f"has {dimensions} dimensions, expected 1 to {MAX_DIMENSIONS}")
    *shape, type_id, offset = tail.unpack_from(cursor.data, cursor.advance(tail.size, place))
    if 0 in shape:
        cursor.fail(place, f"has a dimension of 0: shape {shape}")
    try:
        type = GGMLType(type_id)
    except ValueError:
        cursor.fail(place, f"has the unknown type {type_id}; a newer version may read it")
    try:
        nbytes = row_bytes(type, shape[0]) * prod(shape[1:])
    except ValueError as error:
        cursor.fail(place, str(error))
    return TensorInfo(name, type, tuple(shape), shard, offset, nbytes)


def _place_tensors(
    cursor: _Cursor, tensors: tuple[TensorInfo, ...], alignment: int, data_offset: int
) -> tuple[TensorInfo, ...]:
    """The tensors with absolute offsets, known to be distinct, aligned, in the file and apart."""
    size = len(cursor.data)
    placed: dict[str, TensorInfo] = {}
    for tensor in tensors:
        place = f"tensor {tensor.name!r}"
        offset = data_offset + tensor.offset
        if tensor.name in placed:
            cursor.fail(place, "is given twice")
        if tensor.offset % alignment:
            cursor.fail(place, f"offset {tensor.offset} is not a multiple of {alignment}")
        if offset + tensor.nbytes > size:
            cursor.fail(
                place,
                f"its {tensor.nbytes} bytes at byte {offset} reach beyond the end of the file "
                f"({size} bytes): it is truncated or corrupt; download it again",
            )
        placed[tensor.name] = TensorInfo(
            tensor.name, tensor.type, tensor.shape, tensor.shard, offset, tensor.nbytes
        )
    end, before = data_offset, ""
    for tensor in sorted(placed.values(), key=lambda tensor: tensor.offset):
        if tensor.offset < end:
            cursor.fail(f"tensor {tensor.name!r}", f"overlaps tensor {before!r}")
        end, before = tensor.offset + tensor.nbytes, tensor.name
    return tuple(placed.values())
