"""Weights in blocks of 32 times one or a few int8 columns: y[t][r] = W[r] . x[t].

Arguments of every task: W address, bytes per row, K, activations (q8_32 column records), bytes per
record, number of tokens, y f32 address, bytes per token of y. Units: rows of W.

Four blocks at a time: one vector holds the first 16 weights of each, another the last 16, so both
add up in the same four lanes per block, and the scales of the four are handled as one vector. Three
tokens and more share what is unpacked; the arithmetic of a token is the same, whoever is beside it.
"""

from __future__ import annotations

import numba

from ..simd import (
    INLINE,
    as_i8x8,
    as_i8x64,
    as_i16x32,
    bit_or,
    bits_to_bytes,
    caster,
    constant,
    dot_signed,
    dot_u8_i8,
    fma,
    gather_f16x4,
    int_to_float,
    load_f32x4,
    load_i8x16,
    load_i8x64,
    load_i32x16,
    load_i64,
    load_u8,
    load_u32,
    mul,
    prefetch,
    select_less,
    shift_left,
    shift_right_signed,
    shuffle,
    signed_start,
    signed_weights,
    splat_i32x16,
    store_f32,
    sub,
    total,
    unsigned_to_i32,
    zero_f32x16,
    zero_i32x16,
)
from ..task import Task
from .blocks import fp4_plus_16, join_32, low_and_high_nibbles

_RECORD = 256  # bytes of a record per 128 values
_MINUS_128_SUMS, _SCALES, _SCALED_SUMS = 128, 192, 208
_AHEAD = 4096  # bytes between what is prefetched and what is used

_join_16 = shuffle(range(32))
_each_four_times = shuffle([lane // 4 for lane in range(16)])
_four_i16 = constant("i16", [4] * 32)
_one_i32x8, _23_i32x8 = constant("i32", [1] * 8), constant("i32", [23] * 8)
_bit_21_i32x8 = constant("i32", [1 << 21] * 8)
_as_f32x8 = caster("f32", 8)
_first_four = shuffle(range(4))
_zero_f32x4 = constant("f32", [0.0] * 4)


# ------------------------------------------------------------------ blocks at addresses a, b, c, d
@numba.njit(**INLINE)
def _four_times_16(a, b, c, d, offset):
    first = _join_16(load_i8x16(a + offset), load_i8x16(b + offset))
    return join_32(first, _join_16(load_i8x16(c + offset), load_i8x16(d + offset)))


@numba.njit(**INLINE)
def _fifth_bits(bits):
    return as_i8x64(shift_left(as_i16x32(bits_to_bytes(bits)), _four_i16()))


@numba.njit(**INLINE)
def _five_bits(a, b, c, d, high, low):
    """q u8 from u1 [32] at offset `high` and u4 [32] at offset `low` of each block."""
    first, last = low_and_high_nibbles(_four_times_16(a, b, c, d, low))
    a, b, c, d = load_u32(a + high), load_u32(b + high), load_u32(c + high), load_u32(d + high)
    first_bits = (a & 0xFFFF) | ((b & 0xFFFF) << 16) | ((c & 0xFFFF) << 32) | (d << 48)
    last_bits = (a >> 16) | (b & 0xFFFF0000) | ((c >> 16) << 32) | ((d >> 16) << 48)
    return bit_or(first, _fifth_bits(first_bits)), bit_or(last, _fifth_bits(last_bits))


@numba.njit(**INLINE)
def _dot_from(start, q, x):
    return dot_u8_i8(dot_u8_i8(start, q[0], load_i8x64(x)), q[1], load_i8x64(x + 64))


@numba.njit(**INLINE)
def _dot_minus(bits, q, x):
    """The sums of (q - 2^bits) * x."""
    start = shift_right_signed(load_i32x16(x + _MINUS_128_SUMS), splat_i32x16(7 - bits))
    return _dot_from(start, q, x)


@numba.njit(**INLINE)
def _q4_0_dot(a, b, c, d, x):
    return _dot_minus(3, low_and_high_nibbles(_four_times_16(a, b, c, d, 2)), x)


@numba.njit(**INLINE)
def _q4_1_dot(a, b, c, d, x):
    return _dot_from(zero_i32x16(), low_and_high_nibbles(_four_times_16(a, b, c, d, 4)), x)


@numba.njit(**INLINE)
def _q5_0_dot(a, b, c, d, x):
    return _dot_minus(4, _five_bits(a, b, c, d, 2, 6), x)


@numba.njit(**INLINE)
def _q5_1_dot(a, b, c, d, x):
    return _dot_from(zero_i32x16(), _five_bits(a, b, c, d, 4, 8), x)


@numba.njit(**INLINE)
def _q8_0_dot(a, b, c, d, x):
    start = signed_start(load_i32x16(x + _MINUS_128_SUMS))
    first, last = _four_times_16(a, b, c, d, 2), _four_times_16(a, b, c, d, 18)
    first = dot_signed(start, signed_weights(first), load_i8x64(x))
    return dot_signed(first, signed_weights(last), load_i8x64(x + 64))


@numba.njit(**INLINE)
def _mxfp4_dot(a, b, c, d, x):
    first, last = low_and_high_nibbles(_four_times_16(a, b, c, d, 1))
    return _dot_minus(4, (fp4_plus_16(first), fp4_plus_16(last)), x)


@numba.njit(**INLINE)
def _four_powers(a, b, c, d):
    """2^(e - 128) for the bytes e at four addresses; denormal for the two smallest e."""
    bytes_4 = load_u8(a) | (load_u8(b) << 8) | (load_u8(c) << 16) | (load_u8(d) << 24)
    e = unsigned_to_i32(as_i8x8(bytes_4))
    normal = shift_left(sub(e, _one_i32x8()), _23_i32x8())
    denormal = shift_left(_bit_21_i32x8(), e)
    floats = _as_f32x8(select_less(_one_i32x8(), e, normal, denormal))
    return _first_four(floats, floats)


# ------------------------------------------------------------------ all rows, all tokens
@numba.njit(**INLINE)
def _four_blocks(scales_of, size, has_minimum, a, last):
    """Addresses of the blocks b, c, d that follow a, and d and m of the four."""
    b, c, d = min(a + size, last), min(a + 2 * size, last), min(a + 3 * size, last)
    prefetch(a + _AHEAD)
    prefetch(a + _AHEAD + 64)
    minimum = _zero_f32x4()
    if has_minimum:
        minimum = gather_f16x4(a + 2, b + 2, c + 2, d + 2)
    return b, c, d, scales_of(a, b, c, d), minimum


@numba.njit(**INLINE)
def _add(dot, has_minimum, a, b, c, d, scales, minimum, record, acc, minima):
    """Four blocks times a token's values; what is made of weights alone is made once for all."""
    products = mul(scales, load_f32x4(record + _SCALES))
    acc = fma(int_to_float(dot(a, b, c, d, record)), _each_four_times(products, products), acc)
    if has_minimum:
        minima = fma(minimum, load_f32x4(record + _SCALED_SUMS), minima)
    return acc, minima


@numba.njit(**INLINE)
def _four_sums(scales_of, dot, size, has_minimum, a, columns, x, x_stride, y, y_stride, n):
    """A row times four tokens, each as if it were the only one; n: 4, or 3 and the last again."""
    last = a + (columns // 32 - 1) * size
    r0, r1, r2, r3 = x, x + x_stride, x + 2 * x_stride, x + (n - 1) * x_stride
    a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    m0, m1, m2, m3 = _zero_f32x4(), _zero_f32x4(), _zero_f32x4(), _zero_f32x4()
    for _ in range(0, columns, 128):
        b, c, d, scales, minimum = _four_blocks(scales_of, size, has_minimum, a, last)
        a0, m0 = _add(dot, has_minimum, a, b, c, d, scales, minimum, r0, a0, m0)
        a1, m1 = _add(dot, has_minimum, a, b, c, d, scales, minimum, r1, a1, m1)
        a2, m2 = _add(dot, has_minimum, a, b, c, d, scales, minimum, r2, a2, m2)
        a3, m3 = _add(dot, has_minimum, a, b, c, d, scales, minimum, r3, a3, m3)
        a += 4 * size
        r0, r1, r2, r3 = r0 + _RECORD, r1 + _RECORD, r2 + _RECORD, r3 + _RECORD
    store_f32(y, total(a0) + total(m0))
    store_f32(y + y_stride, total(a1) + total(m1))
    store_f32(y + 2 * y_stride, total(a2) + total(m2))
    store_f32(y + (n - 1) * y_stride, total(a3) + total(m3))


@numba.njit(**INLINE)
def _one_sum(scales_of, dot, size, has_minimum, a, columns, record, y):
    """A row times one token."""
    last = a + (columns // 32 - 1) * size
    acc, minima = zero_f32x16(), _zero_f32x4()
    for _ in range(0, columns, 128):
        b, c, d, scales, minimum = _four_blocks(scales_of, size, has_minimum, a, last)
        acc, minima = _add(dot, has_minimum, a, b, c, d, scales, minimum, record, acc, minima)
        a += 4 * size
        record += _RECORD
    store_f32(y, total(acc) + total(minima))


@numba.njit(**INLINE)
def _matvec(scales_of, dot, size, has_minimum, args, lo, hi):
    """`scales_of` gives d of four blocks of `size` bytes, `dot` their integer sums.

    `has_minimum`: w = d * q + m.

    Blocks behind the last are the last again; the activations there are zero.
    """
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    for row in range(lo, hi):
        a = weights + row * row_bytes
        token = 0
        while token < tokens:
            n = min(4, tokens - token)
            record, to = x + token * x_stride, y + token * y_stride + 4 * row
            if n > 2:
                _four_sums(
                    scales_of, dot, size, has_minimum, a, columns, record, x_stride, to, y_stride, n
                )
                token += n
            else:
                _one_sum(scales_of, dot, size, has_minimum, a, columns, record, to)
                token += 1


@Task
def matvec_q4_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(gather_f16x4, _q4_0_dot, 18, False, args, lo, hi)


@Task
def matvec_q4_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(gather_f16x4, _q4_1_dot, 20, True, args, lo, hi)


@Task
def matvec_q5_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(gather_f16x4, _q5_0_dot, 22, False, args, lo, hi)


@Task
def matvec_q5_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(gather_f16x4, _q5_1_dot, 24, True, args, lo, hi)


@Task
def matvec_q8_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(gather_f16x4, _q8_0_dot, 34, False, args, lo, hi)


@Task
def matvec_mxfp4(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(_four_powers, _mxfp4_dot, 17, False, args, lo, hi)
