"""Quantised weights times vectors of 16 int8 tokens: y[t][r] = W[r] . x[t].

Arguments of every task: W address, bytes per row, K, activations (lanes records of 16 tokens),
bytes per record, number of tokens, y f32 address, bytes per token of y. Units: rows of W.

Sixteen rows at a time, 256 weights of each are unpacked into scratch once and met with every token
vector; a tile is 8 rows by 16 tokens, its sums go through scratch between one 256 and the next. The
tokens are in the lanes, so one integer dot product serves 16 tokens and four weights.
"""

from __future__ import annotations

import numba

from ..simd import (
    INLINE,
    add,
    as_i8x8,
    as_i8x64,
    constant,
    dot_signed,
    dot_u8_i8,
    fma,
    int_to_float,
    load_f16,
    load_f32,
    load_f32x16,
    load_i8x16,
    load_i8x64,
    load_i32,
    load_i32x16,
    load_i64,
    mul,
    prefetch,
    shift_left,
    signed_start,
    signed_to_i32,
    signed_weights,
    splat_f32x8,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f32,
    unsigned_to_i32,
    zero_f32x16,
    zero_i32x16,
)
from ..task import Task
from .blocks import (
    join_32,
    k_scales,
    low_32,
    mxfp4_scale,
    mxfp4_weights,
    q4_0_weights,
    q4_1_weights,
    q4_k_weights,
    q5_0_weights,
    q5_1_weights,
    q5_k_weights,
    q6_k_weights,
    q8_0_weights,
)
from .transpose import store_outputs

_GROUP = 640  # bytes of a lanes record per 32 values: q, sums at 512, sums or scales at 576
_SCALES_256 = 8 * _GROUP  # the scales of a q8_256 record of 256 values

# One row of 256 unpacked weights: q, 16 scales f32, 16 offsets f32.
_ROW = 384
_SCALES, _OFFSETS = 256, 320
_ROWS = 16
_SUMS = _ROWS * _ROW  # behind the rows: f32 [token vector][row][16 tokens]
_VECTORS = 128  # token vectors that fit


# ------------------------------------------------------------------ 256 weights of a row unpacked
@numba.njit(**INLINE)
def _unpack_k(w, block, to):
    store(to, w[0])
    store(to + 64, w[1])
    store(to + 128, w[2])
    store(to + 192, w[3])
    scales, mins = k_scales(block + 4)
    d, dmin = splat_f32x8(load_f16(block)), splat_f32x8(load_f16(block + 2))
    store(to + _SCALES, mul(int_to_float(unsigned_to_i32(as_i8x8(scales))), d))
    store(to + _OFFSETS, mul(int_to_float(unsigned_to_i32(as_i8x8(mins))), dmin))


@numba.njit(**INLINE)
def _unpack_q4_k(block, groups, to):
    _unpack_k(q4_k_weights(block), block, to)


@numba.njit(**INLINE)
def _unpack_q5_k(block, groups, to):
    _unpack_k(q5_k_weights(block), block, to)


@numba.njit(**INLINE)
def _unpack_q6_k(block, groups, to):
    w0, w1, w2, w3 = q6_k_weights(block)
    store(to, w0)
    store(to + 64, w1)
    store(to + 128, w2)
    store(to + 192, w3)
    scales = int_to_float(signed_to_i32(load_i8x16(block + 192)))
    store(to + _SCALES, mul(scales, splat_f32x16(load_f16(block + 208))))


@numba.njit(**INLINE)
def _unpack_q4_0(block, groups, to):
    for group in range(groups):
        p = block + 18 * group
        store(to + 32 * group, q4_0_weights(p))
        store_f32(to + _SCALES + 4 * group, load_f16(p))


@numba.njit(**INLINE)
def _unpack_q5_0(block, groups, to):
    for group in range(groups):
        p = block + 22 * group
        store(to + 32 * group, q5_0_weights(p))
        store_f32(to + _SCALES + 4 * group, load_f16(p))


@numba.njit(**INLINE)
def _unpack_q8_0(block, groups, to):
    for group in range(groups):
        p = block + 34 * group
        w = q8_0_weights(p)
        signed = signed_weights(join_32(w, w))
        store(to + 32 * group, low_32(signed, signed))
        store_f32(to + _SCALES + 4 * group, load_f16(p))


@numba.njit(**INLINE)
def _unpack_mxfp4(block, groups, to):
    for group in range(groups):
        p = block + 17 * group
        store(to + 32 * group, mxfp4_weights(p))
        store_f32(to + _SCALES + 4 * group, mxfp4_scale(p))


@numba.njit(**INLINE)
def _unpack_q4_1(block, groups, to):
    for group in range(groups):
        p = block + 20 * group
        store(to + 32 * group, q4_1_weights(p))
        store_f32(to + _SCALES + 4 * group, load_f16(p))
        store_f32(to + _OFFSETS + 4 * group, -load_f16(p + 2))


@numba.njit(**INLINE)
def _unpack_q5_1(block, groups, to):
    for group in range(groups):
        p = block + 24 * group
        store(to + 32 * group, q5_1_weights(p))
        store_f32(to + _SCALES + 4 * group, load_f16(p))
        store_f32(to + _OFFSETS + 4 * group, -load_f16(p + 2))


# ------------------------------------------------------------------ tiles of 8 rows by 16 tokens
@numba.njit(**INLINE)
def _four(address):
    """Four weights in every lane."""
    return as_i8x64(splat_i32x16(load_i32(address)))


@numba.njit(**INLINE)
def _dots(dot, start, w, x, quads):
    """start + the dot products of 8 rows with 16 tokens over 4 * quads values."""
    a0, a1, a2, a3, a4, a5, a6, a7 = start, start, start, start, start, start, start, start
    for quad in range(quads):
        v, p = load_i8x64(x + 64 * quad), w + 4 * quad
        a0 = dot(a0, _four(p), v)
        a1 = dot(a1, _four(p + _ROW), v)
        a2 = dot(a2, _four(p + 2 * _ROW), v)
        a3 = dot(a3, _four(p + 3 * _ROW), v)
        a4 = dot(a4, _four(p + 4 * _ROW), v)
        a5 = dot(a5, _four(p + 5 * _ROW), v)
        a6 = dot(a6, _four(p + 6 * _ROW), v)
        a7 = dot(a7, _four(p + 7 * _ROW), v)
    return a0, a1, a2, a3, a4, a5, a6, a7


@numba.njit(**INLINE)
def _float(a, d):
    """Integer sums times d, lane by lane."""
    return (
        mul(int_to_float(a[0]), d),
        mul(int_to_float(a[1]), d),
        mul(int_to_float(a[2]), d),
        mul(int_to_float(a[3]), d),
        mul(int_to_float(a[4]), d),
        mul(int_to_float(a[5]), d),
        mul(int_to_float(a[6]), d),
        mul(int_to_float(a[7]), d),
    )


@numba.njit(**INLINE)
def _as_float(a):
    return (
        int_to_float(a[0]),
        int_to_float(a[1]),
        int_to_float(a[2]),
        int_to_float(a[3]),
        int_to_float(a[4]),
        int_to_float(a[5]),
        int_to_float(a[6]),
        int_to_float(a[7]),
    )


@numba.njit(**INLINE)
def _scale_of(address, row):
    return splat_f32x16(load_f32(address + row * _ROW))


@numba.njit(**INLINE)
def _add_products(f, values, factors):
    """f[row] + values[row] * the row's factor at the address `factors`."""
    return (
        fma(values[0], _scale_of(factors, 0), f[0]),
        fma(values[1], _scale_of(factors, 1), f[1]),
        fma(values[2], _scale_of(factors, 2), f[2]),
        fma(values[3], _scale_of(factors, 3), f[3]),
        fma(values[4], _scale_of(factors, 4), f[4]),
        fma(values[5], _scale_of(factors, 5), f[5]),
        fma(values[6], _scale_of(factors, 6), f[6]),
        fma(values[7], _scale_of(factors, 7), f[7]),
    )


@numba.njit(**INLINE)
def _eight(v):
    return v, v, v, v, v, v, v, v


@numba.njit(**INLINE)
def _add_to_sums(sums, f, d):
    """sums f32 [8 rows][16 tokens] += f * d."""
    store(sums, fma(f[0], d, load_f32x16(sums)))
    store(sums + 64, fma(f[1], d, load_f32x16(sums + 64)))
    store(sums + 128, fma(f[2], d, load_f32x16(sums + 128)))
    store(sums + 192, fma(f[3], d, load_f32x16(sums + 192)))
    store(sums + 256, fma(f[4], d, load_f32x16(sums + 256)))
    store(sums + 320, fma(f[5], d, load_f32x16(sums + 320)))
    store(sums + 384, fma(f[6], d, load_f32x16(sums + 384)))
    store(sums + 448, fma(f[7], d, load_f32x16(sums + 448)))


@numba.njit(**INLINE)
def _tile_k(w, x, groups, sums):
    """Q4_K, Q5_K: groups of 32 with a scale and a minimum."""
    f = _eight(zero_f32x16())
    for group in range(8):
        q = x + _GROUP * group
        a = _dots(dot_u8_i8, zero_i32x16(), w + 32 * group, q, 8)
        minus = int_to_float(add(load_i32x16(q + 512), load_i32x16(q + 576)))
        f = _add_products(f, _as_float(a), w + _SCALES + 4 * group)
        f = _add_products(f, _eight(minus), w + _OFFSETS + 4 * group)
    _add_to_sums(sums, f, load_f32x16(x + _SCALES_256))


@numba.njit(**INLINE)
def _tile_q6_k(w, x, groups, sums):
    """Groups of 16 with a scale; weights are q - 32."""
    f = _eight(zero_f32x16())
    for group in range(16):
        q = x + _GROUP * (group // 2) + 256 * (group & 1)
        minus = load_i32x16(x + _GROUP * (group // 2) + 512 + 64 * (group & 1))
        start = shift_left(minus, splat_i32x16(5))
        a = _dots(dot_u8_i8, start, w + 16 * group, q, 4)
        f = _add_products(f, _as_float(a), w + _SCALES + 4 * group)
    _add_to_sums(sums, f, load_f32x16(x + _SCALES_256))


@numba.njit(**INLINE)
def _tile_32(dot, bits, w, x, groups, sums):
    """Blocks of 32 with a scale; weights are q - 2^bits."""
    f = _eight(zero_f32x16())
    for group in range(groups):
        q = x + _GROUP * group
        start = shift_left(load_i32x16(q + 512), splat_i32x16(bits))
        a = _dots(dot, start, w + 32 * group, q, 8)
        f = _add_products(f, _float(a, load_f32x16(q + 576)), w + _SCALES + 4 * group)
    _add_to_sums(sums, f, _one())


@numba.njit(**INLINE)
def _tile_32_minimum(w, x, groups, sums):
    """Blocks of 32 with a scale and a minimum."""
    f = _eight(zero_f32x16())
    for group in range(groups):
        q = x + _GROUP * group
        d = load_f32x16(q + 576)
        a = _dots(dot_u8_i8, zero_i32x16(), w + 32 * group, q, 8)
        minus = mul(int_to_float(load_i32x16(q + 512)), d)
        f = _add_products(f, _float(a, d), w + _SCALES + 4 * group)
        f = _add_products(f, _eight(minus), w + _OFFSETS + 4 * group)
    _add_to_sums(sums, f, _one())


_one = constant("f32", [1.0] * 16)


@numba.njit(**INLINE)
def _tile_q4_0(w, x, groups, sums):
    _tile_32(dot_u8_i8, 3, w, x, groups, sums)


@numba.njit(**INLINE)
def _tile_q5_0(w, x, groups, sums):
    _tile_32(dot_u8_i8, 4, w, x, groups, sums)


@numba.njit(**INLINE)
def _tile_q8_0(w, x, groups, sums):
    f = _eight(zero_f32x16())
    for group in range(groups):
        q = x + _GROUP * group
        start = signed_start(shift_left(load_i32x16(q + 512), splat_i32x16(7)))
        a = _dots(dot_signed, start, w + 32 * group, q, 8)
        f = _add_products(f, _float(a, load_f32x16(q + 576)), w + _SCALES + 4 * group)
    _add_to_sums(sums, f, _one())


# ------------------------------------------------------------------ all rows, all tokens
@numba.njit(**INLINE)
def _matmul(unpack, tile, weight_bytes, x_bytes, args, lo, hi, scratch):
    """`weight_bytes` and `x_bytes`: of 256 values in a row of W and in a lanes record."""
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    vectors = (tokens + 15) // 16
    chunks = (columns + 255) // 256
    for first in range(0, vectors, _VECTORS):
        count = min(_VECTORS, vectors - first)
        for row in range(lo, hi, _ROWS):
            halves = 2 if hi - row > 8 else 1
            for i in range(_ROWS * count):
                store(scratch + _SUMS + 64 * i, zero_f32x16())
            for chunk in range(chunks):
                groups = min(8, columns // 32 - 8 * chunk)
                for i in range(_ROWS):
                    source = weights + min(row + i, hi - 1) * row_bytes + chunk * weight_bytes
                    for line in range(0, weight_bytes, 64):
                        prefetch(source + 2 * weight_bytes + line)
                    unpack(source, groups, scratch + _ROW * i)
                for vector in range(count):
                    q = x + (first + vector) * x_stride + chunk * x_bytes
                    sums = scratch + _SUMS + 1024 * vector
                    for half in range(halves):
                        tile(scratch + 8 * _ROW * half, q, groups, sums + 512 * half)
                    if chunk == chunks - 1:
                        token = 16 * (first + vector)
                        store_outputs(
                            sums,
                            min(_ROWS, hi - row),
                            min(16, tokens - token),
                            y + token * y_stride + 4 * row,
                            y_stride,
                        )


@Task
def matmul_q4_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q4_0, _tile_q4_0, 144, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_q4_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q4_1, _tile_32_minimum, 160, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_q5_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q5_0, _tile_q5_0, 176, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_q5_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q5_1, _tile_32_minimum, 192, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_q8_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q8_0, _tile_q8_0, 272, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_mxfp4(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_mxfp4, _tile_q5_0, 136, 8 * _GROUP, args, lo, hi, scratch)


@Task
def matmul_q4_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q4_k, _tile_k, 144, 8 * _GROUP + 64, args, lo, hi, scratch)


@Task
def matmul_q5_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q5_k, _tile_k, 176, 8 * _GROUP + 64, args, lo, hi, scratch)


@Task
def matmul_q6_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(_unpack_q6_k, _tile_q6_k, 210, 8 * _GROUP + 64, args, lo, hi, scratch)
