"""llama: Llama 2 and 3, Mistral, SmolLM and Mixtral (Touvron et al. 2023; Jiang et al. 2024).

Rope on adjacent pairs (the converter permutes q and k); `rope_freqs.weight` holds Llama 3's
scaling. With experts: softmax over all, the weights of the chosen ones sum to 1.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsShape, FeedForward, GatedFeedForward, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = AttentionShape.from_gguf(gguf, half_split=False)
    if gguf.int(".expert_count", 0) == 0:
        hidden = gguf.int(".feed_forward_length", minimum=1)

        def dense(layer: int) -> FeedForward:
            return GatedFeedForward.dense(weights, layer, shape.width, hidden)

        return Decoder.with_attention(weights, ops, shape, dense)
    experts = ExpertsShape.from_gguf(gguf, ".feed_forward_length", normalise=True)
    return Decoder.with_attention(
        weights, ops, shape, lambda layer: MixtureOfExperts(weights, layer, experts, store)
    )
