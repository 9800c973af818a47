"""ernie4_5-moe: ERNIE-4.5-21B-A3B, ERNIE-4.5-300B-A47B (Baidu 2025).

Rope on adjacent pairs. The first blocks are dense, then every few ones have experts: softmax
routing with a bias in the choice, the weights of the chosen ones sum to 1; shared experts.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import (
    Decoder,
    ExpertsAndShared,
    ExpertsShape,
    FeedForward,
    GatedFeedForward,
    MixtureOfExperts,
)
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = AttentionShape.from_gguf(gguf, half_split=False)
    experts = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=True)
    hidden = gguf.int(".feed_forward_length", minimum=1)
    shared = gguf.int(".expert_shared_feed_forward_length", 0, minimum=0)
    dense_blocks = gguf.int(".leading_dense_block_count", 0, minimum=0)
    step = gguf.int(".interleave_moe_layer_step", 1, minimum=1)

    def make_ffn(layer: int) -> FeedForward:
        if layer < dense_blocks or (layer + 1) % step:
            return GatedFeedForward.dense(weights, layer, shape.width, hidden)
        routed = MixtureOfExperts(weights, layer, experts, store)
        if not shared:
            return routed
        return ExpertsAndShared(
            routed, GatedFeedForward.shared(weights, layer, shape.width, shared)
        )

    return Decoder.with_attention(weights, ops, shape, make_ffn)
