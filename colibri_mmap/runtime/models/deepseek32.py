"""deepseek32: DeepSeek-V3.2 (DeepSeek-AI 2025).

DeepSeek-V3 whose tokens attend to the keys that each layer's indexer selects. Rope on adjacent
pairs, in the indexer on halves.
"""

from __future__ import annotations

from ..experts import ExpertStore
from ..indexer import Indexer, IndexerShape, Selection
from ..kernels.routing import SIGMOID
from ..layers import Decoder, dense_then_experts
from ..mla import LatentAttention, LatentShape, latent_decoder
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = LatentShape.from_gguf(gguf)
    indexer = IndexerShape.from_gguf(gguf, shape.rotated, half_split=True)
    selection = Selection(gguf.int(".attention.indexer.top_k", minimum=1))

    def attention(layer: int) -> LatentAttention:
        own = Indexer(weights, layer, indexer, selection)
        return LatentAttention(weights, layer, shape, selection, own)

    make_ffn = dense_then_experts(weights, store, SIGMOID)
    return latent_decoder(weights, ops, shape, attention, make_ffn)
