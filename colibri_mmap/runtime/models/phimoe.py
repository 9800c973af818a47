"""phimoe: Phi-3.5-MoE (Abdin et al. 2024).

LayerNorm; biases on every projection, the output head too. Rope on halves with other frequencies
for long sequences. Experts are chosen, and their weights given, by SparseMixer.
"""

from __future__ import annotations

from dataclasses import replace

from ..attention import AttentionShape, GroupedQueryAttention
from ..experts import ExpertStore
from ..kernels.routing import SPARSEMIXER
from ..layers import Block, Decoder, ExpertsShape, MixtureOfExperts
from ..norm import LayerNorm, layer_norm
from ..ops import Ops
from ..rope import long_rope_frequencies
from ..weights import Weights

_ROPE_FACTOR = 1.243163121016122  # short_mscale and long_mscale, which no key of the file holds


def _norm(weights: Weights, name: str) -> LayerNorm:
    return layer_norm(weights, name, weights.gguf.float(".attention.layer_norm_rms_epsilon"))


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    shape = replace(AttentionShape.from_gguf(gguf, half_split=True), norm=_norm)
    usual = ExpertsShape.from_gguf(gguf, ".feed_forward_length", normalise=False)
    experts = replace(usual, router=replace(usual.router, gating=SPARSEMIXER))

    def block(layer: int) -> Block:
        return Block(
            GroupedQueryAttention(weights, layer, shape),
            _norm(weights, f"blk.{layer}.ffn_norm"),
            MixtureOfExperts(weights, layer, experts, store),
        )

    return Decoder(
        weights,
        ops,
        [block(layer) for layer in range(gguf.int(".block_count", minimum=1))],
        long_rope_frequencies(weights, shape.rotated, _ROPE_FACTOR),
        _norm(weights, "output_norm"),
    )
