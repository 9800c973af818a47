"""Weights where they lie: tensors as addresses in the mapped files."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import FormatError, ModelReadError
from ..format.experts import ExpertLayer, expert_layers
from ..format.gguf import GGUF, TensorInfo
from ..format.quants import GGMLType, row_bytes
from .buserrors import Protection
from .pages import MappedFile


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """`rows` outputs by `columns` inputs in mapped memory, one row after another."""

    address: int
    type: GGMLType
    rows: int
    columns: int
    row_bytes: int

    def part(self, first: int, rows: int) -> Matrix:
        """The matrix of `rows` rows from row `first` on."""
        where = self.address + first * self.row_bytes
        return Matrix(where, self.type, rows, self.columns, self.row_bytes)

    def raw(self) -> NDArray[np.uint8]:
        """The bytes [rows, row_bytes], in place."""
        nbytes = self.rows * self.row_bytes
        memory = memoryview((ctypes.c_uint8 * nbytes).from_address(self.address))
        return np.frombuffer(memory, np.uint8).reshape(self.rows, self.row_bytes)

    def floats(self) -> NDArray[np.float32]:
        """The exact values [rows, columns] of a matrix of any type, by gguf-py."""
        return _exact_values(self.raw(), self.type)


@dataclass(frozen=True, slots=True, eq=False)
class Vector:
    """`n` float32 values in memory; `values` keeps a converted copy alive."""

    address: int
    n: int
    values: NDArray[np.float32]

    @classmethod
    def of(cls, values: ArrayLike) -> Vector:
        """A vector that is not in the file."""
        own = np.array(values, np.float32, ndmin=1)
        return cls(own.ctypes.data, len(own), own)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPartWeights:
    """The shape and type of one projection (gate, up, down) of a layer's experts."""

    name: str
    type: GGMLType
    rows: int
    columns: int
    row_bytes: int

    def at(self, address: int) -> Matrix:
        """The matrix of the expert that lies at an address."""
        return Matrix(address, self.type, self.rows, self.columns, self.row_bytes)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertWeights:
    """The routed experts of one layer."""

    gate: ExpertPartWeights
    up: ExpertPartWeights
    down: ExpertPartWeights
    count: int
    bias_names: tuple[str, ...] = ()  # of gate, up and down, or there are none

    @property
    def parts(self) -> tuple[ExpertPartWeights, ExpertPartWeights, ExpertPartWeights]:
        return self.gate, self.up, self.down

    @property
    def part_names(self) -> tuple[str, ...]:
        """Everything that an expert consists of."""
        return (*(part.name for part in self.parts), *self.bias_names)


class Weights:
    """All shards of a model, mapped; look-ups by GGUF tensor name."""

    def __init__(self, gguf: GGUF) -> None:
        self.gguf = gguf
        self.files: list[MappedFile] = []
        self._protections: list[Protection] = []
        self.expert_layers = expert_layers(gguf)
        try:
            for shard in gguf.shards:
                file = MappedFile(shard.path, shard.size)
                self.files.append(file)
                self._protections.append(Protection(file.address, file.size))
        except BaseException:
            self.close()
            raise

    def _bytes(self, info: TensorInfo) -> NDArray[np.uint8]:
        return self.files[info.shard].bytes[info.offset : info.offset + info.nbytes]

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The matrix `name`; FormatError if it is missing or has another shape."""
        info = self.gguf.tensor(name)
        if rows > 1 or info.shape != (columns,):
            info = self.gguf.tensor(name, (columns, rows))
        address = self.files[info.shard].address + info.offset
        return Matrix(address, info.type, rows, columns, row_bytes(info.type, columns))

    def stack(self, name: str, count: int, rows: int, columns: int) -> list[Matrix]:
        """The `count` stacked matrices of the tensor `name`."""
        info = self.gguf.tensor(name, (columns, rows, count))
        address = self.files[info.shard].address + info.offset
        whole = Matrix(address, info.type, count * rows, columns, row_bytes(info.type, columns))
        return [whole.part(rows * number, rows) for number in range(count)]

    def vector(self, name: str, n: int) -> Vector:
        """The vector `name` as float32: in place where it is stored so, else converted."""
        info = self.gguf.tensor(name)
        if info.shape[0] != n or any(length != 1 for length in info.shape[1:]):
            info = self.gguf.tensor(name, (n,))
        if info.type == GGMLType.F32 and (self.files[info.shard].address + info.offset) % 4 == 0:
            values = self._bytes(info).view(np.float32)
        else:
            values = np.ascontiguousarray(_exact_values(self._bytes(info), info.type))
        return Vector(values.ctypes.data, n, values)

    def array(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The tensor `name` as float32, its axes in reverse of the ggml `shape`.

        Axes of length 1 may be anywhere, or missing.
        """
        info = self.gguf.tensor(name)
        if [n for n in info.shape if n != 1] != [n for n in shape if n != 1]:
            info = self.gguf.tensor(name, shape)
        return _exact_values(self._bytes(info), info.type).reshape(shape[::-1])

    def optional_vector(self, name: str, *sizes: int) -> Vector | None:
        """The vector `name` of one of these sizes, or None if the file has none."""
        info = self.gguf.tensor(name, optional=True)
        if info is None:
            return None
        return self.vector(name, info.shape[0] if info.shape[0] in sizes else sizes[0])

    def has(self, name: str) -> bool:
        return name in self.gguf.tensors

    def experts(self, layer: int, count: int, width: int, hidden: int) -> ExpertWeights:
        """The experts of a layer that map `width` values through `hidden` ones."""
        found = self.expert_layers.get(layer)
        place = f"experts of layer {layer}"
        if found is None:
            raise FormatError(self.gguf.path, place, "missing; the file is incomplete")
        if found.n_experts != count:
            raise FormatError(
                self.gguf.path, place, f"there are {found.n_experts}, but expert_count is {count}"
            )
        gate = self._expert_part(found, "gate", width, hidden)
        up = self._expert_part(found, "up", width, hidden)
        down = self._expert_part(found, "down", hidden, width)
        biases = tuple(name for name in found.parts if name.endswith("_bias"))
        if len(biases) not in (0, 3) or any(found.parts[b].type != GGMLType.F32 for b in biases):
            reason = "biases must be float32, and of gate, up and down or of none"
            raise FormatError(self.gguf.path, place, reason)
        return ExpertWeights(gate, up, down, count, biases)

    def _expert_part(
        self, layer: ExpertLayer, name: str, columns: int, rows: int
    ) -> ExpertPartWeights:
        place = f"{name} experts of layer {layer.layer}"
        part = layer.parts.get(name)
        if part is None:
            raise FormatError(self.gguf.path, place, "missing; the file is incomplete")
        if tuple(part.shape) != (columns, rows):
            raise FormatError(
                self.gguf.path, place, f"shape {part.shape} where {(columns, rows)} is needed"
            )
        return ExpertPartWeights(name, part.type, rows, columns, row_bytes(part.type, columns))

    def close(self) -> None:
        """Unmap the files; every address dies."""
        while self._protections:
            self._protections.pop().release()
        while self.files:
            self.files.pop().close()

    def mend(self) -> int:
        """Map pages anew that vanished since this was last asked: they may be healthy again.

        The address of one of them, 0 if there are none. What was computed since is then wrong.
        """
        found = 0
        for file, protection in zip(self.files, self._protections, strict=True):
            if fault := protection.take_fault():
                file.remap()
                found = fault
        return found

    def check(self) -> None:
        """ModelReadError if what was computed since the last time may be wrong: pages vanished, or
        a file is not what was opened any more."""
        if fault := self.mend():
            raise ModelReadError(
                f"{self.locate(fault)} vanished while it was used: the file was cut short, or the "
                "disk failed; check it with colibri-mmap verify"
            )
        for file in self.files:
            if file.changed:
                raise ModelReadError(
                    f"{file.path}: the file was changed after it was opened; open the model again"
                )

    def locate(self, address: int) -> str:
        """What lies at an address: the shard, and the tensor or the layer's expert."""
        for shard, file in enumerate(self.files):
            offset = address - file.address
            if 0 <= offset < file.size:
                return f"{file.path}: {self._name_at(shard, offset)}"
        return str(self.gguf.path)

    def _name_at(self, shard: int, offset: int) -> str:
        for number, layer in self.expert_layers.items():
            for expert in range(layer.n_experts):
                for extent in layer.extents(expert):
                    inside = extent.offset <= offset < extent.offset + extent.nbytes
                    if extent.shard == shard and inside:
                        return f"layer {number}, expert {expert}"
        for name, info in self.gguf.tensors.items():
            if info.shard == shard and info.offset <= offset < info.offset + info.nbytes:
                return f"tensor {name!r}"
        return f"byte {offset}"


def _exact_values(blocks: NDArray[np.uint8], kind: GGMLType) -> NDArray[np.float32]:
    """What blocks of any type stand for, by gguf-py."""
    from gguf import GGMLQuantizationType  # seldom needed, and 50 ms to import
    from gguf.quants import dequantize

    values = dequantize(blocks, GGMLQuantizationType(int(kind)))
    return np.asarray(values, np.float32)
