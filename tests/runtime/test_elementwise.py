"""Norms, rotary embedding and gating against float64, at every width."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_mmap.runtime.kernels import elementwise
from colibri_mmap.runtime.kernels.exponential import exp
from colibri_mmap.runtime.ops import float_bits
from colibri_mmap.runtime.simd import load_f32x16, load_i64, store
from colibri_mmap.runtime.task import Task

ROWS = 5
WIDTHS = [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 48, 63, 100, 257, 2048]
each_width = pytest.mark.parametrize("width", WIDTHS)


def rows(width: int, seed: int = 1, count: int = ROWS) -> np.ndarray:
    """float32 [count, width] inside wider rows of NaN, which must neither matter nor change."""
    memory = np.full((count, width + 21), np.nan, np.float32)
    memory[:, :width] = np.random.default_rng(seed).standard_normal((count, width))
    return memory[:, :width]


def at(values: np.ndarray) -> tuple[int, int]:
    return values.ctypes.data, values.strides[0]


def assert_surroundings_kept(values: np.ndarray) -> None:
    assert np.isnan(values.base[:, values.shape[1] :]).all()


def ulps(got: np.ndarray, exact: np.ndarray) -> float:
    """The largest error in units in the last place of the float32 nearest to the exact value."""
    spacing = np.spacing(np.abs(exact).astype(np.float32)).astype(float)
    return float(np.max(np.abs(got - exact) / spacing))


# ------------------------------------------------------------------------------ exp and silu
@Task
def exp_of_sixteens(args: int, lo: int, hi: int, scratch: int) -> None:
    source, target = load_i64(args), load_i64(args + 8)
    for i in range(lo, hi):
        store(target + 64 * i, exp(load_f32x16(source + 64 * i)))


def exponentials(run, x: np.ndarray) -> np.ndarray:
    out = np.empty_like(x)
    run(exp_of_sixteens, len(x) // 16, x.ctypes.data, out.ctypes.data, chunk=1024)
    return out


def test_exp_within_2_ulp(run) -> None:
    even = np.linspace(-87.0, 88.0, 1 << 20, dtype=np.float32)
    near = np.geomspace(1e-30, 1.0, 1 << 16, dtype=np.float32)
    x = np.concatenate([even, near, -near])
    assert ulps(exponentials(run, x), np.exp(x.astype(float))) <= 2


def test_exp_at_the_ends(run) -> None:
    x = np.full(16, 0.0, np.float32)
    x[:8] = [-np.inf, -1e38, -1000.0, -87.5, 88.5, 1000.0, 1e38, np.inf]
    out = exponentials(run, x)
    assert (out[:4] == 0).all()
    assert np.allclose(out[4:8], np.exp(88.0), rtol=1e-6)
    assert (out[8:] == 1).all()


@each_width
def test_silu_mul(run, width: int) -> None:
    gate, up, out = rows(width, 1), rows(width, 2), rows(width, 3)
    gate *= 8
    wide, factor = gate.astype(float), up.astype(float)
    exact = wide / (1 + np.exp(-wide)) * factor
    run(elementwise.silu_mul, ROWS, *at(gate), *at(up), *at(out), width)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()
    assert_surroundings_kept(out)
    run(elementwise.silu_mul, ROWS, *at(gate), *at(up), *at(gate), width)
    assert np.array_equal(gate, out)


def test_silu_of_large_values(run) -> None:
    gate, up, out = rows(16), rows(16), rows(16)
    gate[:] = np.linspace(-1e4, 1e4, gate.size).reshape(gate.shape)
    up[:] = 1.0
    run(elementwise.silu_mul, ROWS, *at(gate), *at(up), *at(out), 16)
    assert np.array_equal(out[gate > 88], gate[gate > 88])
    assert np.abs(out[gate < -88]).max() < 1e-30


@each_width
def test_clamped_swiglu(run, width: int) -> None:
    gate, up, out = rows(width, 1), rows(width, 2), rows(width, 3)
    gate *= 8
    up *= 8
    g, u = np.minimum(gate.astype(float), 7), np.clip(up.astype(float), -7, 7)
    exact = (u + 1) * g / (1 + np.exp(-1.702 * g))
    run(elementwise.clamped_swiglu, ROWS, *at(gate), *at(up), *at(out), width)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()
    assert_surroundings_kept(out)


# ------------------------------------------------------------------------------ norms and sums
@each_width
def test_rms_norm(run, width: int) -> None:
    x, out, weight, eps = rows(width), rows(width, 2), rows(width, 3, 1)[0].copy(), 1e-5
    x *= np.array([[1e-4], [1e-2], [1.0], [1e2], [1e4]], np.float32)
    wide = x.astype(float)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + eps) * weight
    words = (*at(x), *at(out), weight.ctypes.data, width, float_bits(eps))
    run(elementwise.rms_norm, ROWS, *words)
    assert np.abs(out - exact).max() <= 5e-7 * np.abs(exact).max()
    assert_surroundings_kept(out)
    run(elementwise.rms_norm, ROWS, *at(x), *at(x), *words[4:])
    assert np.array_equal(x, out)


@each_width
def test_add_rows(run, width: int) -> None:
    x, y, out = rows(width), rows(width, 2), rows(width, 3)
    run(elementwise.add_rows, ROWS, *at(x), *at(y), *at(out), width)
    assert np.array_equal(out, x + y)
    assert_surroundings_kept(out)
    expected = x + y[:1]
    run(elementwise.add_rows, ROWS, *at(x), y.ctypes.data, 0, *at(x), width)
    assert np.array_equal(x, expected)


@each_width
def test_scale_rows(run, width: int) -> None:
    x, out = rows(width), rows(width, 2)
    factors = np.linspace(-2, 3, ROWS, dtype=np.float32)
    run(elementwise.scale_rows, ROWS, *at(x), *at(out), factors.ctypes.data, 4, width)
    assert np.array_equal(out, x * factors[:, None])
    assert_surroundings_kept(out)
    run(elementwise.scale_rows, ROWS, *at(x), *at(out), factors.ctypes.data, 0, width)
    assert np.array_equal(out, x * factors[0])


@each_width
def test_clamp_rows(run, width: int) -> None:
    x = rows(width)
    expected = np.clip(x, -0.5, 0.5)
    run(elementwise.clamp_rows, ROWS, *at(x), width, float_bits(0.5))
    assert np.array_equal(x, expected)
    assert_surroundings_kept(x)


@each_width
def test_add_gated(run, width: int) -> None:
    x, y, gate = rows(width, 1), rows(width, 2), rows(1, 3)
    gate *= 5
    exact = x + y.astype(float) / (1 + np.exp(-gate.astype(float)))
    run(elementwise.add_gated, ROWS, *at(x), *at(y), *at(gate), width)
    assert np.abs(x - exact).max() <= 1e-6 * np.abs(exact).max()
    assert_surroundings_kept(x)


@each_width
@pytest.mark.parametrize("k", [1, 2, 8])
def test_combine_experts(run, width: int, k: int) -> None:
    random = np.random.default_rng(k)
    x, out, y = rows(width), rows(width, 2), rows(width, 3, ROWS * k)
    slots = random.permutation(ROWS * k).astype(np.int64).reshape(ROWS, k)
    weights = random.random((ROWS, k), np.float32)
    exact = x + (weights[:, :, None].astype(float) * y[slots]).sum(axis=1)
    words = (*at(y), slots.ctypes.data, weights.ctypes.data, k, width)
    run(elementwise.combine_experts, ROWS, *at(x), *at(out), *words)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()
    assert_surroundings_kept(out)
    run(elementwise.combine_experts, ROWS, *at(x), *at(x), *words)
    assert np.array_equal(x, out)


@each_width
def test_combine_leaves_out_what_is_computed_elsewhere(run, width: int) -> None:
    x, out, y = rows(width), rows(width, 2), rows(width, 3, ROWS * 2)
    y[:ROWS] = np.nan
    slots = np.stack([np.full(ROWS, -1), np.arange(ROWS, 2 * ROWS)], axis=1)
    weights = np.random.default_rng(1).random((ROWS, 2), np.float32)
    exact = x + weights[:, 1:].astype(float) * y[ROWS:]
    words = (*at(y), slots.ctypes.data, weights.ctypes.data, 2, width)
    run(elementwise.combine_experts, ROWS, *at(x), *at(out), *words)
    assert np.abs(out - exact).max() <= 1e-6 * np.abs(exact).max()


# ------------------------------------------------------------------------------ rope
@pytest.mark.parametrize("half_split", [True, False])
@pytest.mark.parametrize(
    ("size", "rotated"), [(16, 16), (64, 64), (64, 32), (80, 20), (128, 2), (24, 24), (7, 6)]
)
def test_rope(run, half_split: bool, size: int, rotated: int) -> None:
    heads, pairs = 3, rotated // 2
    x = rows(heads * size)
    before = x.astype(float).reshape(ROWS, heads, size)
    angles = np.random.default_rng(2).uniform(0, 7, (ROWS, pairs))
    cosines, sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    tables = (cosines.ctypes.data, sines.ctypes.data, cosines.strides[0], pairs)
    run(elementwise.rope, ROWS, *at(x), heads, size, *tables, int(half_split))
    if half_split:
        first, second = slice(0, pairs), slice(pairs, rotated)
    else:
        first, second = slice(0, rotated, 2), slice(1, rotated, 2)
    c, s = cosines[:, None].astype(float), sines[:, None].astype(float)
    exact = before.copy()
    exact[..., first] = before[..., first] * c - before[..., second] * s
    exact[..., second] = before[..., first] * s + before[..., second] * c
    got = x.reshape(ROWS, heads, size)
    assert np.abs(got - exact).max() <= 1e-6
    assert np.array_equal(got[..., rotated:], before[..., rotated:])
    assert_surroundings_kept(x)
