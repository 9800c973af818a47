"""deepseek2: DeepSeek-V2, V2-Lite, V3, R1, Kimi K2, GLM-4.7-Flash (DeepSeek-AI 2024).

Latent attention, rope on adjacent pairs. The first layers are dense; shared experts beside the
routed ones. Softmax routing (V2: groups ranked by their best expert) or sigmoid routing with a bias
in the choice (V3: groups ranked by their two best).
"""

from __future__ import annotations

from ...format.gguf import GGUF
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID, SOFTMAX
from ..layers import Decoder, dense_then_experts
from ..mla import LatentAttention, LatentShape, latent_decoder
from ..ops import Ops
from ..weights import Weights

# By experts, the groups of V2 and V3 and how many are used: their first conversions do not tell.
_GROUPING = {160: (8, 3), 256: (8, 4)}


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = LatentShape.from_gguf(weights.gguf)
    gating = SIGMOID if _is_glm_flash(weights.gguf) else SOFTMAX
    grouping = _GROUPING.get(weights.gguf.int(".expert_count", minimum=1), (1, 1))
    make_ffn = dense_then_experts(weights, store, gating, grouping=grouping)
    return latent_decoder(
        weights, ops, shape, lambda layer: LatentAttention(weights, layer, shape), make_ffn
    )


def _is_glm_flash(gguf: GGUF) -> bool:
    """Whether this is GLM-4.7-Flash, whose first conversions do not state the gating."""
    blocks, vocabulary = gguf.int(".block_count"), gguf.int(".vocab_size", 0)
    return blocks in (47, 48) and vocabulary == 154880
