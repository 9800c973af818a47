"""llama4: Llama 4 Scout and Maverick, text only (Meta 2025).

Three of four layers rotate adjacent pairs (the converter does not permute), norm q and k after it
without weights, except in Maverick, and see a chunk of the context only; the fourth sees everything
and has no rope: its queries grow with their position. Every few layers have experts: one per token,
by the largest logit, whose sigmoid multiplies the expert's input; a shared expert beside it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arena import Rows
from ..attend import Sight
from ..attention import AttentionShape, GroupedQueryAttention, Temperature
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID
from ..kv import Batch
from ..layers import Block, Decoder, ExpertsShape, FeedForward, GatedFeedForward
from ..norm import rms_norm
from ..operations import Operations
from ..ops import Ops
from ..rope import rope_frequencies
from ..routing import route
from ..weights import Vector, Weights

# What no key of the file holds; the same in both models.
_CHUNK = 8192
_NO_ROPE_INTERVAL = 4
_TEMPERATURE = Temperature(every=8192, scale=0.1)
_EXPERTS_WITHOUT_NORM = 128  # of Maverick, which does not norm q and k


class _ExpertOfScaledInput:
    """x += expert(sigmoid(its logit) * h) + shared expert(h)."""

    def __init__(
        self, weights: Weights, layer: int, shape: ExpertsShape, store: ExpertStore
    ) -> None:
        self.layer, self.router, self.store = layer, shape.router, store
        name, count = f"blk.{layer}.ffn_gate_inp.weight", shape.router.count
        self.ffn_gate_inp = weights.matrix(name, count, shape.width)
        experts = weights.experts(layer, count, shape.width, shape.hidden)
        store.add_layer(layer, experts, self.ffn_gate_inp, shape.activation)
        self.shared = GatedFeedForward.shared(weights, layer, shape.width, shape.hidden)

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        logits = ops.to_host(ops.linear(h, self.ffn_gate_inp))
        routing = route(ops.cpu, logits, self.router)
        if batch.trace is not None:
            batch.trace.record(self.layer, routing.ids, routing.weights)
        self.shared.add_to(x, h, ops, batch)
        ops.scale(h, ops.vector(routing.weights[:, 0]))
        routing.weights[:] = 1
        self.store.add_experts(x, h, ops.to_host(h), self.layer, routing, ops)


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    full = AttentionShape.from_gguf(gguf, half_split=False)
    chunked = replace(full, sight=Sight(chunk=_CHUNK), norm_after_rope=True)
    tempered = replace(full, rotated=0, temperature=_TEMPERATURE)
    gguf.int(".expert_used_count", minimum=1, maximum=1)
    usual = ExpertsShape.from_gguf(gguf, ".expert_feed_forward_length", normalise=False)
    experts = replace(usual, router=replace(usual.router, gating=SIGMOID))
    step = gguf.int(".interleave_moe_layer_step", 1, minimum=1)
    hidden = gguf.int(".feed_forward_length", minimum=1)
    ones = Vector.of(np.ones(full.key_size))

    def attention(layer: int) -> GroupedQueryAttention:
        if (layer + 1) % _NO_ROPE_INTERVAL == 0:
            return GroupedQueryAttention(weights, layer, tempered)
        mixer = GroupedQueryAttention(weights, layer, chunked)
        if experts.router.count != _EXPERTS_WITHOUT_NORM:
            mixer.attn_q_norm = mixer.attn_k_norm = ones
        return mixer

    def ffn(layer: int) -> FeedForward:
        if (layer + 1) % step:
            return GatedFeedForward.dense(weights, layer, full.width, hidden)
        return _ExpertOfScaledInput(weights, layer, experts, store)

    blocks = [
        Block(attention(i), rms_norm(weights, f"blk.{i}.ffn_norm"), ffn(i))
        for i in range(gguf.int(".block_count", minimum=1))
    ]
    rope = rope_frequencies(weights, full.rotated)
    return Decoder(weights, ops, blocks, rope, rms_norm(weights, "output_norm"))
