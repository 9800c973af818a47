"""dots1: dots.llm1 (Huo et al. 2025).

Rope on halves; q and k are normed per head before it. The first blocks are dense; then sigmoid
routing with a bias in the choice, and shared experts.
"""

from __future__ import annotations

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID
from ..layers import Decoder, dense_then_experts
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = AttentionShape.from_gguf(weights.gguf, half_split=True)
    return Decoder.with_attention(weights, ops, shape, dense_then_experts(weights, store, SIGMOID))
