"""Grouped-query attention, with what families add to it. Attribute names are GGUF tensor names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..format.gguf import GGUF
from .arena import Rows
from .attend import ALL_KEYS, Sight
from .kv import Batch, KVShape
from .norm import LoadNorm, rms_norm
from .operations import Operations
from .rope import Rope
from .weights import Vector, Weights


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries grow with their position p, by the factor 1 + scale * ln(1 + (p + 1) // every)."""

    every: int
    scale: float

    def factors(self, positions: NDArray[np.int64]) -> NDArray[np.float32]:
        """float32 [T]."""
        steps = ((positions + 1) // self.every).astype(np.float32)
        return np.log1p(steps) * np.float32(self.scale) + np.float32(1)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values.

    `scale` is the factor on the scores, `norm` that of the input; q, k and v are brought into
    [-clamp, clamp]; the first `rotated` dimensions of a head are rotated; `residual` is a factor on
    the output.
    """

    width: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    eps: float
    rotated: int
    half_split: bool
    scale: float
    norm: LoadNorm = rms_norm
    norm_after_rope: bool = False
    sight: Sight = ALL_KEYS
    clamp: float = math.inf
    temperature: Temperature | None = None
    residual: float = 1.0

    @classmethod
    def from_gguf(
        cls,
        gguf: GGUF,
        *,
        half_split: bool,
        kv_heads: int | None = None,
        eps_key: str = ".attention.layer_norm_rms_epsilon",
    ) -> AttentionShape:
        """The shape that the usual keys describe; `kv_heads` where the layers differ in it."""
        width = gguf.int(".embedding_length", minimum=1)
        heads = gguf.int(".attention.head_count", minimum=1)
        if kv_heads is None:
            kv_heads = gguf.int(".attention.head_count_kv", heads, minimum=1)
        if kv_heads < 1 or heads % kv_heads:
            key = ".attention.head_count_kv"
            gguf.fail(key, f"must divide the {heads} query heads, is {kv_heads}")
        key_size = gguf.int(".attention.key_length", width // heads, minimum=1)
        if key_size < 1:
            gguf.fail(".attention.head_count", f"is {heads}, more than the width of {width}")
        rotated = gguf.int(".rope.dimension_count", key_size, minimum=2, maximum=key_size)
        if rotated % 2:
            gguf.fail(".rope.dimension_count", f"must be even, is {rotated}")
        return cls(
            width,
            heads,
            kv_heads,
            key_size,
            gguf.int(".attention.value_length", key_size, minimum=1),
            gguf.float(eps_key),
            rotated,
            half_split,
            key_size**-0.5,
        )


class GroupedQueryAttention:
    """x += attn_output(attention(rope(norm(q)), rope(norm(k)), v)) of attn_norm(x).

    Biases, sinks and the norms of q and k are applied where the file has them; a norm of the width
    of one head works on each head, one of the width of the row on the whole row.
    """

    def __init__(self, weights: Weights, layer: int, shape: AttentionShape) -> None:
        self.shape, self.layer = shape, layer
        self.cache_shape = KVShape(
            shape.kv_heads, shape.key_size, shape.value_size, shape.sight.reach
        )
        prefix = f"blk.{layer}."
        q_rows = shape.heads * shape.key_size
        k_rows, v_rows = shape.kv_heads * shape.key_size, shape.kv_heads * shape.value_size
        self.attn_norm = shape.norm(weights, prefix + "attn_norm")
        if weights.has(prefix + "attn_qkv.weight"):
            fused = weights.matrix(
                prefix + "attn_qkv.weight", q_rows + k_rows + v_rows, shape.width
            )
            self.attn_q = fused.part(0, q_rows)
            self.attn_k = fused.part(q_rows, k_rows)
            self.attn_v = fused.part(q_rows + k_rows, v_rows)
        else:
            self.attn_q = weights.matrix(prefix + "attn_q.weight", q_rows, shape.width)
            self.attn_k = weights.matrix(prefix + "attn_k.weight", k_rows, shape.width)
            self.attn_v = weights.matrix(prefix + "attn_v.weight", v_rows, shape.width)
        self.attn_output = weights.matrix(
            prefix + "attn_output.weight", shape.width, shape.heads * shape.value_size
        )
        self.attn_q_bias = weights.optional_vector(prefix + "attn_q.bias", q_rows)
        self.attn_k_bias = weights.optional_vector(prefix + "attn_k.bias", k_rows)
        self.attn_v_bias = weights.optional_vector(prefix + "attn_v.bias", v_rows)
        self.attn_output_bias = weights.optional_vector(prefix + "attn_output.bias", shape.width)
        self.attn_q_norm = weights.optional_vector(
            prefix + "attn_q_norm.weight", shape.key_size, q_rows
        )
        self.attn_k_norm = weights.optional_vector(
            prefix + "attn_k_norm.weight", shape.key_size, k_rows
        )
        self.attn_sinks = weights.optional_vector(prefix + "attn_sinks.weight", shape.heads)
        self.residual = Vector.of([shape.residual])

    def add_to(self, x: Rows, ops: Operations, batch: Batch, rope: Rope | None) -> None:
        shape = self.shape
        q, k, v = ops.linears(self.attn_norm(x, ops), self.attn_q, self.attn_k, self.attn_v)
        for rows, bias in ((q, self.attn_q_bias), (k, self.attn_k_bias), (v, self.attn_v_bias)):
            if bias is not None:
                ops.add_bias(rows, bias)
            if shape.clamp < math.inf:
                ops.clamp(rows, shape.clamp)
        if not shape.norm_after_rope:
            self._norm(q, k, ops)
        if rope is not None and shape.rotated:
            ops.rope(q, shape.heads, rope, half_split=shape.half_split)
            ops.rope(k, shape.kv_heads, rope, half_split=shape.half_split)
        if shape.norm_after_rope:
            self._norm(q, k, ops)
        if shape.temperature is not None:
            ops.scale(q, ops.vector(shape.temperature.factors(batch.positions)))
        attended = ops.attend(q, k, v, batch, self.layer, shape.scale, shape.sight, self.attn_sinks)
        y = ops.linear(attended, self.attn_output)
        if self.attn_output_bias is not None:
            ops.add_bias(y, self.attn_output_bias)
        if shape.residual != 1:
            ops.scale(y, self.residual)
        ops.add(x, y)

    def _norm(self, q: Rows, k: Rows, ops: Operations) -> None:
        for rows, norm in ((q, self.attn_q_norm), (k, self.attn_k_norm)):
            if norm is not None:
                heads = rows.split(rows.width // norm.n)
                ops.rms_norm(heads, norm, self.shape.eps, in_place=True)
