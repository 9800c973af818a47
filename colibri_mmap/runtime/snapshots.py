"""Parts of a KV cache as lists of byte ranges in its memory: what snapshots are made of.

A span is K and V of some positions in all layers that keep every position; any part of it is of
use. An edge is what those layers cannot give that keep a window or a state: it belongs to exactly
one length. Both have the same bytes whatever context a cache is made for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .kv import LayerCache

Bytes = NDArray[np.uint8]
GROUP = 16  # positions whose keys lie together: a span starts at a multiple of it


class Mirror(Protocol):
    """A copy of some of a cache elsewhere, such as in a GPU's memory."""

    def to_host(self, length: int) -> None:
        """Bring what belongs to the first `length` tokens into the host's cache."""

    def to_device(self, length: int) -> None:
        """Take what belongs to the first `length` tokens from the host's cache."""


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """The edge after `length` tokens: uint8, never changed."""

    length: int
    edge: Bytes


def rounded(position: int) -> int:
    """The end of the group that ends at a position or holds it."""
    return -(-position // GROUP) * GROUP


def window_start(window: int, length: int) -> int:
    """The first position that must be kept to go on after `length` tokens: its group's start."""
    return max(0, length - window + 1) // GROUP * GROUP


def layer_views(memory: Bytes, layer: LayerCache, start: int, stop: int) -> Iterator[Bytes]:
    """K of every head, then V of every head, of positions [start, stop), multiples of GROUP.

    `memory` is the whole cache's.
    """
    base = memory.ctypes.data
    first, count = start % layer.positions, stop - start
    wrapped = max(0, first + count - layer.positions)
    pieces = [(first, first + count - wrapped), (0, wrapped)]
    for address, stride, row in (
        (layer.keys, layer.key_head_stride, layer.key_head_stride // layer.positions),
        (layer.values, layer.value_head_stride, layer.value_head_stride // layer.positions),
    ):
        for head in range(layer.shape.heads):
            at = address - base + head * stride
            for low, high in pieces:
                if high > low and row:
                    yield memory[at + low * row : at + high * row]


def gather(views: Sequence[Bytes]) -> Bytes:
    """The bytes of all views, one after the other, in memory of their own."""
    return np.concatenate(views) if views else np.empty(0, np.uint8)


def scatter(data: Bytes, views: Sequence[Bytes]) -> None:
    """Fill the views from what `gather` made; they may be cut in other places."""
    assert data.size == sum(view.size for view in views)
    start = 0
    for view in views:
        view[:] = data[start : start + view.size]
        start += view.size


def without_the_closest(checkpoints: Sequence[Checkpoint], newest: int) -> list[Checkpoint]:
    """One checkpoint less, such that the rest is spread evenly; the `newest` last ones stay."""
    lengths = [0, *(checkpoint.length for checkpoint in checkpoints)]
    spare = min(
        range(1, max(2, len(lengths) - newest)),
        key=lambda n: lengths[min(n + 1, len(lengths) - 1)] - lengths[n - 1],
    )
    return [*checkpoints[: spare - 1], *checkpoints[spare:]]
