"""Gated delta nets (Yang et al. 2024): linear attention with a decaying state, as in Qwen3-Next.

T tokens, C channels of the convolution: q, k and v of all heads side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..format.gguf import GGUF
from .arena import Rows
from .kernels.recurrent import LANES
from .kv import Batch, RecurrentShape, SequenceSlice
from .ops import Ops
from .pool import Job
from .recurrent import (
    MAX_TAPS,
    Convolution,
    DeltaRule,
    decay_job,
    l2_norm_job,
    run_with_state,
    sigmoid_job,
)
from .rope import Rope
from .weights import Weights


@dataclass(frozen=True, slots=True)
class DeltaNetShape:
    """Width of the model, taps of the convolution, and the heads of the rule."""

    width: int
    taps: int
    eps: float
    rule: DeltaRule

    @classmethod
    def from_gguf(cls, gguf: GGUF, *, tiled: bool) -> DeltaNetShape:
        """The shape that the keys .ssm.* describe; `tiled` as in DeltaRule."""
        key_size = gguf.int(".ssm.state_size", minimum=LANES)
        key_heads = gguf.int(".ssm.group_count", minimum=1)
        value_heads = gguf.int(".ssm.time_step_rank", minimum=1)
        values = gguf.int(".ssm.inner_size", minimum=LANES)
        if key_size % LANES:
            gguf.fail(".ssm.state_size", f"must be a multiple of {LANES}, is {key_size}")
        if value_heads % key_heads:
            what = f"must be a multiple of the {key_heads} key heads, is {value_heads}"
            gguf.fail(".ssm.time_step_rank", what)
        if values % (value_heads * LANES):
            what = f"must be {value_heads} heads of a multiple of {LANES}, is {values}"
            gguf.fail(".ssm.inner_size", what)
        return cls(
            gguf.int(".embedding_length", minimum=1),
            gguf.int(".ssm.conv_kernel", minimum=1, maximum=MAX_TAPS),
            gguf.float(".attention.layer_norm_rms_epsilon"),
            DeltaRule(key_heads, value_heads, key_size, values // value_heads, tiled=tiled),
        )


class GatedDeltaNet:
    """x += ssm_out(norm(delta rule of (q, k, v)) * silu(z)), where q, k, v are convolved.

    The decay comes from a and the strength of a change from b: two numbers per value head.
    """

    def __init__(self, weights: Weights, layer: int, shape: DeltaNetShape) -> None:
        self.layer, self.shape = layer, shape
        rule, width, prefix = shape.rule, shape.width, f"blk.{layer}."
        heads, values = rule.value_heads, rule.value_heads * rule.value_size
        channels = 2 * rule.key_heads * rule.key_size + values
        self.attn_norm = weights.vector(prefix + "attn_norm.weight", width)
        self.attn_qkv = weights.matrix(prefix + "attn_qkv.weight", channels, width)
        self.attn_gate = weights.matrix(prefix + "attn_gate.weight", values, width)
        # One matrix, its rows (b, a) by key head; or one each.
        if weights.has(prefix + "ssm_ba.weight"):
            self.ba = [weights.matrix(prefix + "ssm_ba.weight", 2 * heads, width)]
        else:
            self.ba = [
                weights.matrix(f"{prefix}ssm_{name}.weight", heads, width)
                for name in ("beta", "alpha")
            ]
        self.ssm_conv1d = Convolution(weights, prefix + "ssm_conv1d.weight", shape.taps, channels)
        self.ssm_dt = weights.vector(prefix + "ssm_dt.bias", heads)
        self.ssm_a = weights.vector(prefix + "ssm_a", heads)
        self.ssm_norm = weights.vector(prefix + "ssm_norm.weight", rule.value_size)
        self.ssm_out = weights.matrix(prefix + "ssm_out.weight", width, values)
        self.cache_shape = RecurrentShape(self.ssm_conv1d.state_values + rule.state_values)

    def _b_and_a(self, ba: tuple[Rows, ...]) -> tuple[Rows, Rows, int]:
        """Rows of b and of a, and how many of them make a token."""
        if len(ba) == 2:
            return ba[0], ba[1], 1
        groups, rule = ba[0].split(self.shape.rule.key_heads), self.shape.rule
        shared = rule.value_heads // rule.key_heads
        return groups.columns(0, shared), groups.columns(shared, shared), rule.key_heads

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        rule, arena = self.shape.rule, ops.arena
        h = ops.rms_norm(x, self.attn_norm, self.shape.eps)
        mixed, z, *ba = ops.linears(h, self.attn_qkv, self.attn_gate, *self.ba)
        b, a, period = self._b_and_a(tuple(ba))
        convolved = arena.rows(mixed.count, mixed.width)
        decay, beta = arena.rows(a.count, a.width), arena.rows(b.count, b.width)
        y = arena.rows(z.count, z.width)
        keys = rule.key_heads * rule.key_size
        past = 4 * self.ssm_conv1d.state_values

        def phases(part: SequenceSlice, source: int, target: int) -> list[list[Job]]:
            qkv = part.rows(convolved)
            q, k, v = qkv.columns(0, keys), qkv.columns(keys, keys), qkv.columns(2 * keys, z.width)
            rows = period * part.start, period * (part.stop - part.start)
            decays, betas = decay.part(*rows).join(period), beta.part(*rows).join(period)
            return [
                [
                    self.ssm_conv1d.silu_job(part.rows(mixed), qkv, source, target),
                    decay_job(a.part(*rows), decays.split(period), self.ssm_dt, self.ssm_a, period),
                    sigmoid_job(b.part(*rows), betas.split(period)),
                ],
                [
                    l2_norm_job(q, rule.key_heads, rule.key_size**-0.5),
                    l2_norm_job(k, rule.key_heads),
                ],
                [rule.job(q, k, v, decays, betas, part.rows(y), source + past, target + past)],
            ]

        run_with_state(ops, batch, self.layer, y.address, phases)
        heads = y.split(rule.value_heads)
        ops.rms_norm(heads, self.ssm_norm, self.shape.eps, in_place=True)
        ops.add(x, ops.linear(ops.silu_mul(z, y), self.ssm_out))
