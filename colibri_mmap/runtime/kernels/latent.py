"""Attention over compressed keys (MLA in its absorbed form, DeepSeek-AI 2024).

All heads of a token meet one latent per position: `rank` compressed values, which are the head's
value too, and `rotated` values of the shared rotary key. The cache holds it once, row by row:
[position][rank + rotated, rounded up to 16]. Sixteen heads of a token fill the lanes of a vector,
and 64 positions at a time, the first ones or those of an index list, are brought into scratch as
float32 and go through an online softmax (Milakov and Gimelshein 2018). The arithmetic of a token
does not depend on its neighbours. The first argument of every task is the position of token 0.
"""

from __future__ import annotations

from numba import njit

from ..simd import (
    INLINE,
    add,
    divide,
    fma,
    load_4_words,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    maximum,
    mul,
    splat_f32x16,
    store,
    store_f16x16,
    store_f32,
    sub,
    zero_f32x16,
)
from ..task import SCRATCH_BYTES, Task
from .exponential import exp
from .transpose import load_transposed, store_eight, store_outputs

HEADS = 16  # heads of one unit
_KEYS = 64  # positions of one softmax step
_LINE = 64  # bytes of a vector: one value of 16 heads


def fits(rank: int, rotated: int) -> bool:
    """Whether a unit of latents of this size fits into a thread's scratch."""
    padded, values = (-(-n // 16) * 16 for n in (rank + rotated, rank))
    return (4 * _KEYS + _LINE) * padded + _LINE * (_KEYS + values) <= SCRATCH_BYTES


@njit(**INLINE)
def _copy_padded(source, n, target):
    """n floats, and zeros up to a multiple of 16."""
    whole = n // 16 * 16
    for i in range(0, whole, 16):
        store(target + 4 * i, load_f32x16(source + 4 * i))
    if whole < n:
        store(target + 4 * whole, zero_f32x16())
        for i in range(whole, n):
            store_f32(target + 4 * i, load_f32(source + 4 * i))


# ------------------------------------------------------------------------------ appending
@njit(**INLINE)
def _append(args, lo, hi, scratch, half):
    position, latents, stride, n = load_4_words(args)
    cache = load_i64(args + 32)
    padded = (n + 15) // 16 * 16
    for token in range(lo, hi):
        target = cache + (position + token) * padded * (2 if half else 4)
        _copy_padded(latents + token * stride, n, scratch)
        for i in range(0, padded, 16):
            if half:
                store_f16x16(target + 2 * i, load_f32x16(scratch + 4 * i))
            else:
                store(target + 4 * i, load_f32x16(scratch + 4 * i))


@Task
def append_latent_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Write the latents of tokens [lo, hi) into a cache.

    Arguments: position of token 0, latents, their stride, their size, cache.
    """
    _append(args, lo, hi, scratch, True)


@Task
def append_latent_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `append_latent_f16`, for a float32 cache."""
    _append(args, lo, hi, scratch, False)


# ------------------------------------------------------------------------------ queries
@njit(**INLINE)
def _transpose_queries(
    latent, latent_step, rank, rotary, rotary_step, rotated, heads, rows, queries
):
    """queries f32 [rank + rotated, rounded up to 16][16 heads]; unused lanes repeat the last head.

    `rows`: room for 16 queries.
    """
    padded = (rank + rotated + 15) // 16 * 16
    for lane in range(HEADS):
        head = min(lane, heads - 1)
        row = rows + lane * padded * 4
        _copy_padded(rotary + head * rotary_step, rotated, row + rank * 4)
        for i in range(0, rank, 16):
            if rank - i >= 16:
                store(row + 4 * i, load_f32x16(latent + head * latent_step + 4 * i))
            else:
                for j in range(i, rank):
                    store_f32(row + 4 * j, load_f32(latent + head * latent_step + 4 * j))
    for i in range(0, padded, 16):
        first, last = load_transposed(rows + 4 * i, padded * 4)
        store_eight(queries + _LINE * i, _LINE, first)
        store_eight(queries + _LINE * (i + 8), _LINE, last)


# ------------------------------------------------------------------------------ one step of keys
@njit(**INLINE)
def _stage(cache, index, key, count, padded, keys, half):
    """keys f32 [count][padded]: those from number `key` on, of all positions or of the index."""
    for j in range(count):
        position = load_i32(index + 4 * (key + j)) if index else key + j
        source = cache + position * padded * (2 if half else 4)
        target = keys + j * padded * 4
        for i in range(0, padded, 16):
            if half:
                store(target + 4 * i, load_f16x16(source + 2 * i))
            else:
                store(target + 4 * i, load_f32x16(source + 4 * i))


@njit(**INLINE)
def _scores_of_8(queries, keys, line, size, scores):
    """scores f32 [8 keys][16 heads]."""
    a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zero_f32x16()
    for d in range(size):
        q, k = load_f32x16(queries + _LINE * d), keys + 4 * d
        a0 = fma(splat_f32x16(load_f32(k)), q, a0)
        a1 = fma(splat_f32x16(load_f32(k + line)), q, a1)
        a2 = fma(splat_f32x16(load_f32(k + 2 * line)), q, a2)
        a3 = fma(splat_f32x16(load_f32(k + 3 * line)), q, a3)
        a4 = fma(splat_f32x16(load_f32(k + 4 * line)), q, a4)
        a5 = fma(splat_f32x16(load_f32(k + 5 * line)), q, a5)
        a6 = fma(splat_f32x16(load_f32(k + 6 * line)), q, a6)
        a7 = fma(splat_f32x16(load_f32(k + 7 * line)), q, a7)
    store_eight(scores, _LINE, (a0, a1, a2, a3, a4, a5, a6, a7))


@njit(**INLINE)
def _softmax(scores, count, scale, best, summed):
    """Scores -> weights [count][16 heads]; the new maximum and sum, and the factor on the past."""
    past = best
    for j in range(count):
        score = mul(load_f32x16(scores + _LINE * j), scale)
        store(scores + _LINE * j, score)
        best = maximum(score, best)
    factor = exp(sub(past, best))
    summed = mul(summed, factor)
    for j in range(count):
        weight = exp(sub(load_f32x16(scores + _LINE * j), best))
        store(scores + _LINE * j, weight)
        summed = add(summed, weight)
    return best, summed, factor


@njit(**INLINE)
def _add_values_of_8(weights, keys, line, count, factor, outputs):
    """outputs f32 [8 values][16 heads] = outputs * factor + weights times values."""
    a0, a1 = mul(load_f32x16(outputs), factor), mul(load_f32x16(outputs + 64), factor)
    a2, a3 = mul(load_f32x16(outputs + 128), factor), mul(load_f32x16(outputs + 192), factor)
    a4, a5 = mul(load_f32x16(outputs + 256), factor), mul(load_f32x16(outputs + 320), factor)
    a6, a7 = mul(load_f32x16(outputs + 384), factor), mul(load_f32x16(outputs + 448), factor)
    for j in range(count):
        w, v = load_f32x16(weights + _LINE * j), keys + line * j
        a0 = fma(splat_f32x16(load_f32(v)), w, a0)
        a1 = fma(splat_f32x16(load_f32(v + 4)), w, a1)
        a2 = fma(splat_f32x16(load_f32(v + 8)), w, a2)
        a3 = fma(splat_f32x16(load_f32(v + 12)), w, a3)
        a4 = fma(splat_f32x16(load_f32(v + 16)), w, a4)
        a5 = fma(splat_f32x16(load_f32(v + 20)), w, a5)
        a6 = fma(splat_f32x16(load_f32(v + 24)), w, a6)
        a7 = fma(splat_f32x16(load_f32(v + 28)), w, a7)
    store_eight(outputs, _LINE, (a0, a1, a2, a3, a4, a5, a6, a7))


# ------------------------------------------------------------------------------ the kernel
@njit(**INLINE)
def _attend(args, lo, hi, scratch, half):
    position, latent, latent_stride, rotary = load_4_words(args)
    rotary_stride, rotary_step, out, out_stride = load_4_words(args + 32)
    cache, heads, rank, rotated = load_4_words(args + 64)
    index, chosen = load_i64(args + 96), load_i64(args + 104)
    scale = splat_f32x16(load_f32(args + 112))
    size = rank + rotated
    padded = (size + 15) // 16 * 16
    keys = scratch  # f32 [_KEYS][padded]; at first the queries, row by row
    queries = keys + _KEYS * padded * 4  # f32 [padded][16 heads]
    scores = queries + _LINE * padded  # f32 [_KEYS][16 heads]
    outputs = scores + _LINE * _KEYS  # f32 [rank rounded up to 16][16 heads]
    values = (rank + 15) // 16 * 16
    blocks = (heads + HEADS - 1) // HEADS
    for unit in range(lo, hi):
        token, first = unit // blocks, unit % blocks * HEADS
        count = min(HEADS, heads - first)
        _transpose_queries(
            latent + token * latent_stride + first * rank * 4,
            rank * 4,
            rank,
            rotary + token * rotary_stride + first * rotary_step,
            rotary_step,
            rotated,
            count,
            keys,
            queries,
        )
        for i in range(values):
            store(outputs + _LINE * i, zero_f32x16())
        best, summed = splat_f32x16(-1e38), zero_f32x16()
        visible = position + token + 1
        mine = index + 4 * chosen * token if index else 0
        seen = min(visible, chosen) if index else visible
        for key in range(0, seen, _KEYS):
            step = min(_KEYS, seen - key)
            _stage(cache, mine, key, step, padded, keys, half)
            for j in range(0, step, 8):
                # Up to seven scores more than there are keys: nobody reads them.
                _scores_of_8(queries, keys + j * padded * 4, padded * 4, size, scores + _LINE * j)
            best, summed, factor = _softmax(scores, step, scale, best, summed)
            for i in range(0, values, 8):
                _add_values_of_8(
                    scores, keys + 4 * i, padded * 4, step, factor, outputs + _LINE * i
                )
        target = out + token * out_stride + first * rank * 4
        for i in range(0, rank, 16):
            for j in range(i, i + 16):
                store(outputs + _LINE * j, divide(load_f32x16(outputs + _LINE * j), summed))
            store_outputs(outputs + _LINE * i, min(16, rank - i), count, target + 4 * i, rank * 4)


@Task
def attend_latent_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Causal attention of consecutive tokens of one sequence over its latents.

    Arguments: position of token 0, compressed queries [heads][rank], their stride per token, rotary
    queries, their stride per token and per head, out [heads][rank], its stride, cache, heads, rank,
    rotated, index (0: all positions) int32 [tokens][chosen] of which a token at position p reads
    the first min(p + 1, chosen), chosen, scale (float32 bits). Units: tokens * ceil(heads / 16).
    """
    _attend(args, lo, hi, scratch, True)


@Task
def attend_latent_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `attend_latent_f16`, for a float32 cache."""
    _attend(args, lo, hi, scratch, False)
