"""deepseek2: DeepSeek-V2, V2-Lite, V3, R1, Kimi K2, GLM-4.7-Flash (DeepSeek-AI 2024).

Latent attention, rope on adjacent pairs. The first layers are dense; shared experts beside the
routed ones. Softmax routing (V2: groups ranked by their best expert) or sigmoid routing with a bias
in the choice (V3: groups ranked by their two best).
"""

from __future__ import annotations

from ...format.gguf import GGUF
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID, SOFTMAX
from ..layers import Decoder
from ..mla import LatentAttention, LatentShape, latent_decoder
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    shape = LatentShape.from_gguf(weights.gguf)
    gating = SIGMOID if _is_glm_flash(weights.gguf) else SOFTMAX
    return latent_decoder(
        weights, ops, store, shape, gating, lambda layer: LatentAttention(weights, layer, shape)
    )


def _is_glm_flash(gguf: GGUF) -> bool:
    """Whether this is GLM-4.7-Flash, whose first conversions do not state the gating."""
    blocks, vocabulary = gguf.int(".block_count"), gguf.int(".vocab_size", 0)
    return blocks in (47, 48) and vocabulary == 154880
