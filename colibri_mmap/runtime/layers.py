"""Layers that model families share. Attribute names are GGUF tensor names.

T tokens, D model width, F hidden width of a feed-forward network, E experts, k of them per token.
A layer reads its weights once, at open, and is called with the residual stream x [T, D], which it
adds its output to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..format.gguf import GGUF
from .arena import Rows
from .experts import ExpertStore, RouterShape, route
from .kernels.routing import (
    GROUP_BY_MAXIMUM,
    GROUP_BY_TWO_BEST,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
)
from .kv import Batch, KVShape, LayerShape
from .ops import Ops
from .rope import RopeFrequencies, rope_frequencies
from .weights import Matrix, Vector, Weights

Rope = tuple[Rows, Rows]  # cosines and sines of the batch's positions


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Grouped-query attention: `heads` queries share `kv_heads` keys and values."""

    width: int
    heads: int
    kv_heads: int
    key_size: int
    value_size: int
    eps: float
    rotated: int
    half_split: bool

    @classmethod
    def from_gguf(
        cls, gguf: GGUF, *, half_split: bool, kv_heads: int | None = None
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
            gguf.float(".attention.layer_norm_rms_epsilon"),
            rotated,
            half_split,
        )


class GroupedQueryAttention:
    """x += attn_output(attention(rope(norm(q)), rope(norm(k)), v)) of attn_norm(x).

    Biases and the norms of q and k are applied where the file has them; a norm of the width of
    one head works on each head, one of the width of the row on the whole row.
    """

    def __init__(self, weights: Weights, layer: int, shape: AttentionShape) -> None:
        self.shape, self.layer = shape, layer
        self.cache_shape = KVShape(shape.kv_heads, shape.key_size, shape.value_size)
        prefix = f"blk.{layer}."
        q_rows = shape.heads * shape.key_size
        k_rows, v_rows = shape.kv_heads * shape.key_size, shape.kv_heads * shape.value_size
        self.attn_norm = weights.vector(prefix + "attn_norm.weight", shape.width)
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

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        shape = self.shape
        h = ops.rms_norm(x, self.attn_norm, shape.eps)
        q, k, v = ops.linears(h, self.attn_q, self.attn_k, self.attn_v)
        for rows, bias in ((q, self.attn_q_bias), (k, self.attn_k_bias), (v, self.attn_v_bias)):
            if bias is not None:
                ops.add_bias(rows, bias)
        for rows, norm in ((q, self.attn_q_norm), (k, self.attn_k_norm)):
            if norm is not None:
                ops.rms_norm(rows.split(rows.width // norm.n), norm, shape.eps, in_place=True)
        if rope is not None:
            ops.rope(q, shape.heads, rope, half_split=shape.half_split)
            ops.rope(k, shape.kv_heads, rope, half_split=shape.half_split)
        attended = ops.attention(q, k, v, batch, self.layer, shape.key_size**-0.5)
        y = ops.linear(attended, self.attn_output)
        if self.attn_output_bias is not None:
            ops.add_bias(y, self.attn_output_bias)
        ops.add(x, y)


class GatedFeedForward:
    """x += down(silu(gate(h)) * up(h)) for the normed h."""

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        self.gate, self.up, self.down = gate, up, down

    @classmethod
    def dense(cls, weights: Weights, layer: int, width: int, hidden: int) -> GatedFeedForward:
        """The feed-forward network of a dense layer."""
        prefix = f"blk.{layer}.ffn_"
        return cls(
            weights.matrix(prefix + "gate.weight", hidden, width),
            weights.matrix(prefix + "up.weight", hidden, width),
            weights.matrix(prefix + "down.weight", width, hidden),
        )

    @classmethod
    def shared(cls, weights: Weights, layer: int, width: int, hidden: int) -> GatedFeedForward:
        """The experts that every token of a layer takes, `hidden` values wide together."""
        prefix = f"blk.{layer}.ffn_"
        return cls(
            weights.matrix(prefix + "gate_shexp.weight", hidden, width),
            weights.matrix(prefix + "up_shexp.weight", hidden, width),
            weights.matrix(prefix + "down_shexp.weight", width, hidden),
        )

    def output(self, h: Rows, ops: Ops) -> Rows:
        gate, up = ops.linears(h, self.gate, self.up)
        return ops.linear(ops.silu_mul(gate, up), self.down)

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None:
        ops.add(x, self.output(h, ops))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Routed experts that map `width` values through `hidden` ones, and how they are chosen."""

    width: int
    hidden: int
    router: RouterShape

    @classmethod
    def from_gguf(cls, gguf: GGUF, hidden_key: str, *, normalise: bool) -> ExpertsShape:
        """Softmax routing over all experts; `hidden_key` holds the width of an expert."""
        count = gguf.int(".expert_count", minimum=1)
        used = gguf.int(".expert_used_count", minimum=1, maximum=count)
        return cls(
            gguf.int(".embedding_length", minimum=1),
            gguf.int(hidden_key, minimum=1),
            RouterShape(count, used, normalise=normalise),
        )

    @classmethod
    def with_stated_routing(cls, gguf: GGUF, gating: int) -> ExpertsShape:
        """Routing as the keys of the DeepSeek kind say; `gating` where the file is silent."""
        count = gguf.int(".expert_count", minimum=1)
        groups = gguf.int(".expert_group_count", 1, minimum=0) or 1
        if count % groups:
            gguf.fail(".expert_group_count", f"must divide the {count} experts, is {groups}")
        groups_used = groups
        if groups > 1:
            groups_used = gguf.int(".expert_group_used_count", minimum=1, maximum=groups)
        gating = gguf.int(".expert_gating_func", 0) or gating
        if gating not in (SOFTMAX, SIGMOID, SQRT_SOFTPLUS):
            gguf.fail(".expert_gating_func", f"must be 1, 2 or 4, is {gating}")
        router = RouterShape(
            count,
            gguf.int(".expert_used_count", minimum=1, maximum=count // groups * groups_used),
            gating=gating,
            normalise=gguf.bool(".expert_weights_norm", False),
            scale=gguf.float(".expert_weights_scale", 0.0) or 1.0,  # 0 means not stated
            groups=groups,
            groups_used=groups_used,
            group_rule=GROUP_BY_MAXIMUM if gating == SOFTMAX else GROUP_BY_TWO_BEST,
        )
        width = gguf.int(".embedding_length", minimum=1)
        return cls(width, gguf.int(".expert_feed_forward_length", minimum=1), router)


class MixtureOfExperts:
    """x += the weighted sum of the experts that the router chooses for h."""

    def __init__(
        self, weights: Weights, layer: int, shape: ExpertsShape, store: ExpertStore
    ) -> None:
        self.shape, self.layer, self.store = shape, layer, store
        prefix, count = f"blk.{layer}.", shape.router.count
        self.ffn_gate_inp = weights.matrix(prefix + "ffn_gate_inp.weight", count, shape.width)
        self.exp_probs_b = weights.optional_vector(prefix + "exp_probs_b.bias", count)
        experts = weights.experts(layer, count, shape.width, shape.hidden)
        store.add_layer(layer, experts, self.ffn_gate_inp)

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None:
        logits = ops.linear(h, self.ffn_gate_inp)
        routing = route(ops, logits, self.shape.router, self.exp_probs_b)
        if batch.trace is not None:
            batch.trace.record(self.layer, routing.ids, routing.weights)
        self.store.add_experts(x, h, self.layer, routing)


class ExpertsAndShared:
    """x += routed experts(h) + the shared ones(h), which every token takes."""

    def __init__(self, routed: MixtureOfExperts, shared: FeedForward) -> None:
        self.routed, self.shared = routed, shared

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None:
        self.routed.add_to(x, h, ops, batch)
        self.shared.add_to(x, h, ops, batch)


class GatedSharedExpert:
    """x += sigmoid(ffn_gate_inp_shexp . h) * expert(h): the expert that every token takes."""

    def __init__(self, weights: Weights, layer: int, width: int, hidden: int) -> None:
        prefix = f"blk.{layer}.ffn_"
        self.ffn_gate_inp_shexp = weights.matrix(prefix + "gate_inp_shexp.weight", 1, width)
        self.expert = GatedFeedForward.shared(weights, layer, width, hidden)

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None:
        gate = ops.numpy(ops.linear(h, self.ffn_gate_inp_shexp))
        factors = np.float32(1.0) / (np.float32(1.0) + np.exp(-gate[:, 0]))
        ops.add_weighted(x, self.expert.output(h, ops), factors)


class Mixer(Protocol):
    """What mixes the tokens in a block: attention, a convolution or a recurrence."""

    @property
    def cache_shape(self) -> LayerShape: ...

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None: ...


class FeedForward(Protocol):
    """What follows the mixer in a block: dense or experts."""

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None: ...


class Block:
    """x += mixer, then x += feed-forward, each of the normed x (pre-norm)."""

    def __init__(self, mixer: Mixer, ffn_norm: Vector, ffn: FeedForward, eps: float) -> None:
        self.mixer, self.ffn_norm, self.ffn, self.eps = mixer, ffn_norm, ffn, eps

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        self.mixer.add_to(x, ops, batch, rope)
        h = ops.rms_norm(x, self.ffn_norm, self.eps)
        self.ffn.add_to(x, h, ops, batch)


class Decoder:
    """The pre-norm decoder-only transformer: embedding, blocks, final norm, output head.

    `rope` is what the mixers rotate with; None where none of them does.
    """

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        blocks: Sequence[Block],
        rope: RopeFrequencies | None,
        output_norm: str = "output_norm.weight",
    ) -> None:
        gguf = weights.gguf
        self.ops, self.blk, self.rope = ops, blocks, rope
        self.context_length = gguf.int(".context_length", minimum=0)
        self.kv_shapes: Sequence[LayerShape] = [block.mixer.cache_shape for block in blocks]
        width = gguf.int(".embedding_length", minimum=1)
        self.vocabulary = gguf.tensor("token_embd.weight").shape[-1]
        self.token_embd = weights.matrix("token_embd.weight", self.vocabulary, width)
        self.output_norm = weights.vector(output_norm, width)
        self.output = (
            weights.matrix("output.weight", self.vocabulary, width)
            if weights.has("output.weight")
            else self.token_embd
        )

    @classmethod
    def with_attention(
        cls,
        weights: Weights,
        ops: Ops,
        shape: AttentionShape,
        make_ffn: Callable[[int], FeedForward],
    ) -> Decoder:
        """Grouped-query attention of one shape in every block."""
        blocks = [
            Block(
                GroupedQueryAttention(weights, i, shape),
                weights.vector(f"blk.{i}.ffn_norm.weight", shape.width),
                make_ffn(i),
                shape.eps,
            )
            for i in range(weights.gguf.int(".block_count", minimum=1))
        ]
        return cls(weights, ops, blocks, rope_frequencies(weights, shape.rotated))

    def forward(self, batch: Batch) -> Rows:
        """Logits [wanted, V] of a batch, whose tokens are appended to their caches."""
        ops = self.ops
        x = ops.embed(self.token_embd, batch.tokens)
        rope = None if self.rope is None else ops.rope_table(self.rope, batch.positions)
        for block in self.blk:
            with ops.temporaries():
                block.add_to(x, ops, batch, rope)
        wanted = ops.rms_norm(ops.select(x, batch.wanted), self.output_norm, self.blk[-1].eps)
        return ops.linear(wanted, self.output)
