"""The KV cache of one sequence, and the batch that a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .kernels.attention import KEYS
from .pages import Reservation
from .pool import Launch


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps per position: heads and sizes of K and V."""

    heads: int
    key_size: int
    value_size: int

    @property
    def padded_value_size(self) -> int:
        return -(-self.value_size // 16) * 16


def cache_bytes(shapes: list[KVShape], context: int, kv_type: str) -> int:
    """What a cache of `context` positions takes, in bytes."""
    positions = -(-context // KEYS) * KEYS
    values = sum(s.heads * (s.key_size + s.padded_value_size) for s in shapes)
    return positions * values * (2 if kv_type == "f16" else 4)


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Where K and V of one layer lie, in the layout of kernels/attention.py; strides in bytes."""

    shape: KVShape
    keys: int
    values: int
    key_head_stride: int
    value_head_stride: int


class KVCache:
    """K and V of one sequence for every layer; memory is taken as positions are written.

    `kv_type` is "f16" or "f32"; `length` positions are valid.
    """

    def __init__(self, shapes: list[KVShape], context: int, kv_type: str) -> None:
        self.context, self.kv_type, self.length = context, kv_type, 0
        size = 2 if kv_type == "f16" else 4
        positions = -(-context // KEYS) * KEYS
        per_layer = [
            (
                s.heads * positions * s.key_size * size,
                s.heads * positions * s.padded_value_size * size,
            )
            for s in shapes
        ]
        self._memory = Reservation(
            sum(k + v for k, v in per_layer),
            f"{context} tokens of context; choose fewer with --ctx-size",
        )
        address = self._memory.address
        self.layers: list[LayerCache] = []
        self.launches: dict[object, Launch] = {}  # of single-token steps, by ops
        for shape, (key_bytes, value_bytes) in zip(shapes, per_layer, strict=True):
            self.layers.append(
                LayerCache(
                    shape,
                    address,
                    address + key_bytes,
                    key_bytes // shape.heads,
                    value_bytes // shape.heads,
                )
            )
            address += key_bytes + value_bytes


@dataclass(slots=True)
class SequenceSlice:
    """Rows [start, stop) of a batch: consecutive tokens of one sequence, from `position` on."""

    cache: KVCache
    start: int
    stop: int
    position: int


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
