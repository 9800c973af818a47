"""Weights of any type, made float32 exactly, times float32 activations: y[t][r] = W[r] . x[t].

The kernels of F32, F16 and BF16 matrices, and of every type where `exact` is asked for. Arguments
and units as in matvec_32.py and matmul.py, with f32 records.
"""

from __future__ import annotations

import numba
import numpy as np

from ..simd import (
    INLINE,
    add,
    as_f32x16,
    fma,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i16x16,
    load_i64,
    shift_left,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f32,
    total,
    unsigned_to_i32,
    zero_f32x16,
)
from ..task import Task
from .blocks import (
    bf16_floats,
    f16_floats,
    f32_floats,
    mxfp4_floats,
    q4_0_floats,
    q4_1_floats,
    q4_k_floats,
    q5_0_floats,
    q5_1_floats,
    q5_k_floats,
    q6_k_floats,
    q8_0_floats,
)
from .transpose import store_outputs

_CHUNK = 4096  # weights of a row that are made float32 at a time


@numba.njit(**INLINE)
def _f32_vector(address):
    return load_f32x16(address)


@numba.njit(**INLINE)
def _f16_vector(address):
    return load_f16x16(address)


@numba.njit(**INLINE)
def _bf16_vector(address):
    bits = unsigned_to_i32(load_i16x16(address))
    return as_f32x16(shift_left(bits, splat_i32x16(16)))


@numba.njit(**INLINE)
def _dot(vector, size, floats, w, x, n, scratch):
    """w . x over n weights of `size` bytes; x is padded with zeros to 16."""
    a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, n - 63, 64):
        p, v = w + size * i, x + 4 * i
        a0 = fma(vector(p), load_f32x16(v), a0)
        a1 = fma(vector(p + 16 * size), load_f32x16(v + 64), a1)
        a2 = fma(vector(p + 32 * size), load_f32x16(v + 128), a2)
        a3 = fma(vector(p + 48 * size), load_f32x16(v + 192), a3)
    for i in range(n & ~63, n - 15, 16):
        a0 = fma(vector(w + size * i), load_f32x16(x + 4 * i), a0)
    if n & 15:
        store(scratch, zero_f32x16())
        floats(w + size * (n & ~15), n & 15, scratch)
        a1 = fma(load_f32x16(scratch), load_f32x16(x + 4 * (n & ~15)), a1)
    return total(add(add(a0, a1), add(a2, a3)))


@numba.njit(**INLINE)
def _matvec_float(vector, size, floats, args, lo, hi, scratch):
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    for row in range(lo, hi):
        w = weights + row * row_bytes
        for token in range(tokens):
            dot = _dot(vector, size, floats, w, x + token * x_stride, columns, scratch)
            store_f32(y + token * y_stride + 4 * row, dot)


@numba.njit(**INLINE)
def _matvec(floats, block, block_bytes, args, lo, hi, scratch):
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    for row in range(lo, hi):
        for start in range(0, columns, _CHUNK):
            n = min(_CHUNK, columns - start)
            source = weights + row * row_bytes + start // block * block_bytes
            floats(source, n, scratch)
            for token in range(tokens):
                out = y + token * y_stride + 4 * row
                v = x + token * x_stride + 4 * start
                part = _dot(_f32_vector, 4, f32_floats, scratch, v, n, scratch)
                store_f32(out, part if start == 0 else load_f32(out) + part)


# ------------------------------------------------------------------ tiles of 8 rows by 16 tokens
_ROWS = 16
_ROW = 1024  # bytes of 256 float32 weights of a row
_SUMS = _ROWS * _ROW  # behind the rows: f32 [token vector][row][16 tokens]
_VECTORS = 128  # token vectors that fit


@numba.njit(**INLINE)
def _all_lanes(address):
    return splat_f32x16(load_f32(address))


@numba.njit(**INLINE)
def _tile(w, x, groups, sums):
    """sums f32 [8 rows][16 tokens] += w . x; every 16 products are summed apart: less error."""
    zero = zero_f32x16()
    f0, f1, f2, f3 = zero, zero, zero, zero
    f4, f5, f6, f7 = zero, zero, zero, zero
    for group in range(groups):
        a0, a1, a2, a3 = zero, zero, zero, zero
        a4, a5, a6, a7 = zero, zero, zero, zero
        for i in range(16 * group, 16 * group + 16):
            v, p = load_f32x16(x + 64 * i), w + 4 * i
            a0 = fma(_all_lanes(p), v, a0)
            a1 = fma(_all_lanes(p + _ROW), v, a1)
            a2 = fma(_all_lanes(p + 2 * _ROW), v, a2)
            a3 = fma(_all_lanes(p + 3 * _ROW), v, a3)
            a4 = fma(_all_lanes(p + 4 * _ROW), v, a4)
            a5 = fma(_all_lanes(p + 5 * _ROW), v, a5)
            a6 = fma(_all_lanes(p + 6 * _ROW), v, a6)
            a7 = fma(_all_lanes(p + 7 * _ROW), v, a7)
        f0, f1, f2, f3 = add(f0, a0), add(f1, a1), add(f2, a2), add(f3, a3)
        f4, f5, f6, f7 = add(f4, a4), add(f5, a5), add(f6, a6), add(f7, a7)
    store(sums, add(f0, load_f32x16(sums)))
    store(sums + 64, add(f1, load_f32x16(sums + 64)))
    store(sums + 128, add(f2, load_f32x16(sums + 128)))
    store(sums + 192, add(f3, load_f32x16(sums + 192)))
    store(sums + 256, add(f4, load_f32x16(sums + 256)))
    store(sums + 320, add(f5, load_f32x16(sums + 320)))
    store(sums + 384, add(f6, load_f32x16(sums + 384)))
    store(sums + 448, add(f7, load_f32x16(sums + 448)))


@numba.njit(**INLINE)
def _matmul(floats, block, block_bytes, args, lo, hi, scratch):
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    vectors = (tokens + 15) // 16
    for first in range(0, vectors, _VECTORS):
        count = min(_VECTORS, vectors - first)
        for row in range(lo, hi, _ROWS):
            halves = 2 if hi - row > 8 else 1
            for i in range(_ROWS * count):
                store(scratch + _SUMS + 64 * i, zero_f32x16())
            for start in range(0, columns, 256):
                n = min(256, columns - start)
                for i in range(_ROWS):
                    source = weights + min(row + i, hi - 1) * row_bytes
                    floats(source + start // block * block_bytes, n, scratch + _ROW * i)
                    for j in range(n, (n + 15) & ~15):
                        store_f32(scratch + _ROW * i + 4 * j, np.float32(0))
                for vector in range(count):
                    v = x + (first + vector) * x_stride + 64 * start
                    sums = scratch + _SUMS + 1024 * vector
                    for half in range(halves):
                        w = scratch + 8 * _ROW * half
                        _tile(w, v, (n + 15) // 16, sums + 512 * half)
                    if start + 256 >= columns:
                        token = 16 * (first + vector)
                        store_outputs(
                            sums,
                            min(_ROWS, hi - row),
                            min(16, tokens - token),
                            y + token * y_stride + 4 * row,
                            y_stride,
                        )


# ------------------------------------------------------------------ tasks


@Task
def exact_matvec_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_float(_f32_vector, 4, f32_floats, args, lo, hi, scratch)


@Task
def exact_matmul_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(f32_floats, 1, 4, args, lo, hi, scratch)


@Task
def exact_matvec_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_float(_f16_vector, 2, f16_floats, args, lo, hi, scratch)


@Task
def exact_matmul_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(f16_floats, 1, 2, args, lo, hi, scratch)


@Task
def exact_matvec_bf16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec_float(_bf16_vector, 2, bf16_floats, args, lo, hi, scratch)


@Task
def exact_matmul_bf16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(bf16_floats, 1, 2, args, lo, hi, scratch)


@Task
def exact_matvec_q4_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q4_0_floats, 32, 18, args, lo, hi, scratch)


@Task
def exact_matmul_q4_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q4_0_floats, 32, 18, args, lo, hi, scratch)


@Task
def exact_matvec_q4_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q4_1_floats, 32, 20, args, lo, hi, scratch)


@Task
def exact_matmul_q4_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q4_1_floats, 32, 20, args, lo, hi, scratch)


@Task
def exact_matvec_q5_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q5_0_floats, 32, 22, args, lo, hi, scratch)


@Task
def exact_matmul_q5_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q5_0_floats, 32, 22, args, lo, hi, scratch)


@Task
def exact_matvec_q5_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q5_1_floats, 32, 24, args, lo, hi, scratch)


@Task
def exact_matmul_q5_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q5_1_floats, 32, 24, args, lo, hi, scratch)


@Task
def exact_matvec_q8_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q8_0_floats, 32, 34, args, lo, hi, scratch)


@Task
def exact_matmul_q8_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q8_0_floats, 32, 34, args, lo, hi, scratch)


@Task
def exact_matvec_mxfp4(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(mxfp4_floats, 32, 17, args, lo, hi, scratch)


@Task
def exact_matmul_mxfp4(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(mxfp4_floats, 32, 17, args, lo, hi, scratch)


@Task
def exact_matvec_q4_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q4_k_floats, 256, 144, args, lo, hi, scratch)


@Task
def exact_matmul_q4_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q4_k_floats, 256, 144, args, lo, hi, scratch)


@Task
def exact_matvec_q5_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q5_k_floats, 256, 176, args, lo, hi, scratch)


@Task
def exact_matmul_q5_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q5_k_floats, 256, 176, args, lo, hi, scratch)


@Task
def exact_matvec_q6_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(q6_k_floats, 256, 210, args, lo, hi, scratch)


@Task
def exact_matmul_q6_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(q6_k_floats, 256, 210, args, lo, hi, scratch)
