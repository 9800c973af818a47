"""Activations as the weight kernels read them: one token (columns) or 16 tokens in the lanes.

    f32     columns: f32 [K padded to 16]              lanes: f32 [K padded to 16][16 tokens]
    q8_32   x = d * q with one d per 32 values
            columns: per 128 values q i8, the first 16 of each block, then the last 16 of each;
            -128 * sums of four q i32 [16], the first and the last 16 together; d f32 [4],
            d * sum of q f32 [4]; 32 bytes of padding
            lanes: per 32 values q i8 [8][16 tokens][4], minus the sum of q i32 [16], d f32 [16]
    q8_256  x = d * q with one d per 256 values
            columns: per 256 values q i8 [256], sums of 16 q i16 [16], d f32, 28 bytes of padding
            lanes: per 256 values eight groups of 32: q i8 [8][16 tokens][4], minus the sums of the
            first and of the last 16 q i32 [2][16]; then d f32 [16]

Padding is zero. d = max |x| / 127 and q = round half to even (x / d), in both forms alike.

Arguments of `pack_columns`: x f32 address, its bytes per token, address of int64 token numbers or 0
for tokens [lo, hi) themselves, K, output address, bytes per output record. Units: tokens.
Arguments of `pack_lanes`: the same with the number of tokens before K. Units: vectors of 16 tokens.
"""

from __future__ import annotations

import numba
import numpy as np

from ..simd import (
    INLINE,
    absolute,
    constant,
    divide,
    dot_u8_i8,
    float_to_int,
    largest,
    load_f32,
    load_f32x16,
    load_i8x32,
    load_i8x64,
    load_i32,
    load_i64,
    maximum,
    minimum,
    round_even,
    shift_left,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f32,
    store_i16,
    sub,
    to_i8,
    total,
    zero_f32x16,
    zero_i32x16,
)
from ..task import Task
from .transpose import load_transposed, store_eight

Q8_32_COLUMN_BYTES = 256
Q8_256_COLUMN_BYTES = 320
Q8_256_LANES_BYTES = 8 * 640 + 64
Q8_32_LANES_BYTES = 640

_zero_i8x64 = constant("i8", [0] * 64)
_ones_low_16 = constant("i8", [1] * 16 + [0] * 48)
_ones_i8x64 = constant("i8", [1] * 64)
_plus_127, _minus_127 = constant("f32", [127.0] * 16), constant("f32", [-127.0] * 16)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def f32_column_bytes(columns: int) -> int:
    return 4 * _up(columns, 16)


def f32_lanes_bytes(columns: int) -> int:
    return 64 * _up(columns, 16)


def q8_32_column_bytes(columns: int) -> int:
    return _up(columns, 128) // 128 * Q8_32_COLUMN_BYTES


def q8_32_lanes_bytes(columns: int) -> int:
    return columns // 32 * Q8_32_LANES_BYTES


def q8_256_column_bytes(columns: int) -> int:
    return columns // 256 * Q8_256_COLUMN_BYTES


def q8_256_lanes_bytes(columns: int) -> int:
    return columns // 256 * Q8_256_LANES_BYTES


@numba.njit(**INLINE)
def _padded(n, multiple):
    return (n + multiple - 1) // multiple * multiple


@numba.njit(**INLINE)
def _token(index, picked):
    return index if picked == 0 else load_i64(picked + 8 * index)


# ------------------------------------------------------------------ rounding
@numba.njit(**INLINE)
def _scale(x, n):
    """max |x| / 127 over n (a multiple of 16) values."""
    highest = zero_f32x16()
    for i in range(0, n, 16):
        highest = maximum(absolute(load_f32x16(x + 4 * i)), highest)
    return largest(highest) / np.float32(127)


@numba.njit(**INLINE)
def _round_16(x, divisor):
    """Integers in [-127, 127]; what is not a number becomes 127."""
    scaled = round_even(divide(load_f32x16(x), divisor))
    return to_i8(float_to_int(maximum(minimum(scaled, _plus_127()), _minus_127())))


@numba.njit(**INLINE)
def _divisor(d):
    return splat_f32x16(d if d > np.float32(0) else np.float32(1))


@numba.njit(**INLINE)
def _round_32(x, d, out):
    divisor = _divisor(d)
    store(out, _round_16(x, divisor))
    store(out + 16, _round_16(x + 64, divisor))


@numba.njit(**INLINE)
def _sum_16(q):
    """The sum of 16 i8; reads 64 bytes."""
    return total(dot_u8_i8(zero_i32x16(), _ones_low_16(), load_i8x64(q)))


# ------------------------------------------------------------------ columns
@Task
def pack_columns_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    columns, out, stride = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    for index in range(lo, hi):
        source, to = x + _token(index, picked) * x_stride, out + index * stride
        store(to + 4 * (_padded(columns, 16) - 16), zero_f32x16())
        for i in range(0, columns - 15, 16):
            store(to + 4 * i, load_f32x16(source + 4 * i))
        for i in range(columns & ~15, columns):
            store_f32(to + 4 * i, load_f32(source + 4 * i))


@numba.njit(**INLINE)
def _pack_four_blocks(source, blocks, to, scratch):
    """128 values, or the first `blocks` times 32 of them and zeros, as a q8_32 column record."""
    for part in range(4):
        store(to + 64 * part, _zero_i8x64())
    for block in range(blocks):
        x = source + 128 * block
        d = _scale(x, 32)
        store(to + 16 * block, _round_16(x, _divisor(d)))
        store(to + 64 + 16 * block, _round_16(x + 64, _divisor(d)))
        store_f32(to + 192 + 4 * block, d)
    sums = dot_u8_i8(zero_i32x16(), _ones_i8x64(), load_i8x64(to))
    sums = dot_u8_i8(sums, _ones_i8x64(), load_i8x64(to + 64))
    store(to + 128, shift_left(sub(zero_i32x16(), sums), splat_i32x16(7)))
    store(scratch, sums)
    for block in range(blocks):
        p = scratch + 16 * block
        whole = load_i32(p) + load_i32(p + 4) + load_i32(p + 8) + load_i32(p + 12)
        store_f32(to + 208 + 4 * block, load_f32(to + 192 + 4 * block) * np.float32(whole))


@Task
def pack_columns_q8_32(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    columns, out, stride = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    for index in range(lo, hi):
        source, to = x + _token(index, picked) * x_stride, out + index * stride
        for start in range(0, columns, 128):
            blocks = min(4, (columns - start) // 32)
            _pack_four_blocks(source + 4 * start, blocks, to + 2 * start, scratch)


@Task
def pack_columns_q8_256(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    columns, out, stride = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    for index in range(lo, hi):
        source, to = x + _token(index, picked) * x_stride, out + index * stride
        for _ in range(columns // 256):
            store(to + 256, _zero_i8x64())
            d = _scale(source, 256)
            for group in range(8):
                _round_32(source + 128 * group, d, to + 32 * group)
            for group in range(16):
                store_i16(scratch + 2 * group, _sum_16(to + 16 * group))
            store(to + 256, load_i8x32(scratch))
            store_f32(to + 288, d)
            source += 1024
            to += Q8_256_COLUMN_BYTES


# ------------------------------------------------------------------ lanes
_STAGED_ROW = 1024  # bytes of scratch per token
_SPILL = 16 * _STAGED_ROW  # scratch for what is not wanted


@numba.njit(**INLINE)
def _stage_floats(source, n, to):
    """n floats and zeros up to a multiple of 16."""
    for i in range(0, n - 15, 16):
        store(to + 4 * i, load_f32x16(source + 4 * i))
    if n & 15:
        store(to + 4 * (n & ~15), zero_f32x16())
        for i in range(n & ~15, n):
            store_f32(to + 4 * i, load_f32(source + 4 * i))


@Task
def pack_lanes_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    tokens, columns = load_i64(args + 24), load_i64(args + 32)
    out, stride = load_i64(args + 40), load_i64(args + 48)
    for vector in range(lo, hi):
        for start in range(0, columns, 256):
            n, to = min(256, columns - start), out + vector * stride + 64 * start
            for lane in range(16):
                index, staged = 16 * vector + lane, scratch + _STAGED_ROW * lane
                if index < tokens:
                    source = x + _token(index, picked) * x_stride + 4 * start
                    _stage_floats(source, n, staged)
                else:
                    for i in range(0, n, 16):
                        store(staged + 4 * i, zero_f32x16())
            for i in range(0, n, 16):
                first, last = load_transposed(scratch + 4 * i, _STAGED_ROW)
                store_eight(to + 64 * i, 64, first)
                store_eight(to + 64 * i + 512, 64, last)


@numba.njit(**INLINE)
def _minus_sums(q, quads):
    """Minus the sum over each token's values in q i8 [quads][16 tokens][4]."""
    sums = zero_i32x16()
    for quad in range(quads):
        sums = dot_u8_i8(sums, _ones_i8x64(), load_i8x64(q + 64 * quad))
    return sub(zero_i32x16(), sums)


@numba.njit(**INLINE)
def _stage_rounded(width, source, n, staged, d_at, d_stride):
    """n values rounded in blocks of `width`; d to `d_at` and on."""
    for block in range(n // width):
        d = _scale(source + 4 * width * block, width)
        store_f32(d_at + d_stride * block, d)
        for i in range(width * block, width * (block + 1), 32):
            _round_32(source + 4 * i, d, staged + i)


@numba.njit(**INLINE)
def _pack_256(width, source, x_stride, picked, first, tokens, n, to, d_at, scratch):
    """q and d of n <= 256 values of 16 tokens; groups of 32 are 640 bytes apart in `to`."""
    for lane in range(16):
        staged, index = scratch + _STAGED_ROW * lane, first + lane
        if index < tokens:
            x = source + _token(index, picked) * x_stride
            _stage_rounded(width, x, n, staged, d_at + 4 * lane, Q8_32_LANES_BYTES)
        else:
            for i in range(0, n, 64):
                store(staged + i, _zero_i8x64())
            for block in range(n // width):
                store_f32(d_at + Q8_32_LANES_BYTES * block + 4 * lane, np.float32(0))
    for i in range(0, n, 64):
        quads, more_quads = load_transposed(scratch + i, _STAGED_ROW)
        store_eight(to + 20 * i, 64, quads)
        store_eight(to + 20 * i + 640 if i + 32 < n else scratch + _SPILL, 64, more_quads)


@Task
def pack_lanes_q8_32(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    tokens, columns = load_i64(args + 24), load_i64(args + 32)
    out, stride = load_i64(args + 40), load_i64(args + 48)
    for vector in range(lo, hi):
        for start in range(0, columns, 256):
            n, to = min(256, columns - start), out + vector * stride + 20 * start
            source = x + 4 * start
            _pack_256(32, source, x_stride, picked, 16 * vector, tokens, n, to, to + 576, scratch)
            for group in range(n // 32):
                store(to + 640 * group + 512, _minus_sums(to + 640 * group, 8))


@Task
def pack_lanes_q8_256(args: int, lo: int, hi: int, scratch: int) -> None:
    x, x_stride, picked = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    tokens, columns = load_i64(args + 24), load_i64(args + 32)
    out, stride = load_i64(args + 40), load_i64(args + 48)
    for vector in range(lo, hi):
        source, to = x, out + vector * stride
        for _ in range(columns // 256):
            _pack_256(
                256, source, x_stride, picked, 16 * vector, tokens, 256, to, to + 5120, scratch
            )
            for group in range(8):
                q = to + 640 * group
                store(q + 512, _minus_sums(q, 4))
                store(q + 576, _minus_sums(q + 256, 4))
            source += 1024
            to += Q8_256_LANES_BYTES
