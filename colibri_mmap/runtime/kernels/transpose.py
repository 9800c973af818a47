"""16 x 16 words transposed in registers: from tokens to lanes and back."""

from __future__ import annotations

import numba

from ..simd import INLINE, load_f32, load_f32x16, shuffle, store, store_f32

_zip_low = shuffle([lane for i in range(8) for lane in (i, 16 + i)])
_zip_high = shuffle([lane for i in range(8, 16) for lane in (i, 16 + i)])


@numba.njit(**INLINE)
def _zip_eight(a, b):
    """Sixteen vectors interleaved with those eight further on; four times is a transposition."""
    low = (
        _zip_low(a[0], b[0]),
        _zip_high(a[0], b[0]),
        _zip_low(a[1], b[1]),
        _zip_high(a[1], b[1]),
        _zip_low(a[2], b[2]),
        _zip_high(a[2], b[2]),
        _zip_low(a[3], b[3]),
        _zip_high(a[3], b[3]),
    )
    high = (
        _zip_low(a[4], b[4]),
        _zip_high(a[4], b[4]),
        _zip_low(a[5], b[5]),
        _zip_high(a[5], b[5]),
        _zip_low(a[6], b[6]),
        _zip_high(a[6], b[6]),
        _zip_low(a[7], b[7]),
        _zip_high(a[7], b[7]),
    )
    return low, high


@numba.njit(**INLINE)
def load_eight(address, stride):
    """Eight vectors f32 [16]."""
    return (
        load_f32x16(address),
        load_f32x16(address + stride),
        load_f32x16(address + 2 * stride),
        load_f32x16(address + 3 * stride),
        load_f32x16(address + 4 * stride),
        load_f32x16(address + 5 * stride),
        load_f32x16(address + 6 * stride),
        load_f32x16(address + 7 * stride),
    )


@numba.njit(**INLINE)
def store_eight(address, stride, a):
    store(address, a[0])
    store(address + stride, a[1])
    store(address + 2 * stride, a[2])
    store(address + 3 * stride, a[3])
    store(address + 4 * stride, a[4])
    store(address + 5 * stride, a[5])
    store(address + 6 * stride, a[6])
    store(address + 7 * stride, a[7])


@numba.njit(**INLINE)
def load_transposed(address, stride):
    """16 rows of 16 words of 32 bits -> the first eight columns, the last eight columns."""
    a, b = load_eight(address, stride), load_eight(address + 8 * stride, stride)
    a, b = _zip_eight(a, b)
    a, b = _zip_eight(a, b)
    a, b = _zip_eight(a, b)
    return _zip_eight(a, b)


@numba.njit(**INLINE)
def store_outputs(sums, rows, tokens, y, y_stride):
    """sums f32 [16 rows][16 tokens] -> y[token][row] of the first rows and tokens."""
    if rows == 16 and tokens == 16:
        first, last = load_transposed(sums, 64)
        store_eight(y, y_stride, first)
        store_eight(y + 8 * y_stride, y_stride, last)
    else:
        for token in range(tokens):
            for row in range(rows):
                store_f32(y + token * y_stride + 4 * row, load_f32(sums + 64 * row + 4 * token))
