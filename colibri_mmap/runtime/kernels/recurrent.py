"""Causal convolutions and the gated delta rule: layers that keep a state instead of all positions.

T tokens, C channels, K taps of a convolution. A kernel takes consecutive tokens of one sequence. It
reads the state that the tokens before left at `source` and leaves its own at `target`, which is
other memory; a token's arithmetic is the same however the tokens are cut into steps.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..simd import (
    INLINE,
    add,
    fma,
    load_4_words,
    load_f32,
    load_f32x16,
    load_i64,
    mul,
    splat_f32x16,
    store,
    store_f32,
    sub,
    total,
    zero_f32x16,
)
from ..task import Task
from .exponential import silu

LANES = 16  # channels, and columns of a state, that a unit of work takes


# ------------------------------------------------------------------------------ convolutions
@njit(**INLINE)
def _input(token, source, past, x, x_stride, gate, gate_stride, gated):
    """What the convolution sees at a token: below 0 what the state holds, `past` bytes per row."""
    if token < 0:
        return load_f32x16(source + token * past)
    value = load_f32x16(x + token * x_stride)
    if gated:
        value = mul(load_f32x16(gate + token * gate_stride), value)
    return value


@njit(**INLINE)
def _convolve(args, lo, hi, gated):
    x, x_stride, out, out_stride = load_4_words(args)
    weight, taps, channels, tokens = load_4_words(args + 32)
    source, target = load_i64(args + 64), load_i64(args + 72)
    gate = gate_stride = gate_out = gate_out_stride = 0
    if gated:
        gate, gate_stride, gate_out, gate_out_stride = load_4_words(args + 80)
    line = 4 * channels
    for group in range(lo, hi):
        at = 4 * LANES * group
        end = source + (taps - 1) * line + at
        for token in range(tokens):
            summed = zero_f32x16()
            for tap in range(taps):
                seen = token - taps + 1 + tap
                value = _input(seen, end, line, x + at, x_stride, gate + at, gate_stride, gated)
                summed = fma(load_f32x16(weight + tap * line + at), value, summed)
            if gated:
                factor = load_f32x16(gate_out + token * gate_out_stride + at)
                store(out + token * out_stride + at, mul(factor, summed))
            else:
                store(out + token * out_stride + at, silu(summed))
        for row in range(taps - 1):
            seen = tokens - taps + 1 + row
            value = _input(seen, end, line, x + at, x_stride, gate + at, gate_stride, gated)
            store(target + row * line + at, value)


@Task
def convolution_silu(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = silu(the causal convolution of x over tokens, each channel by itself).

    Arguments: x, stride per token, out, stride, weight [K][C], K, C, T, source, target (the last
    K - 1 rows of x). Units: groups of LANES channels.
    """
    _convolve(args, lo, hi, False)


@Task
def convolution_gated(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = b * the causal convolution of a * x (LIV convolution, Liquid AI 2025).

    Arguments: as `convolution_silu`, and then a, stride, b, stride; the state is of a * x.
    """
    _convolve(args, lo, hi, True)


# ------------------------------------------------------------------------------ inputs of the rule
@Task
def l2_norm(args: int, lo: int, hi: int, scratch: int) -> None:
    """x = x / sqrt(sum(x^2) + eps) * scale in place, for every head of a token.

    Arguments: x, stride per token, heads, head size (a multiple of 16), eps and scale (float32
    bits). Units: tokens.
    """
    x, x_stride, heads, size = load_4_words(args)
    eps, scale = load_f32(args + 32), load_f32(args + 40)
    for token in range(lo, hi):
        for head in range(heads):
            row = x + token * x_stride + head * size * 4
            squares = zero_f32x16()
            for i in range(0, size, LANES):
                part = load_f32x16(row + 4 * i)
                squares = fma(part, part, squares)
            factor = splat_f32x16(scale / math.sqrt(total(squares) + eps))
            for i in range(0, size, LANES):
                store(row + 4 * i, mul(load_f32x16(row + 4 * i), factor))


@Task
def decays(args: int, lo: int, hi: int, scratch: int) -> None:
    """out[i] = exp(rate[j / per] * softplus(x[i] + bias[j])) (Gu and Dao 2023), row by row.

    j = row % period * n + i. Arguments: x, stride, out, stride, bias, rate, n, per, period.
    """
    x, x_stride, out, out_stride = load_4_words(args)
    bias, rate, n, per = load_4_words(args + 32)
    period = load_i64(args + 64)
    for row in range(lo, hi):
        first = row % period * n
        for i in range(n):
            z = load_f32(x + row * x_stride + 4 * i) + load_f32(bias + 4 * (first + i))
            softplus = max(z, np.float32(0)) + math.log1p(math.exp(-abs(z)))
            decay = math.exp(load_f32(rate + 4 * ((first + i) // per)) * softplus)
            store_f32(out + row * out_stride + 4 * i, decay)


@Task
def sigmoids(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = sigmoid(x), row by row. Arguments: x, stride, out, stride, n."""
    x, x_stride, out, out_stride = load_4_words(args)
    n = load_i64(args + 32)
    for row in range(lo, hi):
        for i in range(n):
            z = load_f32(x + row * x_stride + 4 * i)
            one = np.float32(1)
            store_f32(out + row * out_stride + 4 * i, one / (one + math.exp(-z)))


# ------------------------------------------------------------------------------ the delta rule
@njit(**INLINE)
def _read_out(read, decay, step, q, k, dk, v, beta):
    """(output, delta) of 16 columns: with S = decay * state, delta = beta * (v - S^T k) and the
    output is (S + k delta^T)^T q."""
    m0 = m1 = o0 = o1 = qk = zero_f32x16()
    for d in range(0, dk, 2):
        s = mul(splat_f32x16(load_f32(decay + d * step)), load_f32x16(read + 64 * d))
        m0 = fma(splat_f32x16(load_f32(k + 4 * d)), s, m0)
        o0 = fma(splat_f32x16(load_f32(q + 4 * d)), s, o0)
        s = mul(splat_f32x16(load_f32(decay + (d + 1) * step)), load_f32x16(read + 64 * d + 64))
        m1 = fma(splat_f32x16(load_f32(k + 4 * d + 4)), s, m1)
        o1 = fma(splat_f32x16(load_f32(q + 4 * d + 4)), s, o1)
    for d in range(0, dk, LANES):
        qk = fma(load_f32x16(q + 4 * d), load_f32x16(k + 4 * d), qk)
    delta = mul(splat_f32x16(beta), sub(load_f32x16(v), add(m0, m1)))
    return fma(splat_f32x16(total(qk)), delta, add(o0, o1)), delta


@Task
def delta_rule(args: int, lo: int, hi: int, scratch: int) -> None:
    """The gated delta rule (Yang et al. 2024), token after token.

    Per head, S [d_k, d_v] becomes decay * S + k beta (v - (decay * S)^T k)^T, and out = S^T q.

    Arguments: q, k, v and out with their strides per token, decay, stride, beta, stride, source,
    target, d_k and d_v (multiples of 16), T, divisor, modulus, step. Value head h uses the key head
    h / divisor % modulus. step: 0 for one decay per head, 4 for one per row of S. States are
    [head][d_v / 16][d_k][16]. Units: value heads * d_v / 16.
    """
    q, q_stride, k, k_stride = load_4_words(args)
    v, v_stride, out, out_stride = load_4_words(args + 32)
    decay, decay_stride, beta, beta_stride = load_4_words(args + 64)
    source, target, dk, dv = load_4_words(args + 96)
    tokens, divisor, modulus, step = load_4_words(args + 128)
    blocks = dv // LANES
    for unit in range(lo, hi):
        head, block = unit // blocks, unit % blocks
        key = head // divisor % modulus * dk * 4
        column = (head * dv + block * LANES) * 4
        head_decay = decay + 4 * head * (dk if step else 1)
        state, read = target + unit * dk * 64, source + unit * dk * 64
        for token in range(tokens):
            now, k_now = head_decay + token * decay_stride, k + token * k_stride + key
            y, delta = _read_out(
                read,
                now,
                step,
                q + token * q_stride + key,
                k_now,
                dk,
                v + token * v_stride + column,
                load_f32(beta + token * beta_stride + 4 * head),
            )
            store(out + token * out_stride + column, y)
            for d in range(dk):
                kept = mul(splat_f32x16(load_f32(now + d * step)), load_f32x16(read + 64 * d))
                store(state + 64 * d, fma(splat_f32x16(load_f32(k_now + 4 * d)), delta, kept))
            read = state
