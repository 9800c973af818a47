"""gpt-oss: gpt-oss-20b, gpt-oss-120b (OpenAI 2025).

Biases on every projection; every head has a sink. Every second layer, from the first on, sees a
window only. Rope on halves with YaRN, whose limits are not rounded. Softmax over the logits of the
chosen experts, which have biases too and a SwiGLU with clamped values. `post_attention_norm` is the
norm before the experts.
"""

from __future__ import annotations

from dataclasses import replace

from ..attend import Sight
from ..attention import AttentionShape, GroupedQueryAttention
from ..experts import ExpertStore
from ..kernels import elementwise
from ..layers import Block, Decoder, ExpertsShape, MixtureOfExperts
from ..norm import rms_norm
from ..ops import Ops
from ..rope import rope_frequencies
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    full = AttentionShape.from_gguf(gguf, half_split=True)
    windowed = replace(full, sight=Sight(gguf.int(".attention.sliding_window", minimum=1)))
    # Softmax over all, renormalised, is softmax over the chosen ones.
    usual = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=True)
    experts = replace(usual, activation=elementwise.clamped_swiglu)

    def block(layer: int) -> Block:
        return Block(
            GroupedQueryAttention(weights, layer, full if layer % 2 else windowed),
            rms_norm(weights, f"blk.{layer}.post_attention_norm"),
            MixtureOfExperts(weights, layer, experts, store),
        )

    return Decoder(
        weights,
        ops,
        [block(layer) for layer in range(gguf.int(".block_count", minimum=1))],
        rope_frequencies(weights, full.rotated, round_limits=False),
        rms_norm(weights, "output_norm"),
    )
