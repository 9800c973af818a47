"""olmoe: OLMoE-1B-7B (Muennighoff et al. 2024).

Rope on halves; q and k are normed over the whole row before it. Softmax over all experts, and the
weights of the chosen ones are used as they are.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsShape, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = AttentionShape.from_gguf(weights.gguf, half_split=True)
    experts = ExpertsShape.from_gguf(weights.gguf, ".feed_forward_length", normalise=False)
    return Decoder.with_attention(
        weights, ops, shape, lambda layer: MixtureOfExperts(weights, layer, experts, store)
    )
