"""Header bytes put together by hand, so that tests can also write what no library would."""

from __future__ import annotations

import struct
from collections.abc import Sequence

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = (
    range(13)
)
CODES = dict(enumerate("BbHhIif?")) | {UINT64: "Q", INT64: "q", FLOAT64: "d"}


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def payload(type: int, value: object) -> bytes:
    if type == STRING:
        return text(value)  # type: ignore[arg-type]
    return struct.pack("<" + CODES[type], value)


def pair(key: str | bytes, type: int, value: object) -> bytes:
    return text(key) + struct.pack("<I", type) + payload(type, value)


def array_pair(key: str, type: int, values: Sequence[object], length: int | None = None) -> bytes:
    head = struct.pack("<IIQ", ARRAY, type, len(values) if length is None else length)
    return text(key) + head + b"".join(payload(type, value) for value in values)


def tensor(name: str, shape: Sequence[int], type: int = 0, offset: int = 0) -> bytes:
    n = len(shape)
    return text(name) + struct.pack(f"<I{n}QIQ", n, *shape, type, offset)


def gguf(
    pairs: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    version: int = 3,
    alignment: int = 32,
    architecture: str | None = "test",
) -> bytes:
    if architecture is not None:
        pairs = [pair("general.architecture", STRING, architecture), *pairs]
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(pairs))
    header = head + b"".join(pairs) + b"".join(tensors)
    return header + bytes(-len(header) % alignment) + data


ONE_TENSOR = [tensor("t", [8])]
ONE_TENSOR_DATA = bytes(32)
