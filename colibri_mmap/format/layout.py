"""The plan of a container: which source bytes go where, and the header that says so.

Reads headers only. Offsets of units and tensors count from the start of the container's data.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import xxhash

from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.arrays import ValueType
from colibri_mmap.format.container import (
    ALIGN_KEY,
    ALIGNMENT,
    HEADER_CHECKSUM_KEY,
    MAX_ALIGN,
    PADDING_TENSOR,
    PART_ALIGNMENT,
    TRUNK_CHECKSUMS_KEY,
    VERSION,
    VERSION_KEY,
    SlabPart,
    class_key,
    header_checksum,
    layer_key,
    round_up,
    slab_tensor_name,
)
from colibri_mmap.format.encode import (
    PREAMBLE_BYTES,
    TensorEntry,
    encode_header,
    encode_number,
    encode_numbers,
    encode_texts,
)
from colibri_mmap.format.experts import ExpertLayer, Extent, all_expert_layers, is_expert_tensor
from colibri_mmap.format.gguf import GGUF, TensorInfo
from colibri_mmap.format.header import read_header
from colibri_mmap.format.quants import GGMLType

TRUNK_UNIT = "trunk"

_BLOCK = re.compile(r"blk\.(\d+)\.(.*)")
_STAGES = (  # prefixes of a block's tensor names, in the order in which a forward pass uses them
    r"attn_norm",
    r"(?!attn_out|ssm_out|post_|ffn_|exp_probs|nextn)",
    r"attn_out|ssm_out",
    r"post_attention_norm|ffn_norm",
    r"ffn_gate_inp|exp_probs",
    r"",
)


@dataclass(frozen=True, slots=True)
class Piece:
    """Source bytes and where they go in their record."""

    source: Extent
    at: int


@dataclass(frozen=True, slots=True)
class RecordPlan:
    """A range of the container that has one checksum; what no piece covers is zero."""

    nbytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Unit:
    """Consecutive records that are written, made durable and noted in the journal together."""

    name: str
    offset: int
    nbytes: int
    records: Callable[[], Iterator[RecordPlan]]


@dataclass(frozen=True, slots=True, eq=False)
class SlabPlan:
    """The slabs of one layer; `order` lists the experts as they are stored."""

    layer: ExpertLayer
    parts: tuple[SlabPart, ...]
    stride: int
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        return slab_tensor_name(self.layer.layer, 0)

    def records(self) -> Iterator[RecordPlan]:
        """One record per slab."""
        for expert in self.order:
            pieces = []
            for part in self.parts:
                source = self.layer.parts[part.name]
                shard, offset = int(source.shards[expert]), int(source.offsets[expert])
                pieces.append(Piece(Extent(shard, offset, part.nbytes), part.offset))
            yield RecordPlan(self.stride, tuple(pieces))

    def pairs(self, checksums: Sequence[int]) -> Iterator[bytes]:
        """The layer's tables as key-value pairs."""
        number = self.layer.layer
        stored = {expert: index for index, expert in enumerate(self.order)}
        index_of = [stored[expert] for expert in range(len(self.order))]
        yield encode_numbers(layer_key(number, "class"), ValueType.UINT32, [0] * len(index_of))
        yield encode_numbers(layer_key(number, "index"), ValueType.UINT32, index_of)
        yield encode_texts(class_key(number, 0, "parts"), [part.name for part in self.parts])
        columns = {
            "types": [int(part.type) for part in self.parts],
            "row_lengths": [part.shape[0] for part in self.parts],
            "rows": [part.shape[1] for part in self.parts],
            "offsets": [part.offset for part in self.parts],
            "checksums": checksums,
        }
        for column, values in columns.items():
            yield encode_numbers(class_key(number, 0, column), ValueType.UINT64, values)


@dataclass(frozen=True, slots=True, eq=False)
class ContainerPlan:
    """All that is decided about a container before its first byte is written.

    `pairs` are kept from the source; `padding` is the number of bytes between trunk and slabs.
    """

    pairs: tuple[bytes, ...]
    source_pairs: tuple[bytes, ...]
    align: int
    trunk: tuple[TensorInfo, ...]
    padding: int
    slabs: tuple[SlabPlan, ...]

    def units(self) -> tuple[Unit, ...]:
        """The units in file order; they cover the data without a gap."""
        trunk_bytes = sum(round_up(info.nbytes, ALIGNMENT) for info in self.trunk)
        units = [Unit(TRUNK_UNIT, 0, trunk_bytes + self.padding, self._trunk_records)]
        for slabs in self.slabs:
            end = units[-1].offset + units[-1].nbytes
            units.append(Unit(slabs.name, end, slabs.stride * len(slabs.order), slabs.records))
        return tuple(units)

    def header(self, checksums: Mapping[str, Sequence[int]]) -> bytes:
        """The header with the checksums of each unit's records; zeros where a unit has none yet."""
        trunk_records = len(self.trunk) + (self.padding > 0)
        own = [
            encode_number("general.alignment", ValueType.UINT32, ALIGNMENT),
            encode_number(VERSION_KEY, ValueType.UINT32, VERSION),
            encode_number(ALIGN_KEY, ValueType.UINT32, self.align),
            *self.source_pairs,
            encode_numbers(
                TRUNK_CHECKSUMS_KEY,
                ValueType.UINT64,
                checksums.get(TRUNK_UNIT, [0] * trunk_records),
            ),
        ]
        for slabs in self.slabs:
            own += slabs.pairs(checksums.get(slabs.name, [0] * len(slabs.order)))
        entries = self._entries()
        unsigned = encode_number(HEADER_CHECKSUM_KEY, ValueType.UINT64, 0)
        header = encode_header([*self.pairs, unsigned, *own], entries, ALIGNMENT)
        end = PREAMBLE_BYTES + sum(map(len, self.pairs)) + len(unsigned)
        signed = encode_number(HEADER_CHECKSUM_KEY, ValueType.UINT64, header_checksum(header, end))
        return header[: end - len(signed)] + signed + header[end:]

    def _entries(self) -> list[TensorEntry]:
        entries = []
        offset = 0
        for info in self.trunk:
            entries.append(TensorEntry(info.name, info.type, info.shape, offset))
            offset += round_up(info.nbytes, ALIGNMENT)
        if self.padding:
            entries.append(TensorEntry(PADDING_TENSOR, GGMLType.I8, (self.padding,), offset))
        for slabs, unit in zip(self.slabs, self.units()[1:], strict=True):
            shape = (slabs.stride, len(slabs.order))
            entries.append(TensorEntry(slabs.name, GGMLType.I8, shape, unit.offset))
        return entries

    def _trunk_records(self) -> Iterator[RecordPlan]:
        for info in self.trunk:
            piece = Piece(Extent(info.shard, info.offset, info.nbytes), 0)
            yield RecordPlan(round_up(info.nbytes, ALIGNMENT), (piece,))
        if self.padding:
            yield RecordPlan(self.padding, ())


def plan_container(
    gguf: GGUF, align: int = ALIGNMENT, order: Mapping[int, Sequence[int]] | None = None
) -> ContainerPlan:
    """The plan to pack a model; `order` may list the experts of a layer as they shall be stored."""
    if not ALIGNMENT <= align <= MAX_ALIGN or align & (align - 1):
        raise ArgumentError(f"align must be a power of two from 4096 to {MAX_ALIGN}, is {align}")
    layers = all_expert_layers(gguf)
    if unknown := sorted(set(order or {}) - set(layers)):
        raise ArgumentError(f"order names layer {unknown[0]}, which has no routed experts")
    trunk = [
        info
        for name, info in gguf.tensors.items()
        if not is_expert_tensor(name) and name != PADDING_TENSOR
    ]
    plan = ContainerPlan(
        pairs=_kept_pairs(gguf),
        source_pairs=_source_pairs(gguf),
        align=align,
        trunk=tuple(sorted(trunk, key=lambda info: _use_order(info.name))),
        padding=0 if align == ALIGNMENT else ALIGNMENT,
        slabs=tuple(_slab_plan(layer, align, order) for layer in layers.values()),
    )
    if not plan.padding:
        return plan
    unpadded = len(plan.header({})) + plan.units()[0].nbytes - plan.padding
    return replace(plan, padding=round_up(unpadded + 1, align) - unpadded)


def _slab_plan(
    layer: ExpertLayer, align: int, order: Mapping[int, Sequence[int]] | None
) -> SlabPlan:
    experts = range(layer.n_experts)
    stored = tuple((order or {}).get(layer.layer, experts))
    if sorted(stored) != list(experts):
        raise ArgumentError(
            f"order of layer {layer.layer} must name each of its {layer.n_experts} experts once"
        )
    parts = []
    end = 0
    for part in layer.parts.values():
        slab_part = SlabPart(part.name, part.type, part.shape, round_up(end, PART_ALIGNMENT))
        end = slab_part.offset + slab_part.nbytes
        parts.append(slab_part)
    return SlabPlan(layer, tuple(parts), round_up(end, align), stored)


def _kept_pairs(gguf: GGUF) -> tuple[bytes, ...]:
    """The source's metadata byte for byte, less what describes its own files."""
    header = read_header(gguf.path)
    return tuple(
        bytes(header.window[start:end])
        for key, (start, end) in header.spans.items()
        if not key.startswith(("split.", "colibri.")) and key != "general.alignment"
    )


def _source_pairs(gguf: GGUF) -> tuple[bytes, ...]:
    """What the container was made from: names, sizes and header hashes of the source's files."""
    hashes = []
    for shard in gguf.shards:
        with shard.path.open("rb") as file:
            hashes.append(xxhash.xxh3_64_intdigest(file.read(shard.data_offset)))
    return (
        encode_texts("colibri.source.names", [shard.path.name for shard in gguf.shards]),
        encode_numbers(
            "colibri.source.sizes", ValueType.UINT64, [shard.size for shard in gguf.shards]
        ),
        encode_numbers("colibri.source.headers", ValueType.UINT64, hashes),
    )


def _use_order(name: str) -> tuple[int, int, int]:
    """A sort key: input tensors, blocks by number and stage, then the output."""
    if match := _BLOCK.fullmatch(name):
        stage = next(i for i, prefix in enumerate(_STAGES) if re.match(prefix, match[2]))
        return 1, int(match[1]), stage
    if name.startswith("output"):
        return 2, 0, int(not name.startswith("output_norm"))
    return 0, 0, 0
