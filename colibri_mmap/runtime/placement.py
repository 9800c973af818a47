"""The last blocks of a model placed on a device: which can be, what that takes, and doing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType
from .attention import GroupedQueryAttention
from .cudasources import FLOAT_TYPES
from .device import Address, DeviceBackend, DeviceMemory
from .devicearena import aligned
from .devicekernels import DeviceKernels, supports
from .deviceops import FEW, DeviceOps
from .experts import ExpertStore
from .kv import STEP_TOKENS, KVCache
from .layers import Block, Decoder
from .trunkkernels import MAX_HEAD, attention_bytes
from .weights import Matrix, Vector

Weight = Matrix | Vector

_SMALL_BYTES = 1 << 20  # of a step: tables of the batch, and what arrays are rounded up by
_PIECE_BYTES = 16 << 20  # of weights that are read and sent at a time


class Supported(NamedTuple):
    """How many of the last blocks a device can run, and why not more; empty if all."""

    layers: int
    reason: str


@dataclass(frozen=True, slots=True)
class TrunkBytes:
    """What placing the last `layers` blocks takes of a device's memory, without KV and experts."""

    weights: int
    head: int


class PlacedTrunk:
    """Blocks that run on a device, numbered `layers`, and the output head if `has_head`.

    `ops` are their operations; up to `head_rows` rows at a time go through the head there.
    """

    head_rows = FEW

    def __init__(
        self,
        model: Decoder,
        ops: DeviceOps,
        layers: range,
        has_head: bool,
        memory: list[DeviceMemory],
    ) -> None:
        self.ops, self.layers, self.has_head = ops, layers, has_head
        self._model, self._memory = model, memory
        model.placed = self

    def attach(self, cache: KVCache, length: int) -> None:
        """Take memory for the first `length` tokens of a sequence now; ResourceError."""
        self.ops.attach(cache, length)

    def retreat(self) -> None:
        """Run the blocks on the CPU again; sequences go on with what they have."""
        self.ops.retreat()
        self.close()

    def close(self) -> None:
        """Run the blocks on the CPU again and give all memory back; safe to call twice.

        Sequences lose what the device has of them.
        """
        self._model.placed = None
        self.ops.close()
        while self._memory:
            self._memory.pop().free()


def supported_layers(model: Decoder) -> Supported:
    """How many of the last blocks can be placed."""
    if model.ops.mode != "int8":
        return Supported(0, f"mode {model.ops.mode} computes on the CPU")
    for count, block in enumerate(reversed(model.blk)):
        reason = _obstacle(block)
        if reason:
            return Supported(count, f"block {len(model.blk) - 1 - count}: {reason}")
    return Supported(len(model.blk), "")


def trunk_bytes(model: Decoder, layers: int) -> TrunkBytes:
    """What the weights of the last `layers` blocks, and those of the output head, take."""
    blocks = model.blk[len(model.blk) - layers :]
    return TrunkBytes(_nbytes(_weights_of(blocks)), _nbytes(_head_weights(model)))


def weight_types(model: Decoder, layers: int, *, head: bool) -> set[GGMLType]:
    """The types of the matrices of the last `layers` blocks, and of the output head."""
    weights = list(_weights_of(model.blk[len(model.blk) - layers :]))
    if head:
        weights += _head_weights(model)
    return {weight.type for weight in weights if isinstance(weight, Matrix)}


def scratch_bytes(model: Decoder, layers: int) -> int:
    """What intermediate values of the last `layers` blocks take in the largest step, at most."""
    width = model.token_embd.columns
    blocks = (_block_scratch(block, width) for block in model.blk[len(model.blk) - layers :])
    step = 4 * STEP_TOKENS * (2 * width + MAX_HEAD)  # x, its rows that are wanted, rope's tables
    head = 4 * FEW * (model.vocabulary + 4 * width)
    return step + max(blocks) + head + _SMALL_BYTES


def _block_scratch(block: Block, width: int) -> int:
    """What a block's rows take, and the largest of its operations beside them."""
    matrices = [weight for weight in _weights_of(block) if isinstance(weight, Matrix)]
    columns = max((matrix.columns for matrix in matrices), default=0)
    # Outputs of products and of attention, of two norms, and of experts computed on the CPU.
    values = sum(matrix.rows for matrix in matrices) + columns + 3 * width
    operations = [attention_bytes(MAX_HEAD), 2 * DeviceKernels.packed_bytes(STEP_TOKENS, columns)]
    for matrix in matrices:
        if matrix.type in FLOAT_TYPES:
            operations.append(DeviceOps.product_bytes(STEP_TOKENS, matrix))
    return 4 * STEP_TOKENS * values + max(operations)


def place_trunk(
    model: Decoder, backend: DeviceBackend, layers: int, *, head: bool = False
) -> PlacedTrunk:
    """Upload the last `layers` blocks, and with `head` the output head, which needs all blocks.

    The model runs them on the device from then on. OutOfDeviceMemory.
    """
    assert layers <= supported_layers(model).layers
    assert not head or layers == len(model.blk)
    numbers = range(len(model.blk) - layers, len(model.blk))
    weights = list(_weights_of(model.blk[numbers.start :]))
    if head:
        weights += _head_weights(model)
    memory: list[DeviceMemory] = []
    try:
        placed = _upload(backend, weights, memory)
        scratch = scratch_bytes(model, layers)
        ops = DeviceOps(backend, model.ops, placed, numbers, scratch=scratch)
    except BaseException:
        for part in memory:
            part.free()
        raise
    return PlacedTrunk(model, ops, numbers, head, memory)


def _obstacle(block: Block) -> str:
    """Why a block cannot run on a device; empty if it can."""
    mixer = block.mixer
    if not isinstance(mixer, GroupedQueryAttention):
        return f"{type(mixer).__name__} runs on the CPU only"
    largest = max(mixer.shape.key_size, mixer.shape.value_size)
    if largest > MAX_HEAD:
        return f"heads of {largest} dimensions; up to {MAX_HEAD} run on a GPU"
    for weight in _weights_of(block):
        if isinstance(weight, Matrix) and not supports(weight.type, weight.columns):
            return f"no GPU kernel for {weight.type.name} with rows of {weight.columns}"
    return ""


def _weights_of(part: object) -> Iterator[Weight]:
    """The weights that a block or a part of one holds, each once; experts are their store's."""
    seen: set[int] = set()
    pending = [part]
    while pending:
        found = pending.pop()
        if isinstance(found, (Matrix, Vector)):
            if found.address not in seen:
                seen.add(found.address)
                yield found
        elif isinstance(found, (list, tuple)):
            pending += reversed(found)
        elif type(found).__module__.startswith(__package__) and not isinstance(found, ExpertStore):
            pending += reversed(_attributes(found))


def _attributes(part: object) -> list[object]:
    if is_dataclass(part):
        return [getattr(part, field.name) for field in fields(part)]
    return list(vars(part).values())


def _head_weights(model: Decoder) -> list[Weight]:
    weights: list[object] = [model.output_norm, model.output, model.output_bias, model.logit_factor]
    return list(_weights_of(weights))


def _bytes_of(weight: Weight) -> NDArray[np.uint8]:
    raw = weight.raw() if isinstance(weight, Matrix) else weight.values.view(np.uint8)
    return raw.reshape(-1)


def _nbytes(weights: Iterator[Weight] | Sequence[Weight]) -> int:
    return sum(aligned(w.rows * w.row_bytes if isinstance(w, Matrix) else 4 * w.n) for w in weights)


def _upload(
    backend: DeviceBackend, weights: Sequence[Weight], memory: list[DeviceMemory]
) -> dict[int, Address]:
    """Host address to device address of weights, which are sent through two pinned buffers."""
    total = _nbytes(weights)
    if not total:
        return {}
    memory.append(backend.allocate(total))
    place, placed = int(memory[0].address), {}
    buffers = [backend.allocate_staging(_PIECE_BYTES) for _ in range(2)]
    sent = [backend.record(backend.compute) for _ in buffers]
    turn = 0
    for weight in weights:
        source = _bytes_of(weight)
        for start in range(0, len(source), _PIECE_BYTES):
            piece = source[start : start + _PIECE_BYTES]
            backend.synchronize(sent[turn])
            buffers[turn][: len(piece)] = piece
            backend.upload(place + start, buffers[turn][: len(piece)], backend.compute)
            sent[turn] = backend.record(backend.compute)
            turn = 1 - turn
        placed[weight.address] = Address(place)
        place += aligned(len(source))
    for event in sent:
        backend.synchronize(event)
    return placed
