"""granitemoe: IBM Granite 3 MoE, with and without a shared expert (Granite team 2024).

Rope on adjacent pairs. Embeddings, scores, the output of every layer and the logits have factors of
their own. Softmax routing, the weights of the chosen ones sum to 1.
"""

from __future__ import annotations

from dataclasses import replace

from ..arena import Rows
from ..attention import AttentionShape, GroupedQueryAttention
from ..experts import ExpertStore
from ..kv import Batch
from ..layers import (
    Block,
    Decoder,
    ExpertsAndShared,
    ExpertsShape,
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
)
from ..norm import rms_norm
from ..operations import Operations
from ..ops import Ops
from ..rope import rope_frequencies
from ..weights import Vector, Weights


class _Scaled:
    """x += factor * what the network would add."""

    def __init__(self, ffn: FeedForward, factor: float) -> None:
        self.ffn, self.factor = ffn, Vector.of(factor)

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        y = ops.zeros(x.count, x.width)
        self.ffn.add_to(y, h, ops, batch)
        ops.scale(y, self.factor)
        ops.add(x, y)


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    usual = AttentionShape.from_gguf(gguf, half_split=False)
    residual = gguf.float(".residual_scale", 0.0) or 1.0  # 0 means not stated
    scale = gguf.float(".attention.scale", 0.0) or usual.scale
    shape = replace(usual, scale=scale, residual=residual)
    experts = ExpertsShape.from_gguf(gguf, ".feed_forward_length", normalise=True)
    shared = gguf.int(".expert_shared_feed_forward_length", 0, minimum=0)

    def block(layer: int) -> Block:
        routed = MixtureOfExperts(weights, layer, experts, store)
        ffn: FeedForward = routed
        if shared:
            beside = GatedFeedForward.shared(weights, layer, shape.width, shared)
            ffn = ExpertsAndShared(routed, beside)
        attention = GroupedQueryAttention(weights, layer, shape)
        return Block(attention, rms_norm(weights, f"blk.{layer}.ffn_norm"), _Scaled(ffn, residual))

    return Decoder(
        weights,
        ops,
        [block(layer) for layer in range(gguf.int(".block_count", minimum=1))],
        rope_frequencies(weights, shape.rotated),
        rms_norm(weights, "output_norm"),
        embedding_factor=gguf.float(".embedding_scale", 0.0) or 1.0,
        logit_factor=1.0 / (gguf.float(".logit_scale", 0.0) or 1.0),
    )
