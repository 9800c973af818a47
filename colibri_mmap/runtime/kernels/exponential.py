"""exp and its relatives on 16 floats, within 2 ulp."""

from __future__ import annotations

from numba import njit

from ..simd import (
    INLINE,
    add,
    as_f32x16,
    divide,
    float_to_int,
    fma,
    maximum,
    minimum,
    mul,
    round_even,
    select_less,
    shift_left,
    splat_f32x16,
    splat_i32x16,
    sub,
    zero_f32x16,
)

_LOWEST, _HIGHEST = -87.0, 88.0  # exp(x) is a normal float between them


@njit(**INLINE)
def exp(x):
    """e^x; 0 below -87 (minus infinity too), e^88 above 88.

    Cody and Waite's reduction to |r| <= ln(2)/2, then the minimax polynomial of Cephes' expf.
    """
    bounded = minimum(maximum(x, splat_f32x16(_LOWEST)), splat_f32x16(_HIGHEST))
    n = round_even(mul(bounded, splat_f32x16(1.44269504088896341)))
    r = fma(n, splat_f32x16(-0.693359375), bounded)
    r = fma(n, splat_f32x16(2.12194440e-4), r)
    p = fma(splat_f32x16(1.9875691500e-4), r, splat_f32x16(1.3981999507e-3))
    p = fma(p, r, splat_f32x16(8.3334519073e-3))
    p = fma(p, r, splat_f32x16(4.1665795894e-2))
    p = fma(p, r, splat_f32x16(1.6666665459e-1))
    p = fma(p, r, splat_f32x16(5.0000001201e-1))
    p = add(fma(p, mul(r, r), r), splat_f32x16(1.0))
    exponent = shift_left(add(float_to_int(n), splat_i32x16(127)), splat_i32x16(23))
    return select_less(x, splat_f32x16(_LOWEST), zero_f32x16(), mul(p, as_f32x16(exponent)))


@njit(**INLINE)
def sigmoid(x):
    """1 / (1 + e^-x)."""
    one = splat_f32x16(1.0)
    return divide(one, add(one, exp(sub(zero_f32x16(), x))))


@njit(**INLINE)
def silu(x):
    """x * sigmoid(x)."""
    return divide(x, add(splat_f32x16(1.0), exp(sub(zero_f32x16(), x))))
