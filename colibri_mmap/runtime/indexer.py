"""Sparse attention's choice of keys (DSA, DeepSeek-AI 2025). Attribute names are GGUF tensor names.

The layers with an indexer write the positions that each token of a batch attends to into one place
that all layers share, so that the layers behind them can attend to the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..format.gguf import GGUF
from .arena import Rows
from .kernels import indexer as kernels
from .kv import SequenceSlice
from .ops import Ops
from .pool import Job, job
from .rope import Rope
from .weights import Matrix, Weights

_K_NORM_EPS = 1e-6  # of the official models; no key holds it
_PARTS = 64  # of the positions of a single token, so that all threads have some to score
_SCORE_BYTES = 1 << 26  # of a batch at a time


class Selection:
    """The positions that the tokens of a batch attend to: the best `chosen` of those they see."""

    def __init__(self, chosen: int) -> None:
        self.chosen = chosen
        self._index = np.empty((1, chosen), np.int32)

    def make_room(self, tokens: int) -> None:
        """Have a row for each token of a batch."""
        if len(self._index) < tokens:
            self._index = np.empty((tokens, self.chosen), np.int32)

    def index(self, part: SequenceSlice) -> int:
        """The address of a sequence's rows; 0 where its tokens attend to all they see."""
        if part.position + part.stop - part.start <= self.chosen:
            return 0
        return self._index.ctypes.data + part.start * self._index.strides[0]


@dataclass(frozen=True, slots=True)
class IndexerShape:
    """`heads` queries of `size` values, made of `q_rank` ones, against one key per position."""

    heads: int
    size: int
    q_rank: int
    half_split: bool

    @classmethod
    def from_gguf(cls, gguf: GGUF, rotated: int, *, half_split: bool) -> IndexerShape:
        """The shape that the usual keys describe; `half_split`: how its rope is laid out."""
        return cls(
            gguf.int(".attention.indexer.head_count", minimum=1),
            gguf.int(".attention.indexer.key_length", minimum=rotated),
            gguf.int(".attention.q_lora_rank", minimum=1),
            half_split,
        )


class Indexer:
    """Scores the earlier positions for every token, and writes the best ones to `selection`."""

    def __init__(
        self, weights: Weights, layer: int, shape: IndexerShape, selection: Selection
    ) -> None:
        self.shape, self.selection = shape, selection
        prefix = f"blk.{layer}.indexer."
        width = weights.gguf.int(".embedding_length", minimum=1)
        rows = shape.heads * shape.size
        self.attn_q_b = weights.matrix(prefix + "attn_q_b.weight", rows, shape.q_rank)
        self.attn_k = weights.matrix(prefix + "attn_k.weight", shape.size, width)
        self.proj = weights.matrix(prefix + "proj.weight", shape.heads, width)
        self.k_norm = weights.vector(prefix + "k_norm.weight", shape.size)
        self.k_norm_bias = weights.vector(prefix + "k_norm.bias", shape.size)

    @property
    def of_input(self) -> tuple[Matrix, Matrix]:
        """What multiplies the layer's normed input: keys and the weights of the heads."""
        return self.attn_k, self.proj

    def rotate(self, q: Rows, k: Rows, ops: Ops, rope: Rope | None) -> None:
        """Bring queries and keys into the form in which they are compared."""
        ops.layer_norm(k, self.k_norm, self.k_norm_bias, _K_NORM_EPS, in_place=True)
        if rope is not None:
            ops.rope(q, self.shape.heads, rope, half_split=self.shape.half_split)
            ops.rope(k, 1, rope, half_split=self.shape.half_split)

    def append_job(self, k: Rows, part: SequenceSlice, layer: int) -> Job:
        """Write the keys of a sequence's tokens to its cache."""
        half = part.cache.kv_type == "f16"
        task = kernels.append_index_keys_f16 if half else kernels.append_index_keys_f32
        words = (k.address, k.stride, k.width, part.cache.layers[layer].keys)
        return job(task, k.count, 8, part.position, *words)

    def select_phases(
        self, q: Rows, weights: Rows, part: SequenceSlice, layer: int, ops: Ops
    ) -> list[list[Job]]:
        """Score and select for a sequence's tokens, some of them at a time.

        The scores of the indexer are only ever compared: factors on all of them are left out.
        """
        shape, chosen, cache = self.shape, self.selection.chosen, part.cache
        half = cache.kv_type == "f16"
        task = kernels.score_keys_f16 if half else kernels.score_keys_f32
        index, keys = self.selection.index(part), cache.layers[layer].keys
        # A single token's launch is kept: its scores have room for all that may come.
        seen = cache.context if q.count == 1 else part.position + q.count
        room = -(-seen // 16) * 16
        step = max(1, _SCORE_BYTES // (4 * room))
        scores = ops.arena.rows(min(step, q.count), room)
        parts = max(1, _PARTS // q.count)
        phases: list[list[Job]] = []
        for first in range(0, q.count, step):
            count = min(step, q.count - first)
            position = part.position + first
            some, by = q.part(first, count), weights.part(first, count)
            words = (position, some.address, some.stride, by.address, by.stride, keys)
            more = (shape.heads, shape.size, scores.address, scores.stride, chosen, parts)
            phases.append([job(task, count * parts, 1, *words, *more)])
            found = (position, scores.address, scores.stride, chosen, index + 4 * chosen * first)
            phases.append([job(kernels.select_keys, count, 1, *found)])
        return phases
