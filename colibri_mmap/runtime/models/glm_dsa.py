"""glm-dsa: GLM-5, 5.1 and 5.2 (744B; Z.ai 2026).

DeepSeek-V3.2's sparse attention with its indexer's rope on adjacent pairs. From 5.2 on only some
layers have an indexer; the others attend to the keys that the last one before them selected. The
block that guesses further tokens is not run.
"""

from __future__ import annotations

from ...format.experts import block_count
from ...format.gguf import GGUF
from ..experts import ExpertStore
from ..indexer import Indexer, IndexerShape, Selection
from ..kernels.routing import SIGMOID
from ..layers import Decoder, dense_then_experts
from ..mla import LatentAttention, LatentShape, latent_decoder
from ..ops import Ops
from ..weights import Weights

_TYPES = ".attention.indexer.types"
_LONG_CONTEXT = 1 << 20  # tokens: that of 5.2, whose first conversions do not state the types


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = LatentShape.from_gguf(gguf)
    indexer = IndexerShape.from_gguf(gguf, shape.rotated, half_split=False)
    selection = Selection(gguf.int(".attention.indexer.top_k", minimum=1))
    has_own = _has_own_indexer(gguf)

    def attention(layer: int) -> LatentAttention:
        own = Indexer(weights, layer, indexer, selection) if has_own[layer] else None
        return LatentAttention(weights, layer, shape, selection, own)

    make_ffn = dense_then_experts(weights, store, SIGMOID)
    return latent_decoder(weights, ops, shape, attention, make_ffn)


def _has_own_indexer(gguf: GGUF) -> tuple[bool, ...]:
    """Which layers have an indexer; where the file is silent, as 5.1 or 5.2 has them."""
    layers = block_count(gguf)
    types = gguf.bools(_TYPES, None, None)
    if types is None:
        if gguf.int(".context_length", minimum=0) < _LONG_CONTEXT:
            return (True,) * layers
        return tuple(layer < 3 or layer % 4 == 2 for layer in range(layers))
    if len(types) < layers:
        gguf.fail(_TYPES, f"must hold a value for each of {layers} layers, holds {len(types)}")
    if not types[0]:
        gguf.fail(_TYPES, "says that the first layer has no indexer, but there is none before it")
    return types
