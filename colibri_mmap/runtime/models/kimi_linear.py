"""kimi-linear: Kimi-Linear-48B-A3B (Kimi Team 2025).

Kimi delta attention, and latent attention without rope every few layers. The first layers are
dense; shared experts beside the routed ones. Sigmoid routing with a bias in the choice; the weights
of the chosen ones sum to `expert_weights_scale`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...format.experts import block_count
from ...format.gguf import GGUF
from ..arena import Rows
from ..experts import ExpertStore
from ..kernels.recurrent import LANES
from ..kernels.routing import SIGMOID
from ..kv import Batch, RecurrentShape, SequenceSlice
from ..layers import Block, Decoder, Mixer, dense_then_experts
from ..mla import LatentAttention, LatentShape
from ..norm import rms_norm
from ..ops import Ops
from ..pool import Job
from ..recurrent import (
    MAX_TAPS,
    Convolution,
    DeltaRule,
    decay_job,
    l2_norm_job,
    run_with_state,
    sigmoid_job,
)
from ..rope import Rope
from ..weights import Vector, Weights


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Heads of one size for q, k and v, and the taps of their convolutions."""

    width: int
    heads: int
    size: int
    taps: int
    eps: float

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> DeltaShape:
        size = gguf.int(".kda.head_dim", minimum=LANES)
        if size % LANES:
            gguf.fail(".kda.head_dim", f"must be a multiple of {LANES}, is {size}")
        return cls(
            gguf.int(".embedding_length", minimum=1),
            gguf.int(".attention.head_count", minimum=1),
            size,
            gguf.int(".ssm.conv_kernel", minimum=1, maximum=MAX_TAPS),
            gguf.float(".attention.layer_norm_rms_epsilon"),
        )


class DeltaAttention:
    """x += attn_output(norm(delta rule of (q, k, v)) * sigmoid(gate)), where q, k, v are convolved.

    Each row of the state has a decay of its own. Decays and gate come out of low-rank projections.
    """

    def __init__(self, weights: Weights, layer: int, shape: DeltaShape) -> None:
        self.layer, self.shape = layer, shape
        heads, size, width = shape.heads, shape.size, shape.width
        prefix, values = f"blk.{layer}.", heads * size
        self.rule = DeltaRule(heads, heads, size, size, decay_rows=True)
        self.attn_norm = weights.vector(prefix + "attn_norm.weight", width)
        self.attn_q, self.attn_k, self.attn_v = (
            weights.matrix(f"{prefix}attn_{name}.weight", values, width) for name in "qkv"
        )
        self.ssm_conv1d = [
            Convolution(weights, f"{prefix}ssm_conv1d_{name}.weight", shape.taps, values)
            for name in "qkv"
        ]
        self.ssm_beta = weights.matrix(prefix + "ssm_beta.weight", heads, width)
        self.ssm_f_a = weights.matrix(prefix + "ssm_f_a.weight", size, width)
        self.ssm_f_b = weights.matrix(prefix + "ssm_f_b.weight", values, size)
        self.ssm_g_a = weights.matrix(prefix + "ssm_g_a.weight", size, width)
        self.ssm_g_b = weights.matrix(prefix + "ssm_g_b.weight", values, size)
        self.ssm_dt = weights.vector(prefix + "ssm_dt.bias", values)
        self.ssm_a = Vector.of(weights.array(prefix + "ssm_a", (heads,)))
        self.ssm_norm = weights.vector(prefix + "ssm_norm.weight", size)
        self.attn_output = weights.matrix(prefix + "attn_output.weight", width, values)
        past = sum(convolution.state_values for convolution in self.ssm_conv1d)
        self.cache_shape = RecurrentShape(past + self.rule.state_values)

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        shape, heads = self.shape, self.shape.heads
        h = ops.rms_norm(x, self.attn_norm, shape.eps)
        *qkv, b, f, g = ops.linears(
            h, self.attn_q, self.attn_k, self.attn_v, self.ssm_beta, self.ssm_f_a, self.ssm_g_a
        )
        f, gate = ops.linear(f, self.ssm_f_b), ops.linear(g, self.ssm_g_b)
        convolved = [ops.arena.rows(x.count, heads * shape.size) for _ in qkv]
        y = ops.arena.rows(x.count, heads * shape.size)

        def phases(part: SequenceSlice, source: int, target: int) -> list[list[Job]]:
            first: list[Job] = []
            for convolution, before, after in zip(self.ssm_conv1d, qkv, convolved, strict=True):
                x_part, out = part.rows(before), part.rows(after)
                first.append(convolution.silu_job(x_part, out, source, target))
                source += 4 * convolution.state_values
                target += 4 * convolution.state_values
            decay, beta = part.rows(f), part.rows(b)
            by_head = decay.split(heads)
            first.append(decay_job(by_head, by_head, self.ssm_dt, self.ssm_a, heads))
            first.append(sigmoid_job(beta, beta))
            q, k, v = (part.rows(rows) for rows in convolved)
            norms = [l2_norm_job(q, heads, shape.size**-0.5), l2_norm_job(k, heads)]
            rule = self.rule.job(q, k, v, decay, beta, part.rows(y), source, target)
            return [first, norms, [rule]]

        run_with_state(ops, batch, self.layer, y.address, phases)
        ops.rms_norm(y.split(heads), self.ssm_norm, shape.eps, in_place=True)
        ops.add(x, ops.linear(ops.sigmoid_mul(gate, y), self.attn_output))


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    gguf = weights.gguf
    layers = block_count(gguf)
    kv_heads = gguf.ints(".attention.head_count_kv", layers)
    delta, latent = DeltaShape.from_gguf(gguf), LatentShape.from_gguf(gguf)
    make_ffn = dense_then_experts(weights, store, SIGMOID, normalise=True)

    def mixer(layer: int) -> Mixer:
        if kv_heads[layer] == 0:
            return DeltaAttention(weights, layer, delta)
        return LatentAttention(weights, layer, latent)

    blocks = [
        Block(mixer(i), rms_norm(weights, f"blk.{i}.ffn_norm"), make_ffn(i)) for i in range(layers)
    ]
    return Decoder(weights, ops, blocks, None, rms_norm(weights, "output_norm"))
