"""qwen3: dense Qwen3 (Yang et al. 2025). Rope on halves; q and k are normed per head before it."""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, GatedFeedForward
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = AttentionShape.from_gguf(weights.gguf, half_split=True)
    hidden = weights.gguf.int(".feed_forward_length", minimum=1)
    return Decoder.with_attention(
        weights,
        ops,
        shape,
        lambda layer: GatedFeedForward.dense(weights, layer, shape.width, hidden),
    )
