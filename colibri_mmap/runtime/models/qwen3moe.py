"""qwen3moe: Qwen3-30B-A3B, Qwen3-235B-A22B (Yang et al. 2025).

Rope on halves; q and k are normed per head before it. Softmax over all experts, the weights of the
chosen ones sum to 1; no shared expert.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsShape, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = AttentionShape.from_gguf(weights.gguf, half_split=True)
    experts = ExpertsShape.from_gguf(weights.gguf, ".expert_feed_forward_length", normalise=True)
    return Decoder.with_attention(
        weights, ops, shape, lambda layer: MixtureOfExperts(weights, layer, experts, store)
    )
