"""A model in GGUF files: its shards checked as a whole, with look-ups that name what is wrong."""

from __future__ import annotations

import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeVar, overload

from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.format.arrays import GGUFArray, Value
from colibri_mmap.format.container import VERSION_KEY, check_container
from colibri_mmap.format.header import Header, Shard, TensorInfo, read_header

__all__ = ["GGUF", "GGUFArray", "Shard", "TensorInfo", "open_gguf"]

_NAMED = 8  # models of a directory that an error names
_SHARD_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


MAX_BROADCAST = 1 << 16  # as many layers as no model has; bounds what a corrupt count can cost


class _Required(Enum):
    REQUIRED = "required"


_REQUIRED = _Required.REQUIRED
_Default = TypeVar("_Default")


@dataclass(frozen=True, slots=True, eq=False)
class GGUF:
    """An open model: what its headers say, checked; the tensor data stay in the files.

    Look-ups take a full key, or one that starts with "." and is relative to the architecture. A
    missing key gives the default or, without one, a FormatError, as does a value of a wrong type.
    """

    path: Path
    shards: tuple[Shard, ...]
    metadata: Mapping[str, Value]
    tensors: dict[str, TensorInfo]
    architecture: str

    def int(
        self,
        key: builtins.str,
        default: _Default | _Required = _REQUIRED,
        *,
        minimum: builtins.int | None = None,
        maximum: builtins.int | None = None,
    ) -> builtins.int | _Default:
        """An integer within inclusive bounds."""
        value = self._lookup(key)
        if value is None:
            return self._default(key, default)
        if type(value) is not builtins.int:
            self._wrong_type(key, "an integer", value)
        if minimum is not None and value < minimum:
            self.fail(key, f"must be at least {minimum}, is {value}")
        if maximum is not None and value > maximum:
            self.fail(key, f"must be at most {maximum}, is {value}")
        return value

    def float(
        self, key: builtins.str, default: _Default | _Required = _REQUIRED
    ) -> builtins.float | _Default:
        """A real number; an integer is converted."""
        value = self._lookup(key)
        if value is None:
            return self._default(key, default)
        if type(value) not in (builtins.float, builtins.int):
            self._wrong_type(key, "a number", value)
        return builtins.float(value)  # type: ignore[arg-type]

    def bool(
        self, key: builtins.str, default: _Default | _Required = _REQUIRED
    ) -> builtins.bool | _Default:
        """A truth value."""
        value = self._lookup(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, builtins.bool):
            self._wrong_type(key, "a boolean", value)
        return value

    def str(
        self, key: builtins.str, default: _Default | _Required = _REQUIRED
    ) -> builtins.str | _Default:
        """A text."""
        value = self._lookup(key)
        if value is None:
            return self._default(key, default)
        if not isinstance(value, builtins.str):
            self._wrong_type(key, "a string", value)
        return value

    def ints(
        self,
        key: builtins.str,
        n: builtins.int | None = None,
        default: _Default | _Required = _REQUIRED,
    ) -> tuple[builtins.int, ...] | _Default:
        """An array of n integers (any number without n); a single one stands for n of them."""
        return self._array(key, n, default, "integers", (builtins.int,))

    def floats(
        self,
        key: builtins.str,
        n: builtins.int | None = None,
        default: _Default | _Required = _REQUIRED,
    ) -> tuple[builtins.float, ...] | _Default:
        """An array of n real numbers (any number without n); a single one stands for n of them."""
        values = self._array(key, n, default, "numbers", (builtins.float, builtins.int))
        return tuple(map(builtins.float, values)) if isinstance(values, tuple) else values

    def bools(
        self,
        key: builtins.str,
        n: builtins.int | None = None,
        default: _Default | _Required = _REQUIRED,
    ) -> tuple[builtins.bool, ...] | _Default:
        """An array of n truth values (any number without n); a single one stands for n of them."""
        return self._array(key, n, default, "booleans", (builtins.bool,))

    def strs(
        self, key: builtins.str, default: _Default | _Required = _REQUIRED
    ) -> tuple[builtins.str, ...] | _Default:
        """An array of texts."""
        return self._array(key, None, default, "strings", (builtins.str,))

    @overload
    def tensor(
        self,
        name: builtins.str,
        shape: tuple[builtins.int, ...] | None = None,
        optional: Literal[False] = False,
    ) -> TensorInfo: ...
    @overload
    def tensor(
        self,
        name: builtins.str,
        shape: tuple[builtins.int, ...] | None = None,
        optional: builtins.bool = False,
    ) -> TensorInfo | None: ...
    def tensor(
        self,
        name: builtins.str,
        shape: tuple[builtins.int, ...] | None = None,
        optional: builtins.bool = False,
    ) -> TensorInfo | None:
        """A tensor of the given shape in ggml order, trailing ones aside; None only if optional."""
        info = self.tensors.get(name)
        if info is None:
            if optional:
                return None
            raise FormatError(self.path, f"tensor {name!r}", "is missing: the model is incomplete")
        if shape is not None and _significant(info.shape) != _significant(shape):
            path = self.shards[info.shard].path
            reason = f"has shape {list(info.shape)}, expected {list(shape)}"
            raise FormatError(path, f"tensor {name!r}", reason)
        return info

    def fail(self, key: builtins.str, reason: builtins.str) -> NoReturn:
        """Raise the FormatError for a metadata key."""
        raise FormatError(self.path, f"key {self._full(key)!r}", reason)

    def _full(self, key: builtins.str) -> builtins.str:
        return self.architecture + key if key.startswith(".") else key

    def _lookup(self, key: builtins.str) -> Value | None:
        return self.metadata.get(self._full(key))

    def _default(self, key: builtins.str, default: _Default | _Required) -> _Default:
        if isinstance(default, _Required):
            self.fail(key, "is missing")
        return default

    def _wrong_type(self, key: builtins.str, expected: builtins.str, value: Value) -> NoReturn:
        self.fail(key, f"must be {expected}, is {value!r}")

    def _array(
        self,
        key: builtins.str,
        n: builtins.int | None,
        default: _Default | _Required,
        expected: builtins.str,
        types: tuple[type, ...],
    ) -> tuple[Any, ...] | _Default:
        value = self._lookup(key)
        if value is None:
            return self._default(key, default)
        if type(value) in types and n is not None:
            if n > MAX_BROADCAST:
                self.fail(key, f"would have to stand for {n} values: the file is corrupt")
            return (value,) * n
        if not isinstance(value, GGUFArray):
            self._wrong_type(key, f"an array of {expected}", value)
        if n is not None and len(value) != n:
            self.fail(key, f"must hold {n} {expected}, holds {len(value)}")
        elements = tuple(value)
        if elements and type(elements[0]) not in types:
            self._wrong_type(key, f"an array of {expected}", value)
        return elements


def open_gguf(path: str | PathLike[str]) -> GGUF:
    """Open a model by its file, any of its shards, or a directory that holds just this model."""
    path = Path(path)
    headers = _read_shards(_model_in(path) if path.is_dir() else path)
    first = headers[0]
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for tensor in header.tensors:
            if tensor.name in tensors:
                other = headers[tensors[tensor.name].shard].shard.path.name
                reason = f"is also in {other}"
                raise FormatError(header.shard.path, f"tensor {tensor.name!r}", reason)
            tensors[tensor.name] = tensor
    declared = _split_number(first, "split.tensors.count", len(tensors))
    if declared != len(tensors):
        reason = f"says {declared}, but the shards hold {len(tensors)}; download them again"
        raise FormatError(first.shard.path, "key 'split.tensors.count'", reason)
    if not tensors:
        raise FormatError(first.shard.path, "byte 8", "holds no tensors: it is not a whole model")
    architecture = first.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        reason = f"must be the name of an architecture, is {architecture!r}"
        raise FormatError(first.shard.path, "key 'general.architecture'", reason)
    gguf = GGUF(
        path=first.shard.path,
        shards=tuple(header.shard for header in headers),
        metadata=MappingProxyType(first.metadata),
        tensors=tensors,
        architecture=architecture,
    )
    if VERSION_KEY in gguf.metadata:
        check_container(gguf, first)
    return gguf


def _model_in(directory: Path) -> Path:
    """Some file of the only model in a directory."""
    models: dict[str, Path] = {}
    for file in sorted(directory.glob("*.gguf")):
        match = _SHARD_NAME.fullmatch(file.name)
        models.setdefault(f"{match['stem']}-of-{match['count']}" if match else file.name, file)
    if not models:
        raise ArgumentError(f"{directory}: holds no .gguf file; name the model's file or directory")
    if len(models) > 1:
        names = ", ".join(file.name for file in islice(models.values(), _NAMED))
        more = f" and {len(models) - _NAMED} more" if len(models) > _NAMED else ""
        raise ArgumentError(
            f"{directory}: holds {len(models)} models, name one of them: {names}{more}"
        )
    return next(iter(models.values()))


def _read_shards(path: Path) -> list[Header]:
    """The headers of all shards in order, given the path of any one."""
    header = read_header(path)
    count = _split_number(header, "split.count", 0)
    number = _split_number(header, "split.no", 0)
    if count <= 1 and number == 0:
        return [header]
    if number >= count:
        raise FormatError(path, "key 'split.no'", f"is {number} of {count} shards")
    paths = _shard_paths(path, number, count)
    headers = [read_header(member, index) for index, member in enumerate(paths)]
    for index, member in enumerate(headers):
        for key, expected in (("split.count", count), ("split.no", index)):
            found = _split_number(member, key, None)
            if found != expected:
                reason = f"is {found}, expected {expected}: the shards do not belong together"
                raise FormatError(member.shard.path, f"key {key!r}", reason)
    return headers


def _shard_paths(path: Path, number: int, count: int) -> list[Path]:
    match = _SHARD_NAME.fullmatch(path.name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        name = f"<name>-{number + 1:05d}-of-{count:05d}.gguf"
        reason = f"is shard {number + 1} of {count}: give the files their names back, {name}"
        raise FormatError(path, "file name", reason)
    names = [f"{match['stem']}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]
    lost = [name for name in names if not (path.parent / name).is_file()]
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        reason = f"{len(lost)} of {count} are missing: {', '.join(lost[:3])}{more}"
        raise FormatError(path, "shards", reason)
    return [path.with_name(name) for name in names]


def _split_number(header: Header, key: str, default: Any) -> Any:
    """A `split.` count, which is not negative; read before there is a model to ask."""
    value = header.metadata.get(key, default)
    if value is not default and (type(value) is not int or value < 0):
        reason = f"must be a count, is {value!r}"
        raise FormatError(header.shard.path, f"key {key!r}", reason)
    return value


def _significant(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without its trailing ones."""
    size = len(shape)
    while size > 1 and shape[size - 1] == 1:
        size -= 1
    return shape[:size]
