"""From (layer, expert) to bytes, the same for every way in which a file stores routed experts.

Layouts (N layer, E expert, n number of experts, D model width, F expert width; ggml order):
    stacked     blk.N.ffn_gate_exps.weight [D, F, n], ffn_up_exps [D, F, n], ffn_down_exps [F, D, n]
    fused       blk.N.ffn_gate_up_exps.weight [D, 2F, n]: the rows of the gate, then those of up
    per expert  blk.N.ffn_gate.E.weight [D, F], ffn_up.E, ffn_down.E [F, D]: old Mixtral files
    packed      blk.N.ffn_exps.C: slabs with all parts of an expert, see container.py
`.bias` beside `.weight` holds one value per row. Experts without a gate have up and down only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import FormatError
from colibri_mmap.format.container import SLAB_TENSOR, SlabLayer, slab_layers
from colibri_mmap.format.gguf import GGUF, TensorInfo
from colibri_mmap.format.quants import GGMLType, row_bytes

PART_NAMES = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")

MAX_EXPERTS = 1 << 16
PAGE = 4096

_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate_up|gate|up|down)_exps\.(weight|bias)")
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous range of a shard's file."""

    shard: int
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPart:
    """One matrix or bias of every expert of a layer.

    `shape` is (row length, rows), for a bias (values, 1); `shards` and `offsets` are int64 arrays
    [n experts].
    """

    name: str
    type: GGMLType
    shape: tuple[int, int]
    shards: NDArray[np.int64]
    offsets: NDArray[np.int64]

    @property
    def nbytes(self) -> int:
        """Bytes of this part of one expert."""
        return row_bytes(self.type, self.shape[0]) * self.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class ExpertLayer:
    """The routed experts of a layer; `parts` by name in the order of PART_NAMES."""

    layer: int
    n_experts: int
    parts: Mapping[str, ExpertPart]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert without any padding."""
        return sum(part.nbytes for part in self.parts.values())

    def extents(self, expert: int) -> tuple[Extent, ...]:
        """The ranges that hold an expert, in file order; gaps below a page are read along."""
        ranges = sorted(
            (int(part.shards[expert]), int(part.offsets[expert]), part.nbytes)
            for part in self.parts.values()
        )
        merged: list[Extent] = []
        for shard, offset, nbytes in ranges:
            last = merged[-1] if merged else None
            if last and last.shard == shard and offset - last.offset - last.nbytes < PAGE:
                merged[-1] = Extent(shard, last.offset, offset + nbytes - last.offset)
            else:
                merged.append(Extent(shard, offset, nbytes))
        return tuple(merged)


def skipped_blocks(gguf: GGUF) -> range:
    """The last blocks, which guess tokens ahead: a forward pass leaves them out."""
    ahead = gguf.int(".nextn_predict_layers", 0, minimum=0)
    if ahead == 0:
        return range(0)
    blocks = gguf.int(".block_count", minimum=ahead + 1)
    return range(blocks - ahead, blocks)


def block_count(gguf: GGUF) -> int:
    """How many blocks a forward pass runs."""
    return gguf.int(".block_count", minimum=1) - len(skipped_blocks(gguf))


def expert_layers(gguf: GGUF) -> dict[int, ExpertLayer]:
    """The layers with routed experts that a forward pass runs, checked."""
    skipped = skipped_blocks(gguf)
    return {n: layer for n, layer in all_expert_layers(gguf).items() if n not in skipped}


def all_expert_layers(gguf: GGUF) -> dict[int, ExpertLayer]:
    """All layers with routed experts, checked; FormatError if parts are lost or do not match."""
    found: dict[int, list[ExpertPart]] = defaultdict(list)
    singles: dict[tuple[int, str], dict[int, TensorInfo]] = defaultdict(dict)
    for name, info in gguf.tensors.items():
        if match := _STACKED.fullmatch(name):
            found[int(match[1])] += _stacked_parts(gguf, info, match[2], match[3])
        elif match := _SINGLE.fullmatch(name):
            singles[int(match[1]), _part_name(match[2], match[4])][int(match[3])] = info
    for (layer, name), tensors in singles.items():
        found[layer].append(_single_part(gguf, name, tensors))
    for slabs in slab_layers(gguf).values():
        found[slabs.layer] += _packed_parts(slabs)
    return {layer: _checked_layer(gguf, layer, found[layer]) for layer in sorted(found)}


def is_expert_tensor(name: str) -> bool:
    """Whether a tensor holds routed experts, in any of the layouts."""
    return any(pattern.fullmatch(name) for pattern in (_STACKED, _SINGLE, SLAB_TENSOR))


def _part_name(projection: str, kind: str) -> str:
    return projection if kind == "weight" else f"{projection}_bias"


def _stacked_parts(gguf: GGUF, info: TensorInfo, projection: str, kind: str) -> list[ExpertPart]:
    """The part of a stacked tensor, or the two of a fused one."""
    dimensions = 3 if kind == "weight" else 2
    if len(info.shape) != dimensions:
        _fail(gguf, info, f"has shape {list(info.shape)}, expected {dimensions} dimensions")
    count = info.shape[-1]
    if count > MAX_EXPERTS:
        _fail(gguf, info, f"stacks {count} experts, more than the limit of {MAX_EXPERTS}")
    row, rows = info.shape[:2] if kind == "weight" else (info.shape[0], 1)
    shards = np.full(count, info.shard, np.int64)
    offsets = info.offset + np.arange(count, dtype=np.int64) * (info.nbytes // count)
    if projection != "gate_up":
        part = ExpertPart(_part_name(projection, kind), info.type, (row, rows), shards, offsets)
        return [part]
    if (rows if kind == "weight" else row) % 2:
        _fail(gguf, info, f"has shape {list(info.shape)}, gate and up cannot be halves of it")
    half = (row, rows // 2) if kind == "weight" else (row // 2, 1)
    gate = ExpertPart(_part_name("gate", kind), info.type, half, shards, offsets)
    return [
        gate,
        ExpertPart(_part_name("up", kind), info.type, half, shards, offsets + gate.nbytes),
    ]


def _single_part(gguf: GGUF, name: str, tensors: Mapping[int, TensorInfo]) -> ExpertPart:
    """The part made of one tensor per expert."""
    first = next(iter(tensors.values()))
    for expert in range(len(tensors)):
        if expert not in tensors:
            _fail(gguf, first, f"has no sibling for expert {expert}: the model is incomplete")
        info = tensors[expert]
        if (info.type, info.shape) != (first.type, first.shape):
            _fail(gguf, info, f"differs in type or shape from {first.name!r}")
    dimensions = 1 if name.endswith("_bias") else 2
    if len(first.shape) != dimensions:
        _fail(gguf, first, f"has shape {list(first.shape)}, expected {dimensions} dimensions")
    ordered = [tensors[expert] for expert in range(len(tensors))]
    return ExpertPart(
        name,
        first.type,
        (first.shape[0], first.shape[1] if dimensions == 2 else 1),
        np.array([info.shard for info in ordered], np.int64),
        np.array([info.offset for info in ordered], np.int64),
    )


def _packed_parts(slabs: SlabLayer) -> list[ExpertPart]:
    """The parts of packed experts; every class has the same ones."""
    shards = np.array([slab_class.tensor.shard for slab_class in slabs.classes], np.int64)
    starts = np.array([slab_class.tensor.offset for slab_class in slabs.classes], np.int64)
    strides = np.array([slab_class.stride for slab_class in slabs.classes], np.int64)
    slab = starts[slabs.class_of] + strides[slabs.class_of] * slabs.index_of
    parts = []
    for number, part in enumerate(slabs.classes[0].parts):
        within = np.array([c.parts[number].offset for c in slabs.classes], np.int64)
        offsets = slab + within[slabs.class_of]
        parts.append(ExpertPart(part.name, part.type, part.shape, shards[slabs.class_of], offsets))
    return parts


def _checked_layer(gguf: GGUF, layer: int, found: list[ExpertPart]) -> ExpertLayer:
    """The layer made of these parts, which must be complete and fit one another."""

    def fail(reason: str) -> NoReturn:
        raise FormatError(gguf.path, f"experts of layer {layer}", reason)

    by_name = {part.name: part for part in found}
    if len(by_name) < len(found):
        fail("a part is stored twice, for example both fused and separate")
    parts = {name: by_name[name] for name in PART_NAMES if name in by_name}
    for name in ("up", "down"):
        if name not in parts:
            fail(f"the {name} matrices are missing: the model is incomplete")
    width, rows = parts["up"].shape
    expected = {"gate": (width, rows), "down": (rows, width)}
    n_experts = len(parts["up"].offsets)
    for name, part in parts.items():
        matrix = name.removesuffix("_bias")
        if matrix not in parts:
            fail(f"there are {name} values but no {matrix} matrices")
        shape = expected.get(name, part.shape) if name == matrix else (parts[matrix].shape[1], 1)
        if part.shape != shape:
            fail(f"{name} has shape {list(part.shape)}, expected {list(shape)} to fit up")
        if len(part.offsets) != n_experts:
            fail(f"{len(part.offsets)} of {name}, but {n_experts} of up")
    declared = gguf.int(".expert_count", n_experts)
    if declared != n_experts:
        gguf.fail(".expert_count", f"is {declared}, but layer {layer} has {n_experts} experts")
    return ExpertLayer(layer, n_experts, parts)


def _fail(gguf: GGUF, info: TensorInfo, reason: str) -> NoReturn:
    raise FormatError(gguf.shards[info.shard].path, f"tensor {info.name!r}", reason)
