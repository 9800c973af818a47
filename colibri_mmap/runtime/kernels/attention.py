"""Attention over a KV cache: decode and prefill are the same kernel.

The cache of one layer and KV head holds K in groups of 16 positions, [position / 16][d_k][16], so
that 16 keys fill a vector and no horizontal sum is needed, and V as [position][d_v rounded up to
16]. A cache of `ring` positions, a multiple of 64, keeps the last ones: position p lies where
p modulo ring does. Rows are (token, query head of the group) pairs; 64 keys at a time go through an
online softmax (Milakov and Gimelshein 2018). A row's arithmetic does not depend on its neighbours:
decode, prefill and any chunking of units give the same bits.
"""

from __future__ import annotations

from numba import njit

from ..simd import (
    INLINE,
    add,
    constant,
    fma,
    largest,
    load_4_words,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i32,
    load_i64,
    load_u16,
    maximum,
    mul,
    select_less,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f16x16,
    store_f32,
    store_i16,
    store_i32,
    store_i64,
    sub,
    total,
    zero_f32x16,
)
from ..task import Task
from .exponential import exp

ROWS = 32  # rows of one unit: their scores and outputs stay in the cache
KEYS = 64  # keys of one softmax step; caches are allocated in multiples of it
_iota = constant("i32", range(16))


@njit(**INLINE)
def _load(base, element, half):
    """16 elements of a cache from element number `element` on, as float32."""
    if half:
        return load_f16x16(base + 2 * element)
    return load_f32x16(base + 4 * element)


# ------------------------------------------------------------------------------ appending
@njit(**INLINE)
def _append(args, lo, hi, scratch, half):
    k, k_stride, v, v_stride = load_4_words(args)
    heads, dk, dv, position = load_4_words(args + 32)
    keys, values, key_head, value_head = load_4_words(args + 64)
    ring = load_i64(args + 96)
    size = 2 if half else 4
    padded = (dv + 15) // 16 * 16
    for token in range(lo, hi):
        at = (position + token) % ring
        for head in range(heads):
            source = k + token * k_stride + head * dk * 4
            target = keys + head * key_head + ((at // 16) * dk * 16 + at % 16) * size
            for d in range(0, dk, 16):
                part = load_f32x16(source + 4 * d)
                if half:
                    store_f16x16(scratch, part)
                else:
                    store(scratch, part)
                for lane in range(min(16, dk - d)):
                    if half:
                        store_i16(target + (d + lane) * 32, load_u16(scratch + 2 * lane))
                    else:
                        store_f32(target + (d + lane) * 64, load_f32(scratch + 4 * lane))
            source = v + token * v_stride + head * dv * 4
            target = values + head * value_head + at * padded * size
            for d in range(0, dv, 16):
                if half:
                    store_f16x16(target + 2 * d, load_f32x16(source + 4 * d))
                else:
                    store(target + 4 * d, load_f32x16(source + 4 * d))


@Task
def append_kv_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Write K and V of tokens [lo, hi) into a cache.

    Arguments: k, its stride per token, v, its stride, KV heads, d_k, d_v, position of token 0, K
    cache, V cache, their strides per head in bytes, and the positions they hold. k and v are read
    up to 60 bytes past a row.
    """
    _append(args, lo, hi, scratch, True)


@Task
def append_kv_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `append_kv_f16`, for a float32 cache."""
    _append(args, lo, hi, scratch, False)


# ------------------------------------------------------------------------------ scores
@njit(**INLINE)
def _scores_4x2(q, keys, dk, scores, half):
    """Scores of 4 rows against 2 x 16 keys; q: address of 4 row addresses."""
    q0, q1, q2, q3 = load_i64(q), load_i64(q + 8), load_i64(q + 16), load_i64(q + 24)
    a0 = a1 = a2 = a3 = zero_f32x16()
    b0 = b1 = b2 = b3 = zero_f32x16()
    for d in range(dk):
        k0, k1 = _load(keys, d * 16, half), _load(keys, (dk + d) * 16, half)
        w = splat_f32x16(load_f32(q0 + 4 * d))
        a0, b0 = fma(w, k0, a0), fma(w, k1, b0)
        w = splat_f32x16(load_f32(q1 + 4 * d))
        a1, b1 = fma(w, k0, a1), fma(w, k1, b1)
        w = splat_f32x16(load_f32(q2 + 4 * d))
        a2, b2 = fma(w, k0, a2), fma(w, k1, b2)
        w = splat_f32x16(load_f32(q3 + 4 * d))
        a3, b3 = fma(w, k0, a3), fma(w, k1, b3)
    row = KEYS * 4
    store(scores, a0)
    store(scores + 64, b0)
    store(scores + row, a1)
    store(scores + row + 64, b1)
    store(scores + 2 * row, a2)
    store(scores + 2 * row + 64, b2)
    store(scores + 3 * row, a3)
    store(scores + 3 * row + 64, b3)


@njit(**INLINE)
def _scores_1x2(q, keys, dk, scores, half):
    q0 = load_i64(q)
    a0 = b0 = zero_f32x16()
    for d in range(dk):
        w = splat_f32x16(load_f32(q0 + 4 * d))
        a0 = fma(w, _load(keys, d * 16, half), a0)
        b0 = fma(w, _load(keys, (dk + d) * 16, half), b0)
    store(scores, a0)
    store(scores + 64, b0)


@njit(**INLINE)
def _softmax_row(scores, state, scale, key, position):
    """Scores of 64 keys -> weights; state: maximum so far, sum, factor on the past, last hidden."""
    last, first = splat_i32x16(position + 1), splat_i32x16(load_i32(state + 12))
    masked = splat_f32x16(-1e38)
    top = masked
    for part in range(0, KEYS, 16):
        index = add(_iota(), splat_i32x16(key + part))
        score = mul(load_f32x16(scores + 4 * part), splat_f32x16(scale))
        score = select_less(index, last, score, masked)
        score = select_less(first, index, score, masked)
        store(scores + 4 * part, score)
        top = maximum(score, top)
    past = load_f32(state)
    # Starts above the masked scores: a row with every key masked gets weights of 0.
    best = max(past, largest(top))
    summed = zero_f32x16()
    for part in range(0, KEYS, 16):
        weight = exp(sub(load_f32x16(scores + 4 * part), splat_f32x16(best)))
        store(scores + 4 * part, weight)
        summed = add(summed, weight)
    factor = largest(exp(splat_f32x16(past - best)))
    store_f32(state, best)
    store_f32(state + 4, load_f32(state + 4) * factor + total(summed))
    store_f32(state + 8, factor)


# ------------------------------------------------------------------------------ weighted values
@njit(**INLINE)
def _values_4x2(weights, state, values, count, padded, output, half):
    """output [4][2 x 16] = output * factor + weights [4][count] @ values [count][2 x 16]."""
    line, row = padded * 4, KEYS * 4
    w = splat_f32x16(load_f32(state + 8))
    a0, b0 = mul(w, load_f32x16(output)), mul(w, load_f32x16(output + 64))
    w = splat_f32x16(load_f32(state + 24))
    a1, b1 = mul(w, load_f32x16(output + line)), mul(w, load_f32x16(output + line + 64))
    w = splat_f32x16(load_f32(state + 40))
    a2, b2 = mul(w, load_f32x16(output + 2 * line)), mul(w, load_f32x16(output + 2 * line + 64))
    w = splat_f32x16(load_f32(state + 56))
    a3, b3 = mul(w, load_f32x16(output + 3 * line)), mul(w, load_f32x16(output + 3 * line + 64))
    for j in range(count):
        v0, v1 = _load(values, j * padded, half), _load(values, j * padded + 16, half)
        w = splat_f32x16(load_f32(weights + 4 * j))
        a0, b0 = fma(w, v0, a0), fma(w, v1, b0)
        w = splat_f32x16(load_f32(weights + row + 4 * j))
        a1, b1 = fma(w, v0, a1), fma(w, v1, b1)
        w = splat_f32x16(load_f32(weights + 2 * row + 4 * j))
        a2, b2 = fma(w, v0, a2), fma(w, v1, b2)
        w = splat_f32x16(load_f32(weights + 3 * row + 4 * j))
        a3, b3 = fma(w, v0, a3), fma(w, v1, b3)
    store(output, a0)
    store(output + 64, b0)
    store(output + line, a1)
    store(output + line + 64, b1)
    store(output + 2 * line, a2)
    store(output + 2 * line + 64, b2)
    store(output + 3 * line, a3)
    store(output + 3 * line + 64, b3)


@njit(**INLINE)
def _values_1x1(weights, state, values, count, padded, output, half):
    a0 = mul(splat_f32x16(load_f32(state + 8)), load_f32x16(output))
    for j in range(count):
        a0 = fma(splat_f32x16(load_f32(weights + 4 * j)), _load(values, j * padded, half), a0)
    store(output, a0)


@njit(**INLINE)
def _write(output, factor, target, dv):
    whole = dv // 16 * 16
    for d in range(0, whole, 16):
        store(target + 4 * d, mul(load_f32x16(output + 4 * d), splat_f32x16(factor)))
    for d in range(whole, dv):
        store_f32(target + 4 * d, load_f32(output + 4 * d) * factor)


# ------------------------------------------------------------------------------ the kernel
@njit(**INLINE)
def _last_hidden(position, window, chunk):
    """The last key that lies too far back for the token at a position; -1 if it sees them all."""
    return max(position - window, position // chunk * chunk - 1, -1)


@njit(**INLINE)
def _attend(args, lo, hi, scratch, half):
    q, q_stride, out, out_stride = load_4_words(args)
    keys, values, key_head, value_head = load_4_words(args + 32)
    group, dk, dv, tokens = load_4_words(args + 64)
    start, _, window, blocks = load_4_words(args + 96)
    ring, chunk, sinks = load_i64(args + 128), load_i64(args + 136), load_i64(args + 144)
    scale = load_f32(args + 104)
    size = 2 if half else 4
    padded = (dv + 15) // 16 * 16
    addresses = scratch  # i64 [ROWS + 3]
    states = scratch + 512  # [ROWS + 3][4]: f32 maximum, sum, factor on the past; i32 last hidden
    scores = scratch + 2048  # f32 [ROWS + 3][KEYS]
    outputs = scores + (ROWS + 4) * KEYS * 4  # f32 [ROWS + 3][padded]
    for unit in range(lo, hi):
        head, first = unit // blocks, unit % blocks * ROWS
        rows = min(ROWS, tokens * group - first)
        for r in range((rows + 3) // 4 * 4):
            # Up to three rows of padding repeat the last row; their results are dropped.
            index = min(first + r, first + rows - 1)
            position, query_head = start + index // group, head * group + index % group
            store_i64(addresses + 8 * r, q + index // group * q_stride + query_head * dk * 4)
            store_f32(states + 16 * r, load_f32(sinks + 4 * query_head) if sinks else -1e30)
            store_f32(states + 16 * r + 4, 1.0 if sinks else 0.0)
            store_i32(states + 16 * r + 12, _last_hidden(position, window, chunk))
            for d in range(0, padded, 16):
                store(outputs + (r * padded + d) * 4, zero_f32x16())
        oldest, newest = start + first // group, start + (first + rows - 1) // group
        begin = (_last_hidden(oldest, window, chunk) + 1) // KEYS * KEYS
        for key in range(begin, newest + 1, KEYS):
            count = min(KEYS, newest + 1 - key)
            base = keys + head * key_head + key % ring * dk * size
            for pair in range(0, count, 32):
                r = 0
                while r + 1 < rows:
                    _scores_4x2(
                        addresses + 8 * r,
                        base + pair * dk * size,
                        dk,
                        scores + (r * KEYS + pair) * 4,
                        half,
                    )
                    r += 4
                if r < rows:
                    _scores_1x2(
                        addresses + 8 * r,
                        base + pair * dk * size,
                        dk,
                        scores + (r * KEYS + pair) * 4,
                        half,
                    )
            for r in range((rows + 3) // 4 * 4):
                position = start + min(first + r, first + rows - 1) // group
                _softmax_row(scores + r * KEYS * 4, states + 16 * r, scale, key, position)
            base = values + head * value_head + key % ring * padded * size
            r = 0
            while r < rows:
                few = r + 1 == rows
                d = 0
                while not few and d + 32 <= padded:
                    _values_4x2(
                        scores + r * KEYS * 4,
                        states + 16 * r,
                        base + d * size,
                        count,
                        padded,
                        outputs + (r * padded + d) * 4,
                        half,
                    )
                    d += 32
                while d < padded:
                    for one in range(r, min(r + 4, rows)):
                        _values_1x1(
                            scores + one * KEYS * 4,
                            states + 16 * one,
                            base + d * size,
                            count,
                            padded,
                            outputs + (one * padded + d) * 4,
                            half,
                        )
                    d += 16
                r += 4
        for r in range(rows):
            index = first + r
            target = out + index // group * out_stride + (head * group + index % group) * dv * 4
            _write(outputs + r * padded * 4, 1.0 / load_f32(states + 16 * r + 4), target, dv)


@Task
def attention_f16(args: int, lo: int, hi: int, scratch: int) -> None:
    """Causal attention of consecutive tokens of one sequence over its float16 cache.

    Arguments: q, its stride per token, out, its stride, K cache, V cache, their strides per head
    in bytes, query heads per KV head, d_k, d_v, tokens, position of token 0, scale (float32 bits),
    window (keys visible to a token), blocks = ceil(tokens * group / ROWS), ring (positions that the
    cache holds), chunk (a token sees keys with its own position // chunk only), and sinks (0 or the
    address of one score per query head, of a key without value). Units: KV heads * blocks.
    """
    _attend(args, lo, hi, scratch, True)


@Task
def attention_f32(args: int, lo: int, hi: int, scratch: int) -> None:
    """As `attention_f16`, for a float32 cache."""
    _attend(args, lo, hi, scratch, False)
