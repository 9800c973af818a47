"""What the layers keep of one sequence, and the batch that a forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .kernels.attention import KEYS
from .pages import Reservation
from .pool import Launch

STEP_TOKENS = 512  # of one sequence that go through the model together, at most


@dataclass(frozen=True, slots=True)
class KVShape:
    """A layer that keeps K and V per position: heads and sizes.

    With a `window` it keeps the last positions only: the window and the tokens of a step.
    """

    heads: int
    key_size: int
    value_size: int
    window: int = 0

    @property
    def padded_value_size(self) -> int:
        return -(-self.value_size // 16) * 16

    def positions(self, context: int) -> int:
        """For how many positions there is room, in a cache for `context` of them."""
        needed = min(context, self.window + STEP_TOKENS) if self.window else context
        return -(-needed // KEYS) * KEYS


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """A layer that keeps `values` float32 of all positions together; they are 0 at the start.

    What lies where among the values is the layer's own affair.
    """

    values: int

    @property
    def nbytes(self) -> int:
        return -(-4 * self.values // 64) * 64


LayerShape = KVShape | RecurrentShape
_INVALID = -1  # the end of a state that is being written


def cache_bytes(shapes: Sequence[LayerShape], context: int, kv_type: str) -> int:
    """What a cache of `context` positions takes, in bytes."""
    size = 2 if kv_type == "f16" else 4
    return sum(
        2 * s.nbytes
        if isinstance(s, RecurrentShape)
        else s.positions(context) * s.heads * (s.key_size + s.padded_value_size) * size
        for s in shapes
    )


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where K and V of one layer lie, in the layout of kernels/attention.py; strides in bytes.

    There is room for `positions`: the last ones.
    """

    shape: KVShape
    positions: int
    keys: int
    values: int
    key_head_stride: int
    value_head_stride: int


class KVCache:
    """What every layer keeps of one sequence; memory is taken as positions are written.

    `kv_type` is "f16" or "f32". Recurrent state exists twice: a step reads what the step before
    left and writes the other copy, so that a step which is given up has changed nothing.
    """

    def __init__(self, shapes: Sequence[LayerShape], context: int, kv_type: str) -> None:
        self.context, self.kv_type = context, kv_type
        size = 2 if kv_type == "f16" else 4
        self._memory = Reservation(
            cache_bytes(shapes, context, kv_type),
            f"{context} tokens of context; choose fewer with --ctx-size",
        )
        self.layers: dict[int, LayerCache] = {}
        self.launches: dict[object, Launch] = {}  # of single-token steps, by ops
        self._written = 0  # the end of all positions written since the start
        address = self._memory.address
        for layer, shape in enumerate(shapes):
            if isinstance(shape, RecurrentShape):
                continue
            positions = shape.positions(context)
            key_head, value_head = (
                positions * n * size for n in (shape.key_size, shape.padded_value_size)
            )
            values = address + shape.heads * key_head
            self.layers[layer] = LayerCache(shape, positions, address, values, key_head, value_head)
            address = values + shape.heads * value_head
        self._states = _RecurrentStates(shapes, address, self._memory)

    def begin(self, position: int, end: int) -> None:
        """A step for [position, end) starts; `position` is the end of what is kept."""
        assert end - position <= STEP_TOKENS
        self._states.begin(position)
        self._written = max(self._written, end) if position else end

    def end(self, position: int) -> None:
        """The step is done: what is kept ends at `position`."""
        self._states.end(position)

    def kept(self, length: int) -> int:
        """How many positions are left of a sequence that is cut to `length`.

        All of them where every layer keeps all K and V. What left a window is lost, and recurrent
        state cannot be taken back, except by the last step: there the sequence starts from nothing.
        """
        for place in self.layers.values():
            first_seen = max(0, length - place.shape.window + 1)
            if place.shape.window and first_seen + place.positions < self._written:
                return 0
        return self._states.kept(length)

    def state(self, layer: int) -> tuple[int, int]:
        """Addresses of a recurrent layer's state: where this step finds it, and is to leave it."""
        return self._states.of(layer)


class _RecurrentStates:
    """Two copies of the state of all recurrent layers, and the position at which each one ends."""

    def __init__(self, shapes: Sequence[LayerShape], address: int, memory: Reservation) -> None:
        self._offsets: dict[int, int] = {}
        self._nbytes = 0
        for layer, shape in enumerate(shapes):
            if isinstance(shape, RecurrentShape):
                self._offsets[layer] = self._nbytes
                self._nbytes += shape.nbytes
        start = address - memory.address
        self._copies = [
            memory.bytes[start + n * self._nbytes : start + (n + 1) * self._nbytes] for n in (0, 1)
        ]
        self._addresses = (address, address + self._nbytes)
        self._ends = [_INVALID, _INVALID]
        self._source = 0

    def begin(self, position: int) -> None:
        if not self._offsets:
            return
        if position == 0:
            self._ends[:] = _INVALID, _INVALID
            self._copies[0][:] = 0
            self._ends[0] = 0
        self._source = self._ends.index(position)
        self._ends[1 - self._source] = _INVALID

    def end(self, position: int) -> None:
        self._ends[1 - self._source] = position

    def kept(self, length: int) -> int:
        return length if not self._offsets or length in self._ends else 0

    def of(self, layer: int) -> tuple[int, int]:
        offset = self._offsets[layer]
        return (
            self._addresses[self._source] + offset,
            self._addresses[1 - self._source] + offset,
        )


@dataclass(slots=True)
class SequenceSlice:
    """Rows [start, stop) of a batch: consecutive tokens of one sequence, from `position` on.

    `length`: how many tokens the sequence is known to get.
    """

    cache: KVCache
    start: int
    stop: int
    position: int
    length: int

    def rows(self, x: Rows) -> Rows:
        """Its rows of a batch's."""
        return x.part(self.start, self.stop - self.start)


@dataclass(slots=True)
class Trace:
    """The routing of a forward pass: per layer, expert ids and weights [T, k] in router order."""

    experts: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    weights: dict[int, NDArray[np.float32]] = field(default_factory=dict)

    def record(self, layer: int, ids: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        """Append the choices of more tokens."""
        if layer in self.experts:
            ids = np.concatenate([self.experts[layer], ids])
            weights = np.concatenate([self.weights[layer], weights])
        self.experts[layer], self.weights[layer] = ids.copy(), weights.copy()


@dataclass(slots=True)
class Batch:
    """Tokens of one or several sequences for one forward pass.

    tokens, positions: int64 [T]; `wanted`: int64, the rows whose logits are asked for.
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    sequences: list[SequenceSlice]
    wanted: NDArray[np.int64]
    trace: Trace | None = None
