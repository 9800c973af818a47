"""The lightning indexer of sparse attention (DeepSeek-AI 2025): which keys a token attends to.

A position's score is the sum over the indexer's heads of weight * max(0, query . key). Its keys lie
in groups of 16 positions, [position / 16][size][16], so that 16 of them fill a vector. The chosen
positions are exact: the largest scores, ties to the lower position, in ascending order. The first
argument of every task is the position of token 0.
"""

from __future__ import annotations

from numba import njit

from ..simd import (
    INLINE,
    fma,
    load_4_words,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    load_u16,
    load_u32,
    maximum,
    splat_f32x16,
    store,
    store_f16x16,
    store_f32,
    store_i16,
    store_i32,
    zero_f32x16,
)
from ..task import Task

_BITS = (11, 11, 10)  # of a score that one pass of the selection looks at


# ------------------------------------------------------------------------------ appending
@njit(**INLINE)
def _append(args, lo, hi, scratch, half):
    position, source, stride, size = load_4_words(args)
    cache = load_i64(args + 32)
    width = 2 if half else 4
    for token in range(lo, hi):
        at = position + token
        target = cache + (at // 16 * size * 16 + at % 16) * width
        for d in range(size):
            value = load_f32(source + token * stride + 4 * d)
            if half:
                store_f16x16(scratch, splat_f32x16(value))
                store_i16(target + 32 * d, load_u16(scratch))
            else:
                store_f32(target + 64 * d, value)


@Task
def append_index_keys_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Write the indexer's keys of tokens [lo, hi) into a cache.

    Arguments: position of token 0, keys, their stride, their size, cache.
    """
    _append(args, lo, hi, scratch, True)


@Task
def append_index_keys_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `append_index_keys_f16`, for a float32 cache."""
    _append(args, lo, hi, scratch, False)


# ------------------------------------------------------------------------------ scores
@njit(**INLINE)
def _load(keys, d, half):
    return load_f16x16(keys + 32 * d) if half else load_f32x16(keys + 64 * d)


@njit(**INLINE)
def _add_positive(score, weights, head, product):
    """score + weight * max(0, product)."""
    weight = splat_f32x16(load_f32(weights + 4 * head))
    return fma(weight, maximum(product, zero_f32x16()), score)


@njit(**INLINE)
def _score_group(queries, weights, heads, size, keys, half):
    """The scores of 16 positions."""
    score, line, head = zero_f32x16(), 4 * size, 0
    while head + 8 <= heads:
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = zero_f32x16()
        for d in range(size):
            k, q = _load(keys, d, half), queries + head * line + 4 * d
            a0 = fma(splat_f32x16(load_f32(q)), k, a0)
            a1 = fma(splat_f32x16(load_f32(q + line)), k, a1)
            a2 = fma(splat_f32x16(load_f32(q + 2 * line)), k, a2)
            a3 = fma(splat_f32x16(load_f32(q + 3 * line)), k, a3)
            a4 = fma(splat_f32x16(load_f32(q + 4 * line)), k, a4)
            a5 = fma(splat_f32x16(load_f32(q + 5 * line)), k, a5)
            a6 = fma(splat_f32x16(load_f32(q + 6 * line)), k, a6)
            a7 = fma(splat_f32x16(load_f32(q + 7 * line)), k, a7)
        score = _add_positive(score, weights, head, a0)
        score = _add_positive(score, weights, head + 1, a1)
        score = _add_positive(score, weights, head + 2, a2)
        score = _add_positive(score, weights, head + 3, a3)
        score = _add_positive(score, weights, head + 4, a4)
        score = _add_positive(score, weights, head + 5, a5)
        score = _add_positive(score, weights, head + 6, a6)
        score = _add_positive(score, weights, head + 7, a7)
        head += 8
    while head < heads:
        a0, q = zero_f32x16(), queries + head * line
        for d in range(size):
            a0 = fma(splat_f32x16(load_f32(q + 4 * d)), _load(keys, d, half), a0)
        score = _add_positive(score, weights, head, a0)
        head += 1
    return score


@njit(**INLINE)
def _score(args, lo, hi, half):
    position, queries, queries_stride, weights = load_4_words(args)
    weights_stride, cache, heads, size = load_4_words(args + 32)
    scores, scores_stride, chosen, parts = load_4_words(args + 64)
    for unit in range(lo, hi):
        token, part = unit // parts, unit % parts
        visible = position + token + 1
        if visible <= chosen:
            continue  # the selection takes them all
        groups = (visible + 15) // 16
        q, w = queries + token * queries_stride, weights + token * weights_stride
        for group in range(part * groups // parts, (part + 1) * groups // parts):
            keys = cache + group * size * (32 if half else 64)
            score = _score_group(q, w, heads, size, keys, half)
            store(scores + token * scores_stride + 64 * group, score)


@Task
def score_keys_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Scores of the positions that consecutive tokens of a sequence see, for selection.

    Arguments: position of token 0, queries [heads][size], their stride per token, weights [heads],
    their stride, cache, heads, size, scores f32, their stride (room for the positions, rounded up
    to 16), chosen (a token that sees no more than that needs no scores), parts (of the positions of
    a token). Units: tokens * parts.
    """
    _score(args, lo, hi, True)


@Task
def score_keys_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `score_keys_f16`, for a float32 cache."""
    _score(args, lo, hi, False)


# ------------------------------------------------------------------------------ selection
@njit(**INLINE)
def _order(address):
    """A float32 as an unsigned number of 32 bits that compares as the float does."""
    bits = load_u32(address)
    return bits ^ 0xFFFFFFFF if bits >= 0x80000000 else bits + 0x80000000


@njit(**INLINE)
def _threshold(scores, n, k, counts):
    """The k-th largest of n > k scores (see `_order`), and how many equal to it are among the k."""
    known, shift = 0, 32
    for bits in _BITS:
        for i in range(1 << bits):
            store_i32(counts + 4 * i, 0)
        above, shift = shift, shift - bits
        for i in range(n):
            value = _order(scores + 4 * i)
            if value >> above == known:
                digit = counts + 4 * (value >> shift & (1 << bits) - 1)
                store_i32(digit, load_i32(digit) + 1)
        digit = (1 << bits) - 1
        while load_i32(counts + 4 * digit) < k:
            k -= load_i32(counts + 4 * digit)
            digit -= 1
        known = known << bits | digit
    return known, k


@Task
def select_keys(args: int, lo: int, hi: int, scratch: int) -> None:
    """The positions with the largest scores; all that a token sees where it sees no more.

    Arguments: position of token 0, scores f32, their stride per token, chosen, index int32 [tokens]
    [chosen]. Units: tokens.
    """
    position, scores, stride, chosen = load_4_words(args)
    index = load_i64(args + 32)
    for token in range(lo, hi):
        row, target = scores + token * stride, index + 4 * chosen * token
        visible = position + token + 1
        if visible <= chosen:
            for i in range(visible):
                store_i32(target + 4 * i, i)
            continue
        least, equals = _threshold(row, visible, chosen, scratch)
        for i in range(visible):
            value = _order(row + 4 * i)
            if value > least or (value == least and equals > 0):
                equals -= value == least
                store_i32(target, i)
                target += 4
