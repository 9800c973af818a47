"""qwen2moe: Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B (Yang et al. 2024).

Rope on halves; biases on q, k and v. Softmax over all experts, the weights of the chosen ones are
used as they are; a shared expert, gated by a sigmoid, for every token.
"""

from __future__ import annotations

from ..arena import Rows
from ..experts import ExpertStore
from ..kv import Batch
from ..layers import (
    AttentionShape,
    Decoder,
    ExpertsShape,
    GatedSharedExpert,
    MixtureOfExperts,
)
from ..ops import Ops
from ..weights import Weights


class _ExpertsAndShared:
    def __init__(
        self, weights: Weights, layer: int, shape: ExpertsShape, hidden: int, store: ExpertStore
    ) -> None:
        self.routed = MixtureOfExperts(weights, layer, shape, store)
        self.shared = GatedSharedExpert(weights, layer, shape.width, hidden)

    def add_to(self, x: Rows, h: Rows, ops: Ops, batch: Batch) -> None:
        self.routed.add_to(x, h, ops, batch)
        self.shared.add_to(x, h, ops)


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = AttentionShape.from_gguf(gguf, half_split=True)
    experts = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=False)
    shared = gguf.int(".expert_shared_feed_forward_length", minimum=1)
    return Decoder.with_attention(
        weights,
        ops,
        shape,
        lambda layer: _ExpertsAndShared(weights, layer, experts, shared, store),
    )
