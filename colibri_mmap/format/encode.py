"""GGUF v3 header bytes from key-value pairs and tensor descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import pack

import numpy as np

from colibri_mmap.format.arrays import NUMBER_CODES, ValueType
from colibri_mmap.format.quants import GGMLType

PREAMBLE_BYTES = 24


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor as a header describes it; `offset` counts from the start of the data."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    offset: int


def encode_text(text: str) -> bytes:
    data = text.encode()
    return pack("<Q", len(data)) + data


def encode_number(key: str, type: ValueType, value: int) -> bytes:
    """A key-value pair of one number."""
    return encode_text(key) + pack("<I" + NUMBER_CODES[type], type, value)


def encode_numbers(key: str, type: ValueType, values: Sequence[int]) -> bytes:
    """A key-value pair of an array of numbers."""
    head = pack("<IIQ", ValueType.ARRAY, type, len(values))
    return encode_text(key) + head + np.array(values, "<" + NUMBER_CODES[type]).tobytes()


def encode_texts(key: str, values: Sequence[str]) -> bytes:
    """A key-value pair of an array of strings."""
    head = pack("<IIQ", ValueType.ARRAY, ValueType.STRING, len(values))
    return encode_text(key) + head + b"".join(map(encode_text, values))


def encode_header(pairs: Sequence[bytes], tensors: Sequence[TensorEntry], alignment: int) -> bytes:
    """A whole header, padded with zeros so that the data can follow."""
    header = b"".join(
        (
            pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs)),
            *pairs,
            *_encode_tensors(tensors),
        )
    )
    return header + bytes(-len(header) % alignment)


def _encode_tensors(tensors: Iterable[TensorEntry]) -> Iterable[bytes]:
    for tensor in tensors:
        n = len(tensor.shape)
        yield encode_text(tensor.name)
        yield pack(f"<I{n}QIQ", n, *tensor.shape, tensor.type, tensor.offset)
