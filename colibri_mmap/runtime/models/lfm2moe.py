"""lfm2moe: LFM2-8B-A1B (Liquid AI 2025).

Most layers mix their tokens with a short gated convolution, the others with grouped-query
attention: rope on halves, q and k normed per head before it. The first layers are dense. Sigmoid
routing, with a bias in the choice; the weights of the chosen ones sum to 1. The norm of the
embeddings is the final norm.
"""

from __future__ import annotations

from ..arena import Rows
from ..attention import AttentionShape, GroupedQueryAttention
from ..experts import ExpertStore
from ..kernels.routing import SIGMOID
from ..kv import Batch, RecurrentShape, SequenceSlice
from ..layers import Block, Decoder, Mixer, dense_then_experts
from ..norm import rms_norm
from ..ops import Ops
from ..pool import Job
from ..recurrent import MAX_TAPS, Convolution, run_with_state
from ..rope import Rope, rope_frequencies
from ..weights import Weights


class ShortConvolution:
    """x += out_proj(c * convolution(b * u)), where b, c, u are in_proj of attn_norm(x)."""

    def __init__(self, weights: Weights, layer: int, width: int, taps: int, eps: float) -> None:
        self.layer, self.eps = layer, eps
        prefix = f"blk.{layer}."
        self.attn_norm = weights.vector(prefix + "attn_norm.weight", width)
        in_proj = weights.matrix(prefix + "shortconv.in_proj.weight", 3 * width, width)
        self.b, self.c, self.u = (in_proj.part(n * width, width) for n in range(3))
        self.conv = Convolution(weights, prefix + "shortconv.conv.weight", taps, width)
        self.out_proj = weights.matrix(prefix + "shortconv.out_proj.weight", width, width)
        self.cache_shape = RecurrentShape(self.conv.state_values)

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        h = ops.rms_norm(x, self.attn_norm, self.eps)
        b, c, u = ops.linears(h, self.b, self.c, self.u)
        y = ops.arena.rows(x.count, x.width)

        def phases(part: SequenceSlice, source: int, target: int) -> list[list[Job]]:
            u_part, y_part, b_part, c_part = (part.rows(r) for r in (u, y, b, c))
            return [[self.conv.gated_job(u_part, y_part, b_part, c_part, source, target)]]

        run_with_state(ops, batch, self.layer, y.address, phases)
        ops.add(x, ops.linear(y, self.out_proj))


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    layers = gguf.int(".block_count", minimum=1)
    kv_heads = gguf.ints(".attention.head_count_kv", layers)
    attention = AttentionShape.from_gguf(gguf, half_split=True, kv_heads=max(kv_heads))
    width, eps = attention.width, attention.eps
    taps = gguf.int(".shortconv.l_cache", minimum=1, maximum=MAX_TAPS)
    make_ffn = dense_then_experts(weights, store, SIGMOID, normalise=True)

    def mixer(layer: int) -> Mixer:
        if kv_heads[layer] == 0:
            return ShortConvolution(weights, layer, width, taps, eps)
        shape = AttentionShape.from_gguf(gguf, half_split=True, kv_heads=kv_heads[layer])
        return GroupedQueryAttention(weights, layer, shape)

    blocks = [
        Block(mixer(i), rms_norm(weights, f"blk.{i}.ffn_norm"), make_ffn(i)) for i in range(layers)
    ]
    rope = rope_frequencies(weights, attention.rotated)
    return Decoder(weights, ops, blocks, rope, rms_norm(weights, "token_embd_norm"))
