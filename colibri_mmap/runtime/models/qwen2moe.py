"""qwen2moe: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B (Yang et al. 2024).

Rope on halves; biases on q, k and v. Softmax over all experts, the weights of the chosen ones are
used as they are; a shared expert, gated by a sigmoid, for every token.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsAndShared, ExpertsShape, GatedSharedExpert, MixtureOfExperts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = AttentionShape.from_gguf(gguf, half_split=True)
    experts = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=False)
    shared = gguf.int(".expert_shared_feed_forward_length", minimum=1)
    return Decoder.with_attention(
        weights,
        ops,
        shape,
        lambda layer: ExpertsAndShared(
            MixtureOfExperts(weights, layer, experts, store),
            GatedSharedExpert(weights, layer, shape.width, shared),
        ),
    )
