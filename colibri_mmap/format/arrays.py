"""Metadata values of a GGUF file; arrays stay in the mapped header until someone asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import FormatError


class ValueType(IntEnum):
    """The type ids of metadata values."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12


# value type -> code of one number, the same for struct and numpy once "<" stands before it
NUMBER_CODES: dict[ValueType, str] = {
    ValueType.UINT8: "B",
    ValueType.INT8: "b",
    ValueType.UINT16: "H",
    ValueType.INT16: "h",
    ValueType.UINT32: "I",
    ValueType.INT32: "i",
    ValueType.FLOAT32: "f",
    ValueType.BOOL: "?",
    ValueType.UINT64: "Q",
    ValueType.INT64: "q",
    ValueType.FLOAT64: "d",
}

U64 = Struct("<Q")

Scalar: TypeAlias = bool | int | float | str


class GGUFArray(Sequence[Scalar]):
    """A metadata array that decodes on demand; its extent in the file was checked at open.

    Python values are made at the first access and kept. Any byte but 0 is a true boolean.
    """

    __slots__ = ("_data", "_length", "_values", "key", "path", "type")

    def __init__(
        self, path: Path, key: str, type: ValueType, length: int, data: memoryview
    ) -> None:
        self.path = path
        self.key = key
        self.type = type
        self._length = length
        self._data = data
        self._values: list[Any] | None = None

    def numpy(self) -> NDArray[Any]:
        """The numbers as a fresh array of their own type; strings are a FormatError."""
        if self.type is ValueType.STRING:
            raise FormatError(self.path, f"key {self.key!r}", "holds strings, expected numbers")
        if self.type is ValueType.BOOL:
            return np.frombuffer(self._data, np.uint8).astype(np.bool_)
        return np.frombuffer(self._data, "<" + NUMBER_CODES[self.type]).copy()

    def tolist(self) -> list[Any]:
        """The elements as Python values; a string that is not UTF-8 is a FormatError."""
        return self._elements().copy()

    def _elements(self) -> list[Any]:
        if self._values is None:
            is_text = self.type is ValueType.STRING
            self._values = self._decode_strings() if is_text else self.numpy().tolist()
        return self._values

    def _decode_strings(self) -> list[str]:
        data = bytes(self._data)
        strings: list[str] = []
        position = 0
        try:
            for _ in range(self._length):
                start = position + 8
                position = start + U64.unpack_from(data, position)[0]
                strings.append(data[start:position].decode())
        except UnicodeDecodeError as error:
            place = f"key {self.key!r}, element {len(strings)}"
            raise FormatError(self.path, place, "the string is not valid UTF-8") from error
        return strings

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Scalar: ...
    @overload
    def __getitem__(self, index: slice) -> list[Scalar]: ...
    def __getitem__(self, index: int | slice) -> Scalar | list[Scalar]:
        return self._elements()[index]

    def __iter__(self) -> Iterator[Scalar]:
        return iter(self._elements())

    def __repr__(self) -> str:
        return f"GGUFArray({self.key!r}, {self.type.name}, length {self._length})"


Value: TypeAlias = Scalar | GGUFArray
