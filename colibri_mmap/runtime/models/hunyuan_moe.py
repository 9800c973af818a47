"""hunyuan-moe: Hunyuan-A13B (Tencent 2025).

Rope on halves; q and k are normed per head after it. Softmax routing, the weights of the chosen
ones sum to 1; a shared expert.
"""

from __future__ import annotations

from dataclasses import replace

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsAndShared, ExpertsShape, GatedFeedForward, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = replace(AttentionShape.from_gguf(gguf, half_split=True), norm_after_rope=True)
    experts = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=True)
    shared = gguf.int(".expert_shared_feed_forward_length", minimum=1)
    return Decoder.with_attention(
        weights,
        ops,
        shape,
        lambda layer: ExpertsAndShared(
            MixtureOfExperts(weights, layer, experts, store),
            GatedFeedForward.shared(weights, layer, shape.width, shared),
        ),
    )
