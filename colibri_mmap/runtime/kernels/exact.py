"""Weights of any type, made float32 exactly, times float32 activations: y[t][r] = W[r] . x[t].

The kernels of F32, F16 and BF16 matrices, and of every type where `exact` is asked for. Arguments and
units as in matvec.py and matmul.py, with f32 records.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"
from __future__ import annotations

import numba
import numpy as np

from ..simd import (
    INLINE,
    add,
    fma,
    load_f32,
    load_f32x16,
    load_i64,
    splat_f32x16,
    store,
    store_f32,
    total,
    zero_f32x16,
)
from ..task import Task
from .blocks import (
    bf16_floats,
    f16_floats,
    f32_floats,
    q4_0_floats,
    q4_1_floats,
    q4_k_floats,
    q5_0_floats,
    q5_1_floats,
    q5_k_floats,
    q6_k_floats,
    q8_0_floats,
)

_CHUNK = 4096  # weights of a row that are made float32 at a time


@numba.njit(**INLINE)
def _dot(w, x, n):
    """w . x over n float32, in one order for any n."""
    a0, a1, a2, a3 = zero_f32x16(), zero_f32x16(), zero_f32x16(), zero_f32x16()
    for i in range(0, n - 63, 64):
        a0 = fma(load_f32x16(w + 4 * i), load_f32x16(x + 4 * i), a0)
        a1 = fma(load_f32x16(w + 4 * i + 64), load_f32x16(x + 4 * i + 64), a1)
        a2 = fma(load_f32x16(w + 4 * i + 128), load_f32x16(x + 4 * i + 128), a2)
        a3 = fma(load_f32x16(w + 4 * i + 192), load_f32x16(x + 4 * i + 192), a3)
    for i in range(n & ~63, n - 15, 16):
        a0 = fma(load_f32x16(w + 4 * i), load_f32x16(x + 4 * i), a0)
    rest = np.float32(0)
    for i in range(n & ~15, n):
        rest += load_f32(w + 4 * i) * load_f32(x + 4 * i)
    return total(add(add(a0, a1), add(a2, a3))) + rest


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
                part = _dot(scratch, x + token * x_stride + 4 * start, n)
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
    """sums f32 [8 rows][16 tokens] += w . x; every 32 products are summed apart, which keeps errors small."""
    zero = zero_f32x16()
    f0, f1, f2, f3 = zero, zero, zero, zero
    f4, f5, f6, f7 = zero, zero, zero, zero
    for group in range(groups):
        a0, a1, a2, a3 = zero, zero, zero, zero
        a4, a5, a6, a7 = zero, zero, zero, zero
        for i in range(32 * group, 32 * group + 32):
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
def _store_outputs(sums, rows, tokens, y, y_stride):
    """sums f32 [row][16 tokens] -> y[token][row]."""
    for token in range(tokens):
        for row in range(rows):
            store_f32(y + token * y_stride + 4 * row, load_f32(sums + 64 * row + 4 * token))


@numba.njit(**INLINE)
def _matmul(floats, block, block_bytes, args, lo, hi, scratch):
    weights, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    x, x_stride, tokens = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    y, y_stride = load_i64(args + 48), load_i64(args + 56)
    vectors = (tokens + 15) // 16
    for first in range(0, vectors, _VECTORS):
        count = min(_VECTORS, vectors - first)
        for row in range(lo, hi, _ROWS):
            for i in range(_ROWS * count):
                store(scratch + _SUMS + 64 * i, zero_f32x16())
            for start in range(0, columns, 256):
                n = min(256, columns - start)
                for i in range(_ROWS):
                    source = weights + min(row + i, hi - 1) * row_bytes
                    floats(source + start // block * block_bytes, n, scratch + _ROW * i)
                    for j in range(n, (n + 31) & ~31):
                        store_f32(scratch + _ROW * i + 4 * j, np.float32(0))
                for vector in range(count):
                    v = x + (first + vector) * x_stride + 64 * start
                    sums = scratch + _SUMS + 1024 * vector
                    for half in range(2):
                        w = scratch + 8 * _ROW * half
                        _tile(w, v, (n + 31) // 32, sums + 512 * half)
            for vector in range(count):
                token = 16 * (first + vector)
                _store_outputs(
                    scratch + _SUMS + 1024 * vector,
                    min(_ROWS, hi - row),
                    min(16, tokens - token),
                    y + token * y_stride + 4 * row,
                    y_stride,
                )


# ------------------------------------------------------------------ tasks


@Task
def exact_matvec_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(f32_floats, 1, 4, args, lo, hi, scratch)


@Task
def exact_matmul_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(f32_floats, 1, 4, args, lo, hi, scratch)


@Task
def exact_matvec_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(f16_floats, 1, 2, args, lo, hi, scratch)


@Task
def exact_matmul_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matmul(f16_floats, 1, 2, args, lo, hi, scratch)


@Task
def exact_matvec_bf16(args: int, lo: int, hi: int, scratch: int) -> None:
    _matvec(bf16_floats, 1, 2, args, lo, hi, scratch)


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
