"""minimax-m2: MiniMax-M2 (MiniMax 2025).

Rope on halves of a part of every head; q and k are normed over the whole row before it. Sigmoid
routing with a bias in the choice, the weights of the chosen ones sum to 1; no shared expert.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID
from ..layers import Decoder, ExpertsShape, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = AttentionShape.from_gguf(weights.gguf, half_split=True)
    experts = ExpertsShape.with_stated_routing(weights.gguf, SIGMOID, normalise=True)
    return Decoder.with_attention(
        weights, ops, shape, lambda layer: MixtureOfExperts(weights, layer, experts, store)
    )
