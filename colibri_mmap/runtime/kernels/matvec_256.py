"""Weights in blocks of 256 times one or a few int8 columns: y[t][r] = W[r] . x[t].

Arguments of every task: W address, bytes per row, K, activations (q8_256 column records), bytes per
record, number of tokens, y f32 address, bytes per token of y. Units: rows of W.

Rows are read one after the other, as the hardware prefetchers like it, and each row meets all
tokens while it is in the L1 cache; three tokens and more share what is unpacked. A row is summed in
one order wherever it stands, and whatever tokens are beside its own.
"""

from __future__ import annotations

import numba

from ..simd import (
    INLINE,
    add,
    as_i8x8,
    as_i8x64,
    as_i16x32,
    constant,
    dot_i16,
    dot_u8_i8,
    fma,
    int_to_float,
    load_f16,
    load_f16x2,
    load_f32,
    load_i8x16,
    load_i8x64,
    load_i16x16,
    load_i64,
    mul,
    pair_sums,
    prefetch,
    shift_left,
    shuffle,
    signed_to_i16,
    splat_f32x2,
    splat_f32x16,
    splatter,
    store_f32,
    sub,
    total,
    unsigned_to_i16,
    unsigned_to_i32,
    zero_f32x16,
    zero_i32x16,
)
from ..task import Task
from .blocks import (
    k_scales,
    q4_k_weights,
    q5_k_weights,
    q6_k_weights,
)

_RECORD_256 = 320  # bytes of a q8_256 column record per 256 values: q, sums of 16 at 256, d at 288
_SUMS, _SCALE = 256, 288
_AHEAD = 4096  # bytes between what is prefetched and what is used

_zero_f32x8 = constant("f32", [0.0] * 8)
_zero_i32x8 = constant("i32", [0] * 8)
_five_i32x8 = constant("i32", [5] * 8)
_ones_i8x64 = constant("i8", [1] * 64)
_first_16_times, _second_8_times = shuffle([0] * 16), shuffle([1] * 8)
_halves = shuffle([*range(8), *range(8, 16)])
_twice_each = shuffle([i // 2 for i in range(16)])
_eights_0, _eights_2, _eights_4, _eights_6 = (
    shuffle(
        [index for lane in range(16) for index in (lane // 4 * 16 + group + lane // 8, 64, 64, 64)]
    )
    for group in (0, 2, 4, 6)
)
_zero_i8x64 = constant("i8", [0] * 64)
_splat_i64x8 = splatter("i64", 8)
_quads_0, _quads_4, _quads_8, _quads_12 = (
    shuffle([lane + i // 4 for i in range(16)]) for lane in (0, 4, 8, 12)
)


# ------------------------------------------------------------------ blocks of 256
@numba.njit(**INLINE)
def _values(x):
    return load_i8x64(x), load_i8x64(x + 64), load_i8x64(x + 128), load_i8x64(x + 192)


@numba.njit(**INLINE)
def _scaled_dot(acc, w, x, scales):
    """acc + sums of four of w * x, each times the i16 in the low half of its lane of `scales`."""
    return dot_i16(acc, as_i16x32(dot_u8_i8(zero_i32x16(), w, x)), as_i16x32(scales))


@numba.njit(**INLINE)
def _k_step(w, block, x, sums, d, acc, minus):
    """A block of Q4_K or Q5_K; `minus` gathers what the mins subtract."""
    scale_bytes, min_bytes = k_scales(block + 4)
    scales, none = as_i8x64(_splat_i64x8(scale_bytes)), _zero_i8x64()
    mins = as_i8x8(min_bytes)
    even = _scaled_dot(zero_i32x16(), w[0], x[0], _eights_0(scales, none))
    odd = _scaled_dot(zero_i32x16(), w[1], x[1], _eights_2(scales, none))
    even = _scaled_dot(even, w[2], x[2], _eights_4(scales, none))
    odd = _scaled_dot(odd, w[3], x[3], _eights_6(scales, none))
    least = pair_sums(unsigned_to_i16(_twice_each(mins, mins)), sums)
    both = mul(load_f16x2(block), splat_f32x2(d))
    acc = fma(int_to_float(add(even, odd)), _first_16_times(both, both), acc)
    minus = fma(int_to_float(least), _second_8_times(both, both), minus)
    return acc, minus


@numba.njit(**INLINE)
def _q4_k_step(block, x, sums, d, acc, minus):
    return _k_step(q4_k_weights(block), block, x, sums, d, acc, minus)


@numba.njit(**INLINE)
def _q5_k_step(block, x, sums, d, acc, minus):
    return _k_step(q5_k_weights(block), block, x, sums, d, acc, minus)


@numba.njit(**INLINE)
def _q6_k_step(block, x, sums, d, acc, minus):
    w = q6_k_weights(block)
    scales_i16 = signed_to_i16(load_i8x16(block + 192))
    scales = unsigned_to_i32(scales_i16)
    offset = shift_left(pair_sums(scales_i16, sums), _five_i32x8())
    even = _scaled_dot(zero_i32x16(), w[0], x[0], _quads_0(scales, scales))
    odd = _scaled_dot(zero_i32x16(), w[1], x[1], _quads_4(scales, scales))
    even = _scaled_dot(even, w[2], x[2], _quads_8(scales, scales))
    odd = _scaled_dot(odd, w[3], x[3], _quads_12(scales, scales))
    whole = sub(add(even, odd), _halves(offset, _zero_i32x8()))
    return fma(int_to_float(whole), splat_f32x16(d * load_f16(block + 208)), acc), minus


@numba.njit(**INLINE)
def _add_block(step, block, record, acc, minus):
    """A block times a token's values: what is made of the weights alone is made once for all."""
    values, sums = _values(record), load_i16x16(record + _SUMS)
    return step(block, values, sums, load_f32(record + _SCALE), acc, minus)


@numba.njit(**INLINE)
def _four_sums(step, block_bytes, block, columns, x, x_stride, y, y_stride, n):
    """A row times four tokens, each as if it were the only one; n: 4, or 3 and the last again."""
    r0, r1, r2, r3 = x, x + x_stride, x + 2 * x_stride, x + (n - 1) * x_stride
    a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    m0, m1, m2, m3 = _zero_f32x8(), _zero_f32x8(), _zero_f32x8(), _zero_f32x8()
    for _ in range(columns // 256):
        for line in range(0, block_bytes, 64):
            prefetch(block + _AHEAD + line)
        a0, m0 = _add_block(step, block, r0, a0, m0)
        a1, m1 = _add_block(step, block, r1, a1, m1)
        a2, m2 = _add_block(step, block, r2, a2, m2)
        a3, m3 = _add_block(step, block, r3, a3, m3)
        block += block_bytes
        r0, r1 = r0 + _RECORD_256, r1 + _RECORD_256
        r2, r3 = r2 + _RECORD_256, r3 + _RECORD_256
    store_f32(y, total(a0) - total(m0))
    store_f32(y + y_stride, total(a1) - total(m1))
    store_f32(y + 2 * y_stride, total(a2) - total(m2))
    store_f32(y + (n - 1) * y_stride, total(a3) - total(m3))


@numba.njit(**INLINE)
def _one_sum(step, block_bytes, block, columns, record, y):
    """A row times one token."""
    acc, minus = zero_f32x16(), _zero_f32x8()
    for _ in range(columns // 256):
        for line in range(0, block_bytes, 64):
            prefetch(block + _AHEAD + line)
        acc, minus = _add_block(step, block, record, acc, minus)
        block += block_bytes
        record += _RECORD_256
    store_f32(y, total(acc) - total(minus))


@numba.njit(**INLINE)
def _matvec_256(step, block_bytes, args, lo, hi):
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    for row in range(lo, hi):
        block = weights + row * row_bytes
        token = 0
        while token < tokens:
            n = min(4, tokens - token)
            record, out = x + token * x_stride, y + token * y_stride + 4 * row
            if n > 2:
                _four_sums(step, block_bytes, block, columns, record, x_stride, out, y_stride, n)
                token += n
            else:
                _one_sum(step, block_bytes, block, columns, record, out)
                token += 1


@Task
def matvec_q4_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_256(_q4_k_step, 144, args, lo, hi)


@Task
def matvec_q5_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_256(_q5_k_step, 176, args, lo, hi)


@Task
def matvec_q6_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_256(_q6_k_step, 210, args, lo, hi)
