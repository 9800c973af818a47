"""What the layers keep of one sequence, and the batch that a forward pass takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .kernels.attention import KEYS
from .pages import PAGE, Reservation
from .pool import Launch
from .snapshots import (
    Bytes,
    Checkpoint,
    Mirror,
    gather,
    layer_views,
    rounded,
    scatter,
    window_start,
)

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

    There is room for `positions`: the last ones. `keys` and `values` are addresses.
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
    left and writes the other copy, so that a step which is given up has changed nothing. A sequence
    can be cut to a length that it has a checkpoint of. `mirrors` are told when the host's memory is
    read or written here.
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
        self.mirrors: list[Mirror] = []
        self.checkpoints: list[Checkpoint] = []  # by length; the tokens up to there are still known
        self._written = 0  # the end of all positions written since the start
        self._restored = 0  # windows hold nothing of what came before this length needs
        self._peak = 0  # the end of all positions ever written
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

    @property
    def cuttable(self) -> bool:
        """Whether every layer keeps all positions, so that any cut is possible."""
        return not self._states.nbytes and not any(p.shape.window for p in self.layers.values())

    @property
    def nbytes(self) -> int:
        """What the cache holds of the machine's memory by now, without checkpoints; in bytes."""
        total = 2 * self._states.nbytes
        for place in self.layers.values():
            part = min(rounded(self._peak), place.positions) / place.positions
            for stride in (place.key_head_stride, place.value_head_stride):
                total += place.shape.heads * -(-int(stride * part) // PAGE) * PAGE
        return total

    def begin(self, position: int, end: int) -> None:
        """A step for [position, end) starts; `position` is the end of what is kept."""
        assert end - position <= STEP_TOKENS
        if position and not self._is_ready(position):
            saved = next(c for c in self.checkpoints if c.length == position)
            self.restore(position, saved.edge)
        self.checkpoints = [c for c in self.checkpoints if c.length <= position]
        self._states.begin(position)
        self._written = max(self._written, end) if position else end
        self._restored = self._restored if position else 0
        self._peak = max(self._peak, end)

    def end(self, position: int) -> None:
        """The step is done: what is kept ends at `position`."""
        self._states.end(position)

    def kept(self, length: int) -> int:
        """How many positions are left of a sequence that is cut to `length`.

        All of them where every layer keeps all K and V. What left a window is lost, and recurrent
        state cannot be taken back, except by the last step: there the sequence is cut to its last
        checkpoint before, or starts from nothing.
        """
        if self._is_ready(length):
            return length
        return max((c.length for c in self.checkpoints if c.length <= length), default=0)

    def _is_ready(self, length: int) -> bool:
        """Whether a sequence cut to `length` can go on without a checkpoint."""
        for place in self.layers.values():
            window = place.shape.window
            first_seen = max(0, length - window + 1)
            restored = window_start(window, self._restored)
            if window and first_seen < max(self._written - place.positions, restored):
                return False
        return self._states.kept(length) == length

    # ------------------------------------------------------------------------------ snapshots
    def span(self, start: int, end: int) -> list[Bytes]:
        """Memory of K and V of [start, end), and of the rest of the last group; see snapshots.py.

        The layers with all positions only; `start` is a multiple of GROUP.
        """
        stop = rounded(end)
        places = [place for place in self.layers.values() if not place.shape.window]
        memory = self._memory.bytes
        return [view for place in places for view in layer_views(memory, place, start, stop)]

    def edge(self, length: int) -> Bytes:
        """What layers with windows or states keep of the first `length` tokens; `kept(length)`."""
        for saved in self.checkpoints:
            if saved.length == length:
                return saved.edge
        assert self._is_ready(length)
        for mirror in self.mirrors:
            mirror.to_host(length)
        return gather([*self._window_views(length), *self._states.views(length)])

    def checkpoint(self, length: int) -> None:
        """Keep the edge at `length`, where the last step ended, for later cuts."""
        if not self.cuttable and all(c.length != length for c in self.checkpoints):
            kept = [*self.checkpoints, Checkpoint(length, self.edge(length))]
            self.checkpoints = sorted(kept, key=lambda c: c.length)

    def restore(self, length: int, edge: Bytes) -> None:
        """Go on after `length` tokens, whose span the memory holds already."""
        scatter(edge, [*self._window_views(length), *self._states.renew(length)])
        self._written = self._restored = length
        self._peak = max(self._peak, length)
        for mirror in self.mirrors:
            mirror.to_device(length)

    def copy(self, source: KVCache, length: int) -> None:
        """Take the first `length` tokens from another cache, which can be cut to there."""
        for mirror in source.mirrors:
            mirror.to_host(length)
        for target, view in zip(self.span(0, length), source.span(0, length), strict=True):
            target[:] = view
        self.restore(length, source.edge(length))
        self.checkpoints = [c for c in source.checkpoints if c.length <= length]

    def edge_bytes(self, length: int) -> int:
        """The size of an edge after `length` tokens."""
        return self._states.nbytes + sum(view.size for view in self._window_views(length))

    def _window_views(self, length: int) -> list[Bytes]:
        places = [place for place in self.layers.values() if place.shape.window]
        memory, stop = self._memory.bytes, rounded(length)
        return [
            view
            for place in places
            for view in layer_views(memory, place, window_start(place.shape.window, length), stop)
        ]

    def state(self, layer: int) -> tuple[int, int]:
        """Addresses of a recurrent layer's state: where this step finds it, and is to leave it."""
        return self._states.of(layer)


class _RecurrentStates:
    """Two copies of the state of all recurrent layers, and the position at which each one ends."""

    def __init__(self, shapes: Sequence[LayerShape], address: int, memory: Reservation) -> None:
        self._offsets: dict[int, int] = {}
        self.nbytes = 0
        for layer, shape in enumerate(shapes):
            if isinstance(shape, RecurrentShape):
                self._offsets[layer] = self.nbytes
                self.nbytes += shape.nbytes
        start = address - memory.address
        self._copies = [
            memory.bytes[start + n * self.nbytes : start + (n + 1) * self.nbytes] for n in (0, 1)
        ]
        self._addresses = (address, address + self.nbytes)
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

    def views(self, length: int) -> list[Bytes]:
        """The memory of the state that ends at `length`."""
        return [self._copies[self._ends.index(length)]] if self._offsets else []

    def renew(self, length: int) -> list[Bytes]:
        """Memory for a state that ends at `length`; there is no other one then."""
        self._ends[:] = length, _INVALID
        return self._copies[:1] if self._offsets else []

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
