"""Norms, rotary embedding, gating and sums: everything between the matrix products.

Strides are in bytes. Rows are tokens, or (token, head) pairs where the memory is laid out so.
"""

from __future__ import annotations

import math

from numba import njit

from ..simd import (
    INLINE,
    add,
    divide,
    fma,
    largest,
    load_4_words,
    load_f32,
    load_f32x16,
    load_i64,
    maximum,
    minimum,
    mul,
    splat_f32x16,
    store,
    store_f32,
    sub,
    total,
    zero_f32x16,
)
from ..task import Task
from .exponential import exp, sigmoid, silu


@Task
def rms_norm(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), row by row.

    Arguments: x, stride, out, stride, weight, n, eps (float32 bits).
    """
    x, x_stride, out, out_stride = load_4_words(args)
    weight, n, _, _ = load_4_words(args + 32)
    eps = load_f32(args + 48)
    whole = n // 16 * 16
    for row in range(lo, hi):
        source, target = x + row * x_stride, out + row * out_stride
        squares = zero_f32x16()
        for i in range(0, whole, 16):
            part = load_f32x16(source + 4 * i)
            squares = fma(part, part, squares)
        summed = total(squares)
        for i in range(whole, n):
            summed += load_f32(source + 4 * i) * load_f32(source + 4 * i)
        factor = 1.0 / math.sqrt(summed / n + eps)
        for i in range(0, whole, 16):
            scaled = mul(load_f32x16(source + 4 * i), splat_f32x16(factor))
            store(target + 4 * i, mul(scaled, load_f32x16(weight + 4 * i)))
        for i in range(whole, n):
            scaled_one = load_f32(source + 4 * i) * factor
            store_f32(target + 4 * i, scaled_one * load_f32(weight + 4 * i))


@Task
def layer_norm(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al. 2016), row by row.

    Arguments: x, stride, out, stride, weight, bias (0: none), n, eps (float32 bits).
    """
    x, x_stride, out, out_stride = load_4_words(args)
    weight, bias, n, _ = load_4_words(args + 32)
    eps = load_f32(args + 56)
    whole = n // 16 * 16
    for row in range(lo, hi):
        source, target = x + row * x_stride, out + row * out_stride
        sums = zero_f32x16()
        for i in range(0, whole, 16):
            sums = add(sums, load_f32x16(source + 4 * i))
        summed = total(sums)
        for i in range(whole, n):
            summed += load_f32(source + 4 * i)
        mean = summed / n
        squares = zero_f32x16()
        for i in range(0, whole, 16):
            apart = sub(load_f32x16(source + 4 * i), splat_f32x16(mean))
            squares = fma(apart, apart, squares)
        summed = total(squares)
        for i in range(whole, n):
            summed += (load_f32(source + 4 * i) - mean) ** 2
        factor = 1.0 / math.sqrt(summed / n + eps)
        for i in range(0, whole, 16):
            apart = sub(load_f32x16(source + 4 * i), splat_f32x16(mean))
            scaled = mul(mul(apart, splat_f32x16(factor)), load_f32x16(weight + 4 * i))
            shift = load_f32x16(bias + 4 * i) if bias else zero_f32x16()
            store(target + 4 * i, add(scaled, shift))
        for i in range(whole, n):
            scaled_one = (load_f32(source + 4 * i) - mean) * factor * load_f32(weight + 4 * i)
            store_f32(target + 4 * i, scaled_one + load_f32(bias + 4 * i) if bias else scaled_one)


@Task
def rope(args: int, lo: int, hi: int, scratch: int) -> None:
    """Rotate the first 2 * pairs numbers of every head in place (Su et al. 2021).

    Arguments: x, stride per token, heads, head size, cosines, sines, their stride per token, pairs,
    half_split (1: number i pairs with i + pairs; 0: 2i with 2i + 1).
    """
    x, x_stride, heads, size = load_4_words(args)
    cosines, sines, table_stride, pairs = load_4_words(args + 32)
    half_split = load_i64(args + 64)
    step, apart = (4, 4 * pairs) if half_split else (8, 4)
    for token in range(lo, hi):
        cosine, sine = cosines + token * table_stride, sines + token * table_stride
        for head in range(heads):
            first = x + token * x_stride + head * size * 4
            for i in range(pairs):
                a, b = load_f32(first), load_f32(first + apart)
                c, s = load_f32(cosine + 4 * i), load_f32(sine + 4 * i)
                store_f32(first, a * c - b * s)
                store_f32(first + apart, a * s + b * c)
                first += step


@njit(**INLINE)
def _silu_mul(gate, up):
    return mul(silu(load_f32x16(gate)), load_f32x16(up))


@Task
def silu_mul(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = silu(gate) * up (Shazeer 2020), row by row; out may be gate.

    Arguments: gate, stride, up, stride, out, stride, n. Rows are read up to 60 bytes past the end.
    """
    gate, gate_stride, up, up_stride = load_4_words(args)
    out, out_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        a, b, target = gate + row * gate_stride, up + row * up_stride, out + row * out_stride
        for i in range(0, whole, 16):
            store(target + 4 * i, _silu_mul(a + 4 * i, b + 4 * i))
        if whole < n:
            store(scratch, _silu_mul(a + 4 * whole, b + 4 * whole))
            for i in range(n - whole):
                store_f32(target + 4 * (whole + i), load_f32(scratch + 4 * i))


@njit(**INLINE)
def _sigmoid_mul(gate, up):
    return mul(sigmoid(load_f32x16(gate)), load_f32x16(up))


@Task
def sigmoid_mul(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = sigmoid(gate) * up, row by row; out may be gate or up. Arguments as of `silu_mul`."""
    gate, gate_stride, up, up_stride = load_4_words(args)
    out, out_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        a, b, target = gate + row * gate_stride, up + row * up_stride, out + row * out_stride
        for i in range(0, whole, 16):
            store(target + 4 * i, _sigmoid_mul(a + 4 * i, b + 4 * i))
        if whole < n:
            store(scratch, _sigmoid_mul(a + 4 * whole, b + 4 * whole))
            for i in range(n - whole):
                store_f32(target + 4 * (whole + i), load_f32(scratch + 4 * i))


@njit(**INLINE)
def _clamped_swiglu(gate, up):
    seven = splat_f32x16(7.0)
    g = minimum(load_f32x16(gate), seven)
    u = maximum(minimum(load_f32x16(up), seven), splat_f32x16(-7.0))
    one = splat_f32x16(1.0)
    gated = divide(g, add(one, exp(mul(g, splat_f32x16(-1.702)))))
    return mul(add(u, one), gated)


@Task
def clamped_swiglu(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = (up + 1) * gate * sigmoid(1.702 * gate) with gate <= 7 and |up| <= 7 (gpt-oss).

    Arguments as of `silu_mul`.
    """
    gate, gate_stride, up, up_stride = load_4_words(args)
    out, out_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        a, b, target = gate + row * gate_stride, up + row * up_stride, out + row * out_stride
        for i in range(0, whole, 16):
            store(target + 4 * i, _clamped_swiglu(a + 4 * i, b + 4 * i))
        if whole < n:
            store(scratch, _clamped_swiglu(a + 4 * whole, b + 4 * whole))
            for i in range(n - whole):
                store_f32(target + 4 * (whole + i), load_f32(scratch + 4 * i))


@Task
def scale_rows(args: int, lo: int, hi: int, scratch: int) -> None:
    """out[t] = factors[t] * x[t]; out may be x; a stride of 0 for the factors: one for all rows.

    Arguments: x, stride, out, stride, factors, their stride, n.
    """
    x, x_stride, out, out_stride = load_4_words(args)
    factors, factor_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        source, target = x + row * x_stride, out + row * out_stride
        factor = load_f32(factors + row * factor_stride)
        for i in range(0, whole, 16):
            store(target + 4 * i, mul(load_f32x16(source + 4 * i), splat_f32x16(factor)))
        for i in range(whole, n):
            store_f32(target + 4 * i, load_f32(source + 4 * i) * factor)


@Task
def clamp_rows(args: int, lo: int, hi: int, scratch: int) -> None:
    """Every value of x brought into [-limit, limit], in place.

    Arguments: x, stride, n, limit (float32 bits).
    """
    x, x_stride, n, _ = load_4_words(args)
    limit = load_f32(args + 24)
    highest, lowest = splat_f32x16(limit), splat_f32x16(-limit)
    whole = n // 16 * 16
    for row in range(lo, hi):
        source = x + row * x_stride
        for i in range(0, whole, 16):
            store(source + 4 * i, minimum(maximum(load_f32x16(source + 4 * i), lowest), highest))
        for i in range(whole, n):
            store_f32(source + 4 * i, min(max(load_f32(source + 4 * i), -limit), limit))


@Task
def add_rows(args: int, lo: int, hi: int, scratch: int) -> None:
    """out = x + y, row by row; out may be x; a stride of 0 for y adds one row (a bias) to all.

    Arguments: x, stride, y, stride, out, stride, n.
    """
    x, x_stride, y, y_stride = load_4_words(args)
    out, out_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        a, b, target = x + row * x_stride, y + row * y_stride, out + row * out_stride
        for i in range(0, whole, 16):
            store(target + 4 * i, add(load_f32x16(a + 4 * i), load_f32x16(b + 4 * i)))
        for i in range(whole, n):
            store_f32(target + 4 * i, load_f32(a + 4 * i) + load_f32(b + 4 * i))


@Task
def add_gated(args: int, lo: int, hi: int, scratch: int) -> None:
    """x[t] = x[t] + sigmoid(gate[t]) * y[t]. Arguments: x, stride, y, stride, gate, stride, n."""
    x, x_stride, y, y_stride = load_4_words(args)
    gate, gate_stride, n, _ = load_4_words(args + 32)
    whole = n // 16 * 16
    for row in range(lo, hi):
        target, source = x + row * x_stride, y + row * y_stride
        factor = sigmoid(splat_f32x16(load_f32(gate + row * gate_stride)))
        for i in range(0, whole, 16):
            part = load_f32x16(source + 4 * i)
            store(target + 4 * i, fma(factor, part, load_f32x16(target + 4 * i)))
        for i in range(whole, n):
            added = largest(factor) * load_f32(source + 4 * i)
            store_f32(target + 4 * i, load_f32(target + 4 * i) + added)


@Task
def combine_experts(args: int, lo: int, hi: int, scratch: int) -> None:
    """out[t] = x[t] + the sum in order of j of weights[t, j] * y[slots[t, j]]; out may be x.

    A slot of -1 is left out: that expert is computed elsewhere.
    Arguments: x, stride, out, stride, y, stride, slots int64 [T, k], weights float32 [T, k], k, n.
    """
    x, x_stride, out, out_stride = load_4_words(args)
    y, y_stride, slots, weights = load_4_words(args + 32)
    k, n = load_i64(args + 64), load_i64(args + 72)
    whole = n // 16 * 16
    for row in range(lo, hi):
        source, target = x + row * x_stride, out + row * out_stride
        slot, weight = slots + row * k * 8, weights + row * k * 4
        for i in range(0, whole, 16):
            summed = zero_f32x16()
            for j in range(k):
                if load_i64(slot + 8 * j) >= 0:
                    part = load_f32x16(y + load_i64(slot + 8 * j) * y_stride + 4 * i)
                    summed = fma(splat_f32x16(load_f32(weight + 4 * j)), part, summed)
            store(target + 4 * i, add(load_f32x16(source + 4 * i), summed))
        for i in range(whole, n):
            one = load_f32(source + 4 * i) * 0.0
            for j in range(k):
                if load_i64(slot + 8 * j) >= 0:
                    part_one = load_f32(y + load_i64(slot + 8 * j) * y_stride + 4 * i)
                    one += load_f32(weight + 4 * j) * part_one
            store_f32(target + 4 * i, load_f32(source + 4 * i) + one)
