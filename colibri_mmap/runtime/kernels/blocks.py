"""Helpers shared by the kernel files: how the fields of a quantised block are unpacked.

Every function takes the address of one block and returns vectors. Block layouts: ggml-common.h.

    block   Q4_0  d f16, q u4[32]                      w = d * (q - 8)
            Q4_1  d f16, m f16, q u4[32]               w = d * q + m
            Q5_0  d f16, high u1[32], q u4[32]         w = d * (q - 16)
            Q5_1  d f16, m f16, high u1[32], q u4[32]  w = d * q + m
            Q8_0  d f16, q i8[32]                      w = d * q
            MXFP4 e u8, q u4[32]                       w = 2^(e - 128) * (0 1 2 3 4 6 8 12)[q & 7],
                                                       negative where q & 8
            Q4_K  d f16, dmin f16, scales u6[8], mins u6[8] (12 bytes), q u4[256]
                                                       w = d * scale * q - dmin * min, per 32
            Q5_K  the same with high u1[256] before q
            Q6_K  low u4[256], high u2[256], scales i8[16], d f16
                                                       w = d * scale * (q - 32), per 16
"""

from __future__ import annotations

import numba
import numpy as np

from ..simd import (
    INLINE,
    add,
    as_i8x32,
    as_i8x64,
    as_i16x16,
    as_i16x32,
    bit_and,
    bit_or,
    bits_to_bytes,
    constant,
    float_of_bits,
    int_to_float,
    load_f16,
    load_f16x16,
    load_f32,
    load_f32x16,
    load_i8,
    load_i8x16,
    load_i8x32,
    load_i8x64,
    load_i16x16,
    load_u8,
    load_u16,
    load_u32,
    look_up,
    mul,
    shift_left,
    shift_right,
    shuffle,
    signed_to_i32,
    splat_f32x16,
    splat_i32x16,
    store,
    store_f32,
    store_i32,
    sub,
    unsigned_to_i32,
)

join_32 = shuffle(range(64))
low_32, high_32 = shuffle(range(32)), shuffle(range(32, 64))
_low_16, _high_16 = shuffle(range(16)), shuffle(range(16, 32))
_twice_16 = shuffle([*range(16)] * 2)
_twice_32 = shuffle([*range(32)] * 2)

_nibbles_32, _nibbles_64 = constant("i8", [15] * 32), constant("i8", [15] * 64)
_bit_4 = constant("i8", [0x10] * 64)
_bits_45 = constant("i8", [0x30] * 64)
_eight, _sixteen = constant("i8", [8] * 32), constant("i8", [16] * 32)
_thirty_two = constant("i8", [32] * 64)
_four_x16 = constant("i16", [4] * 16)
_four_x32 = constant("i16", [4] * 32)
_none_then_four = constant("i16", [0] * 8 + [4] * 8)
_left_4_3, _left_2_1, _left_4_2, _right_0_1, _right_0_2, _right_0_4, _right_2_3 = (
    constant("i16", [low] * 16 + [high] * 16)
    for low, high in ((4, 3), (2, 1), (4, 2), (0, 1), (0, 2), (0, 4), (2, 3))
)

fp4_plus_16 = look_up([16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4])


# ------------------------------------------------------------------ blocks of 32: weights i8 [32]
@numba.njit(**INLINE)
def _nibbles(address):
    """u4 [32]: element i in the low half of byte i, element i + 16 in the high half."""
    packed = load_i8x16(address)
    shifted = shift_right(as_i16x16(_twice_16(packed, packed)), _none_then_four())
    return bit_and(as_i8x32(shifted), _nibbles_32())


@numba.njit(**INLINE)
def _nibbles_and_high_bits(address, high):
    bytes_64 = bits_to_bytes(load_u32(high))
    bits = shift_left(as_i16x16(low_32(bytes_64, bytes_64)), _four_x16())
    return bit_or(_nibbles(address), as_i8x32(bits))


@numba.njit(**INLINE)
def q4_0_weights(block):
    """q u8 [32]; the weight is d * (q - 8)."""
    return _nibbles(block + 2)


@numba.njit(**INLINE)
def q4_1_weights(block):
    """q u8 [32]."""
    return _nibbles(block + 4)


@numba.njit(**INLINE)
def q5_0_weights(block):
    """q u8 [32]; the weight is d * (q - 16)."""
    return _nibbles_and_high_bits(block + 6, block + 2)


@numba.njit(**INLINE)
def q5_1_weights(block):
    """q u8 [32]."""
    return _nibbles_and_high_bits(block + 8, block + 4)


@numba.njit(**INLINE)
def q8_0_weights(block):
    """q i8 [32]."""
    return load_i8x32(block + 2)


@numba.njit(**INLINE)
def mxfp4_weights(block):
    """q u8 [32]; the weight is the block's scale * (q - 16)."""
    return fp4_plus_16(_nibbles(block + 1))


@numba.njit(**INLINE)
def mxfp4_scale(block):
    """2^(e - 128); denormal for the two smallest e."""
    e = load_u8(block)
    return float_of_bits((e - 1) << 23 if e > 1 else 0x00200000 << e)


# ------------------------------------------------------------------ blocks of 256: u8 [64] x 4
@numba.njit(**INLINE)
def k_scales(fields):
    """The 6-bit fields of Q4_K and Q5_K -> 8 scales, 8 mins, a byte each in an int64."""
    low, middle, high = load_u32(fields), load_u32(fields + 4), load_u32(fields + 8)
    scales = (high & 0x0F0F0F0F) | ((low >> 2) & 0x30303030)
    mins = ((high >> 4) & 0x0F0F0F0F) | ((middle >> 2) & 0x30303030)
    return (low & 0x3F3F3F3F) | (scales << 32), (middle & 0x3F3F3F3F) | (mins << 32)


@numba.njit(**INLINE)
def low_and_high_nibbles(packed):
    high = as_i8x64(shift_right(as_i16x32(packed), _four_x32()))
    return bit_and(packed, _nibbles_64()), bit_and(high, _nibbles_64())


@numba.njit(**INLINE)
def _two_groups(address):
    """32 bytes -> u4 [64]: the low nibbles, then the high ones."""
    packed = load_i8x32(address)
    both = shift_right(as_i16x32(_twice_32(packed, packed)), _right_0_4())
    return bit_and(as_i8x64(both), _nibbles_64())


@numba.njit(**INLINE)
def q4_k_weights(block):
    """q u8 in order."""
    return (
        _two_groups(block + 16),
        _two_groups(block + 48),
        _two_groups(block + 80),
        _two_groups(block + 112),
    )


@numba.njit(**INLINE)
def _with_bit_4(low, high):
    return bit_or(low, bit_and(as_i8x64(high), _bit_4()))


@numba.njit(**INLINE)
def q5_k_weights(block):
    """q u8 in order; bit g of a byte of `high` belongs to group g of 32."""
    bits = load_i8x32(block + 16)
    high = as_i16x32(_twice_32(bits, bits))
    return (
        _with_bit_4(_two_groups(block + 48), shift_left(high, _left_4_3())),
        _with_bit_4(_two_groups(block + 80), shift_left(high, _left_2_1())),
        _with_bit_4(_two_groups(block + 112), shift_right(high, _right_0_1())),
        _with_bit_4(_two_groups(block + 144), shift_right(high, _right_2_3())),
    )


@numba.njit(**INLINE)
def _q6_k_half(low, high):
    bits = load_i8x32(high)
    pairs = as_i16x32(_twice_32(bits, bits))
    w0, w1 = low_and_high_nibbles(load_i8x64(low))
    w0 = bit_or(w0, bit_and(as_i8x64(shift_left(pairs, _left_4_2())), _bits_45()))
    w1 = bit_or(w1, bit_and(as_i8x64(shift_right(pairs, _right_0_2())), _bits_45()))
    return w0, w1


@numba.njit(**INLINE)
def q6_k_weights(block):
    """q u8 in order; the weight is d * scale * (q - 32)."""
    w0, w1 = _q6_k_half(block, block + 128)
    w2, w3 = _q6_k_half(block + 64, block + 160)
    return w0, w1, w2, w3


# ------------------------------------------------------------------ rows as float32, exact
@numba.njit(**INLINE)
def _store_scaled(out, q, scale, offset):
    """q i8 [32] * scale + offset."""
    factor, shift = splat_f32x16(scale), splat_f32x16(offset)
    store(out, add(mul(int_to_float(signed_to_i32(_low_16(q, q))), factor), shift))
    store(out + 64, add(mul(int_to_float(signed_to_i32(_high_16(q, q))), factor), shift))


@numba.njit(**INLINE)
def _store_products(out, q, low_scale, high_scale):
    """q i8 [32], a scale for each half."""
    low = int_to_float(signed_to_i32(_low_16(q, q)))
    high = int_to_float(signed_to_i32(_high_16(q, q)))
    store(out, mul(low, splat_f32x16(low_scale)))
    store(out + 64, mul(high, splat_f32x16(high_scale)))


@numba.njit(**INLINE)
def f32_floats(source, n, out):
    for i in range(0, n - 15, 16):
        store(out + 4 * i, load_f32x16(source + 4 * i))
    for i in range(n & ~15, n):
        store_f32(out + 4 * i, load_f32(source + 4 * i))


@numba.njit(**INLINE)
def f16_floats(source, n, out):
    for i in range(0, n - 15, 16):
        store(out + 4 * i, load_f16x16(source + 2 * i))
    for i in range(n & ~15, n):
        store_f32(out + 4 * i, load_f16(source + 2 * i))


@numba.njit(**INLINE)
def bf16_floats(source, n, out):
    for i in range(0, n - 15, 16):
        bits = unsigned_to_i32(load_i16x16(source + 2 * i))
        store(out + 4 * i, shift_left(bits, splat_i32x16(16)))
    for i in range(n & ~15, n):
        store_i32(out + 4 * i, load_u16(source + 2 * i) << 16)


@numba.njit(**INLINE)
def q4_0_floats(source, n, out):
    for block in range(n // 32):
        p, to = source + 18 * block, out + 128 * block
        d = load_f16(p)
        _store_products(to, sub(q4_0_weights(p), _eight()), d, d)


@numba.njit(**INLINE)
def q4_1_floats(source, n, out):
    for block in range(n // 32):
        p = source + 20 * block
        _store_scaled(out + 128 * block, q4_1_weights(p), load_f16(p), load_f16(p + 2))


@numba.njit(**INLINE)
def q5_0_floats(source, n, out):
    for block in range(n // 32):
        p, to = source + 22 * block, out + 128 * block
        d = load_f16(p)
        _store_products(to, sub(q5_0_weights(p), _sixteen()), d, d)


@numba.njit(**INLINE)
def q5_1_floats(source, n, out):
    for block in range(n // 32):
        p = source + 24 * block
        _store_scaled(out + 128 * block, q5_1_weights(p), load_f16(p), load_f16(p + 2))


@numba.njit(**INLINE)
def q8_0_floats(source, n, out):
    for block in range(n // 32):
        p, to = source + 34 * block, out + 128 * block
        d = load_f16(p)
        _store_products(to, q8_0_weights(p), d, d)


@numba.njit(**INLINE)
def mxfp4_floats(source, n, out):
    for block in range(n // 32):
        p, to = source + 17 * block, out + 128 * block
        d = mxfp4_scale(p)
        _store_products(to, sub(mxfp4_weights(p), _sixteen()), d, d)


@numba.njit(**INLINE)
def _store_k_groups(out, w, group, block, scales, mins):
    """The groups `group` and `group + 1` of Q4_K or Q5_K."""
    d, dmin = load_f16(block), load_f16(block + 2)
    for half in range(2):
        shift = 8 * (group + half)
        scale = d * np.float32((scales >> shift) & 63)
        offset = dmin * np.float32((mins >> shift) & 63)
        q = low_32(w, w) if half == 0 else high_32(w, w)
        _store_scaled(out + 128 * (group + half), q, scale, -offset)


@numba.njit(**INLINE)
def _store_k_block(out, block, weights):
    scales, mins = k_scales(block + 4)
    _store_k_groups(out, weights[0], 0, block, scales, mins)
    _store_k_groups(out, weights[1], 2, block, scales, mins)
    _store_k_groups(out, weights[2], 4, block, scales, mins)
    _store_k_groups(out, weights[3], 6, block, scales, mins)


@numba.njit(**INLINE)
def q4_k_floats(source, n, out):
    for block in range(n // 256):
        p = source + 144 * block
        _store_k_block(out + 1024 * block, p, q4_k_weights(p))


@numba.njit(**INLINE)
def q5_k_floats(source, n, out):
    for block in range(n // 256):
        p = source + 176 * block
        _store_k_block(out + 1024 * block, p, q5_k_weights(p))


@numba.njit(**INLINE)
def _store_q6_k_quarter(out, q, scales, d):
    """q u8 [64] of a Q6_K block with its four scales."""
    w = sub(q, _thirty_two())
    s0, s1 = d * np.float32(load_i8(scales)), d * np.float32(load_i8(scales + 1))
    s2, s3 = d * np.float32(load_i8(scales + 2)), d * np.float32(load_i8(scales + 3))
    _store_products(out, low_32(w, w), s0, s1)
    _store_products(out + 128, high_32(w, w), s2, s3)


@numba.njit(**INLINE)
def q6_k_floats(source, n, out):
    for block in range(n // 256):
        p, to = source + 210 * block, out + 1024 * block
        d = load_f16(p + 208)
        w0, w1, w2, w3 = q6_k_weights(p)
        _store_q6_k_quarter(to, w0, p + 192, d)
        _store_q6_k_quarter(to + 256, w1, p + 196, d)
        _store_q6_k_quarter(to + 512, w2, p + 200, d)
        _store_q6_k_quarter(to + 768, w3, p + 204, d)
