"""dbrx: DBRX (Databricks 2024).

LayerNorm without biases. One matrix for q, k and v, whose values are clamped; rope on halves.
`attn_output_norm` is the norm before the experts. Softmax routing, the weights of the chosen ones
sum to 1.
"""

from __future__ import annotations

from dataclasses import replace

from ..attention import AttentionShape
from ..experts import ExpertStore
from ..layers import Decoder, ExpertsShape, MixtureOfExperts
from ..norm import layer_norm
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    usual = AttentionShape.from_gguf(gguf, half_split=True, eps_key=".attention.layer_norm_epsilon")
    clamp = gguf.float(".attention.clamp_kqv")
    if not clamp > 0:
        gguf.fail(".attention.clamp_kqv", f"must be above 0, is {clamp}")
    shape = replace(usual, norm=layer_norm, clamp=clamp)
    experts = ExpertsShape.from_gguf(gguf, ".feed_forward_length", normalise=True)
    return Decoder.with_attention(
        weights,
        ops,
        shape,
        lambda layer: MixtureOfExperts(weights, layer, experts, store),
        ffn_norm="attn_output_norm",
    )
