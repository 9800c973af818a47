"""What makes a GGUF file a packed container: reading and checking its tables (docs/format.md).

Routed experts lie in slabs, one contiguous read each, in one I8 tensor `blk.N.ffn_exps.C` of shape
[stride, slabs] per layer N and class C of experts; everything else is the trunk before them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash
from numpy.typing import NDArray

from colibri_mmap.errors import FormatError, UnsupportedError
from colibri_mmap.format.header import Header, TensorInfo
from colibri_mmap.format.quants import GGMLType, row_bytes

if TYPE_CHECKING:
    from colibri_mmap.format.gguf import GGUF

VERSION = 1
ALIGNMENT = 4096  # of every tensor: one page
MAX_ALIGN = 2 << 20  # of slabs: one huge page
PART_ALIGNMENT = 64  # of parts within a slab: one cache line

VERSION_KEY = "colibri.version"
HEADER_CHECKSUM_KEY = "colibri.header.checksum"
ALIGN_KEY = "colibri.align"
TRUNK_CHECKSUMS_KEY = "colibri.trunk.checksums"
PADDING_TENSOR = "colibri.padding"

SLAB_TENSOR = re.compile(r"blk\.(\d+)\.ffn_exps\.(\d+)")


@dataclass(frozen=True, slots=True)
class SlabPart:
    """One part in every slab of a class; `shape` (row length, rows), `offset` within the slab."""

    name: str
    type: GGMLType
    shape: tuple[int, int]
    offset: int

    @property
    def nbytes(self) -> int:
        return row_bytes(self.type, self.shape[0]) * self.shape[1]


@dataclass(frozen=True, slots=True)
class SlabClass:
    """The slabs in one tensor."""

    tensor: TensorInfo
    parts: tuple[SlabPart, ...]

    @property
    def stride(self) -> int:
        return self.tensor.shape[0]

    @property
    def count(self) -> int:
        return self.tensor.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class SlabLayer:
    """Where the experts of a layer are: class and slab index, int64 arrays [experts]."""

    layer: int
    classes: tuple[SlabClass, ...]
    class_of: NDArray[np.int64]
    index_of: NDArray[np.int64]


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple that is not below a size."""
    return -(-size // multiple) * multiple


def slab_tensor_name(layer: int, number: int) -> str:
    """The tensor with the slabs of a class."""
    return f"blk.{layer}.ffn_exps.{number}"


def class_key(layer: int, number: int, name: str) -> str:
    """The metadata key of a table of a class."""
    return f"colibri.blk.{layer}.ffn_exps.{number}.{name}"


def layer_key(layer: int, name: str) -> str:
    """The metadata key of a table of a layer's experts."""
    return f"colibri.blk.{layer}.experts.{name}"


def check_container(gguf: GGUF, header: Header) -> None:
    """Check version, header checksum and all tables of a container that is being opened."""
    version = gguf.int(VERSION_KEY, minimum=1)
    if version > VERSION:
        gguf.fail(
            VERSION_KEY,
            f"the container has version {version}, this program reads {VERSION}: update it",
        )
    if gguf.int(HEADER_CHECKSUM_KEY) != header_checksum(
        header.window[: header.shard.data_offset], header.spans[HEADER_CHECKSUM_KEY][1]
    ):
        gguf.fail(HEADER_CHECKSUM_KEY, "the header is damaged; copy or pack the file again")
    for _ in records(gguf):
        pass


def header_checksum(header: memoryview | bytes, end: int) -> int:
    """xxh3-64 of a header whose own checksum, the 8 bytes before `end`, counts as zeros."""
    digest = xxhash.xxh3_64(header[: end - 8])
    digest.update(bytes(8))
    digest.update(header[end:])
    return digest.intdigest()


def slab_layers(gguf: GGUF) -> dict[int, SlabLayer]:
    """The packed layers by number; empty for a file that is no container."""
    if VERSION_KEY not in gguf.metadata:
        return {}
    align = gguf.int(ALIGN_KEY, minimum=ALIGNMENT, maximum=MAX_ALIGN)
    if align & (align - 1):
        gguf.fail(ALIGN_KEY, f"must be a power of two, is {align}")
    tensors: dict[int, dict[int, TensorInfo]] = defaultdict(dict)
    for name, info in gguf.tensors.items():
        if match := SLAB_TENSOR.fullmatch(name):
            tensors[int(match[1])][int(match[2])] = info
    return {layer: _slab_layer(gguf, layer, tensors[layer], align) for layer in sorted(tensors)}


def _slab_layer(gguf: GGUF, layer: int, tensors: dict[int, TensorInfo], align: int) -> SlabLayer:
    place = f"container layer {layer}"
    if sorted(tensors) != list(range(len(tensors))):
        raise FormatError(gguf.path, place, f"has the slab classes {sorted(tensors)}: one is lost")
    classes = tuple(
        _slab_class(gguf, layer, number, tensors[number], align) for number in range(len(tensors))
    )
    kinds = {tuple((part.name, part.type, part.shape) for part in c.parts) for c in classes}
    if len(kinds) > 1:
        raise UnsupportedError(
            f"{gguf.path}: {place}: experts of different precision need a newer version"
        )
    count = sum(slab_class.count for slab_class in classes)
    class_of = np.array(gguf.ints(layer_key(layer, "class"), count), np.int64)
    index_of = np.array(gguf.ints(layer_key(layer, "index"), count), np.int64)
    stored = sorted(zip(class_of.tolist(), index_of.tolist(), strict=True))
    if stored != [(c, i) for c, slabs in enumerate(classes) for i in range(slabs.count)]:
        raise FormatError(gguf.path, place, "its experts and its slabs are not one to one")
    return SlabLayer(layer, classes, class_of, index_of)


def _slab_class(gguf: GGUF, layer: int, number: int, tensor: TensorInfo, align: int) -> SlabClass:
    path, place = gguf.shards[tensor.shard].path, f"tensor {tensor.name!r}"
    if tensor.type is not GGMLType.I8 or len(tensor.shape) != 2:
        raise FormatError(path, place, "is not a matrix of bytes, as slabs are")
    if tensor.offset % align or tensor.shape[0] % align:
        reason = f"offset {tensor.offset} or stride {tensor.shape[0]} is no multiple of {align}"
        raise FormatError(path, place, reason)
    names = gguf.strs(class_key(layer, number, "parts"))
    columns = [
        gguf.ints(class_key(layer, number, column), len(names))
        for column in ("types", "row_lengths", "rows", "offsets")
    ]
    parts: list[SlabPart] = []
    end = 0
    for name, type_id, row_length, rows, offset in zip(names, *columns, strict=True):
        try:
            part = SlabPart(name, GGMLType(type_id), (row_length, rows), offset)
            nbytes = part.nbytes
        except ValueError as error:
            raise FormatError(path, place, f"part {name!r}: {error}") from error
        if rows < 1 or offset % PART_ALIGNMENT or not end <= offset <= tensor.shape[0] - nbytes:
            reason = f"part {name!r} overlaps another, is not aligned or leaves the slab"
            raise FormatError(path, place, reason)
        end = offset + nbytes
        parts.append(part)
    return SlabClass(tensor, tuple(parts))


@dataclass(frozen=True, slots=True)
class Record:
    """A range of a container with its xxh3-64; the records cover all data without a gap."""

    name: str
    shard: int
    offset: int
    nbytes: int
    checksum: int


def records(gguf: GGUF) -> Iterator[Record]:
    """The records of a container: trunk tensors with their padding, then slabs layer by layer."""
    trunk = [info for name, info in gguf.tensors.items() if not SLAB_TENSOR.fullmatch(name)]
    checksums = gguf.ints(TRUNK_CHECKSUMS_KEY, len(trunk))
    for info, checksum in zip(trunk, checksums, strict=True):
        nbytes = round_up(info.nbytes, ALIGNMENT)
        if info.offset + nbytes > gguf.shards[info.shard].size:
            place = f"tensor {info.name!r}"
            raise FormatError(gguf.path, place, "its padding is cut off: the file is truncated")
        yield Record(f"tensor {info.name!r}", info.shard, info.offset, nbytes, checksum)
    for slabs in slab_layers(gguf).values():
        experts = {
            (c, i): expert
            for expert, (c, i) in enumerate(
                zip(slabs.class_of.tolist(), slabs.index_of.tolist(), strict=True)
            )
        }
        for number, slab_class in enumerate(slabs.classes):
            key = class_key(slabs.layer, number, "checksums")
            for index, checksum in enumerate(gguf.ints(key, slab_class.count)):
                name = f"layer {slabs.layer} expert {experts[number, index]}"
                offset = slab_class.tensor.offset + index * slab_class.stride
                yield Record(name, slab_class.tensor.shard, offset, slab_class.stride, checksum)
