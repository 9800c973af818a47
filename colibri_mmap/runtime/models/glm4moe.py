"""glm4moe: GLM-4.5, GLM-4.5-Air, GLM-4.6 (Zeng et al. 2025).

Rope on halves of the first half of every head; biases on q, k and v, norms per head where the file
has them. The first blocks are dense; then sigmoid routing with a bias in the choice, and a shared
expert. `post_attention_norm` is the norm before the feed-forward network. The last block, which
guesses tokens ahead, is left out.
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
    make_ffn = dense_then_experts(weights, store, SIGMOID)
    return Decoder.with_attention(weights, ops, shape, make_ffn, ffn_norm="post_attention_norm")
