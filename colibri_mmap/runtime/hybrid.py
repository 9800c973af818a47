"""Qwen's hybrids: blocks of gated delta nets, and of gated attention every few layers."""

from __future__ import annotations

from ..format.experts import block_count
from .arena import Rows
from .attention import AttentionShape
from .deltanet import DeltaNetShape, GatedDeltaNet
from .experts import ExpertStore
from .kv import Batch, KVShape
from .layers import (
    Block,
    Decoder,
    ExpertsAndShared,
    ExpertsShape,
    GatedSharedExpert,
    Mixer,
    MixtureOfExperts,
)
from .norm import rms_norm
from .ops import Ops
from .rope import Rope, rope_frequencies
from .weights import Weights


class GatedAttention:
    """x += attn_output(attention(q, k, v) * sigmoid(gate)) of attn_norm(x).

    attn_q holds q and gate by turns, head by head; q and k are normed per head before rope.
    """

    def __init__(self, weights: Weights, layer: int, shape: AttentionShape) -> None:
        if shape.value_size != shape.key_size:
            what = f"is {shape.value_size}, but the gate is as wide as a key: {shape.key_size}"
            weights.gguf.fail(".attention.value_length", what)
        self.shape, self.layer = shape, layer
        self.cache_shape = KVShape(shape.kv_heads, shape.key_size, shape.value_size)
        size, width, prefix = shape.key_size, shape.width, f"blk.{layer}."
        self.attn_norm = weights.vector(prefix + "attn_norm.weight", width)
        self.attn_q = weights.matrix(prefix + "attn_q.weight", 2 * shape.heads * size, width)
        self.attn_k = weights.matrix(prefix + "attn_k.weight", shape.kv_heads * size, width)
        self.attn_v = weights.matrix(prefix + "attn_v.weight", shape.kv_heads * size, width)
        self.attn_output = weights.matrix(prefix + "attn_output.weight", width, shape.heads * size)
        self.attn_q_norm = weights.vector(prefix + "attn_q_norm.weight", size)
        self.attn_k_norm = weights.vector(prefix + "attn_k_norm.weight", size)

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        assert rope is not None
        shape, size = self.shape, self.shape.key_size
        h = ops.rms_norm(x, self.attn_norm, shape.eps)
        q_and_gate, k, v = ops.linears(h, self.attn_q, self.attn_k, self.attn_v)
        by_head = q_and_gate.split(shape.heads)
        q = ops.rms_norm(by_head.columns(0, size), self.attn_q_norm, shape.eps).join(shape.heads)
        ops.rms_norm(k.split(shape.kv_heads), self.attn_k_norm, shape.eps, in_place=True)
        ops.rope(q, shape.heads, rope, half_split=True)
        ops.rope(k, shape.kv_heads, rope, half_split=True)
        attended = ops.attend(q, k, v, batch, self.layer, size**-0.5)
        ops.sigmoid_mul(by_head.columns(size, size), attended.split(shape.heads))
        ops.add(x, ops.linear(attended, self.attn_output))


def hybrid_decoder(weights: Weights, ops: Ops, store: ExpertStore, *, tiled: bool) -> Decoder:
    """The whole model; `tiled` says which value heads share a key head (DeltaRule)."""
    gguf = weights.gguf
    layers = gguf.int(".block_count", minimum=1)  # the keys count those that are left out, too
    interval = gguf.int(".full_attention_interval", 4, minimum=1)
    usual = tuple((layer + 1) % interval != 0 for layer in range(layers))
    recurrent = gguf.bools(".attention.recurrent_layers", layers, usual)
    attention = AttentionShape.from_gguf(gguf, half_split=True)
    delta = DeltaNetShape.from_gguf(gguf, tiled=tiled)
    experts = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=True)
    shared = gguf.int(".expert_shared_feed_forward_length", minimum=1)

    def block(layer: int) -> Block:
        mixer: Mixer = (
            GatedDeltaNet(weights, layer, delta)
            if recurrent[layer]
            else GatedAttention(weights, layer, attention)
        )
        norm = rms_norm(weights, f"blk.{layer}.post_attention_norm")
        ffn = ExpertsAndShared(
            MixtureOfExperts(weights, layer, experts, store),
            GatedSharedExpert(weights, layer, attention.width, shared),
        )
        return Block(mixer, norm, ffn)

    rope = rope_frequencies(weights, attention.rotated)
    blocks = [block(layer) for layer in range(block_count(gguf))]
    return Decoder(weights, ops, blocks, rope, rms_norm(weights, "output_norm"))
