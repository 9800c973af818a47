"""Rows of weights as float32, exactly the values that ggml and gguf-py give.

Arguments of every task: source address, bytes per row, row length K, destination address, bytes per
destination row, address of int64 row numbers or 0 for rows [lo, hi) themselves. Units: rows.
"""

from __future__ import annotations

import numba

from ..simd import INLINE, load_i64
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


@numba.njit(**INLINE)
def _rows(floats, args, lo, hi):
    source, row_bytes, columns = load_i64(args), load_i64(args + 8), load_i64(args + 16)
    out, stride, picked = load_i64(args + 24), load_i64(args + 32), load_i64(args + 40)
    for row in range(lo, hi):
        index = row if picked == 0 else load_i64(picked + 8 * row)
        floats(source + index * row_bytes, columns, out + row * stride)


@Task
def dequantise_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(f32_floats, args, lo, hi)


@Task
def dequantise_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(f16_floats, args, lo, hi)


@Task
def dequantise_bf16(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(bf16_floats, args, lo, hi)


@Task
def dequantise_q4_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q4_0_floats, args, lo, hi)


@Task
def dequantise_q4_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q4_1_floats, args, lo, hi)


@Task
def dequantise_q5_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q5_0_floats, args, lo, hi)


@Task
def dequantise_q5_1(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q5_1_floats, args, lo, hi)


@Task
def dequantise_q8_0(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q8_0_floats, args, lo, hi)


@Task
def dequantise_mxfp4(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(mxfp4_floats, args, lo, hi)


@Task
def dequantise_q4_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q4_k_floats, args, lo, hi)


@Task
def dequantise_q5_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q5_k_floats, args, lo, hi)


@Task
def dequantise_q6_k(args: int, lo: int, hi: int, scratch: int) -> None:
    _rows(q6_k_floats, args, lo, hi)
