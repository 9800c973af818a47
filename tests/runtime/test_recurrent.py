"""Convolutions and the gated delta rule against float64, and in steps of any size."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_mmap.runtime.kernels import elementwise, recurrent
from colibri_mmap.runtime.ops import float_bits

T = 13
CUTS = [[13], [1] * 13, [5, 8], [2, 1, 10]]


def rows(count: int, width: int, seed: int) -> np.ndarray:
    """float32 [count, width] inside wider rows of NaN, which must neither matter nor change."""
    memory = np.full((count, width + 16), np.nan, np.float32)
    memory[:, :width] = np.random.default_rng(seed).standard_normal((count, width))
    return memory[:, :width]


def at(values: np.ndarray) -> tuple[int, int]:
    return values.ctypes.data, values.strides[0]


def assert_surroundings_kept(values: np.ndarray) -> None:
    assert np.isnan(values.base[:, values.shape[1] :]).all()


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def steps(cut: list[int]) -> list[slice]:
    ends = np.cumsum(cut).tolist()
    return [slice(end - size, end) for end, size in zip(ends, cut, strict=True)]


# ------------------------------------------------------------------------------ convolutions
def convolved(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    taps = len(weight)
    padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x.astype(float)])
    return sum(weight[tap] * padded[tap : tap + len(x)] for tap in range(taps))


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("gated", [False, True])
def test_convolution(run, taps: int, gated: bool) -> None:
    channels = 48
    x, a, b = (rows(T, channels, seed) for seed in (1, 2, 3))
    weight = np.random.default_rng(4).standard_normal((taps, channels)).astype(np.float32)
    exact = convolved(a.astype(float) * x if gated else x, weight)
    exact = b * exact if gated else exact * sigmoid(exact)
    outcomes = []
    for cut in CUTS:
        out, states = rows(T, channels, 5), np.zeros((2, taps - 1, channels), np.float32)
        for number, part in enumerate(steps(cut)):
            source, target = states[number % 2], states[1 - number % 2]
            words = (*at(x[part]), *at(out[part]), weight.ctypes.data, taps, channels)
            words += (part.stop - part.start, source.ctypes.data, target.ctypes.data)
            gates = (*at(a[part]), *at(b[part])) if gated else ()
            task = recurrent.convolution_gated if gated else recurrent.convolution_silu
            run(task, channels // recurrent.LANES, *words, *gates)
        assert np.abs(out - exact).max() <= 2e-6 * np.abs(exact).max()
        assert_surroundings_kept(out)
        outcomes.append(out)
    assert all(np.array_equal(out, outcomes[0]) for out in outcomes)


# ------------------------------------------------------------------------------ inputs of the rule
@pytest.mark.parametrize(("heads", "size"), [(1, 16), (3, 48), (2, 128)])
def test_l2_norm(run, heads: int, size: int) -> None:
    x = rows(T, heads * size, 1)
    x[0] *= 1e-4
    wide = x.astype(float).reshape(T, heads, size)
    exact = 0.25 * wide / np.sqrt((wide**2).sum(axis=2, keepdims=True) + 1e-6)
    run(recurrent.l2_norm, T, *at(x), heads, size, float_bits(1e-6), float_bits(0.25))
    assert np.abs(x - exact.reshape(T, -1)).max() <= 2e-7
    assert_surroundings_kept(x)


@pytest.mark.parametrize(("n", "per", "period"), [(8, 1, 1), (2, 1, 4), (16, 16, 3)])
def test_decays(run, n: int, per: int, period: int) -> None:
    x, out = rows(T * period, n, 1), rows(T * period, n, 2)
    x *= np.linspace(0, 60, T * period, dtype=np.float32)[:, None]
    random = np.random.default_rng(3)
    bias = random.standard_normal(n * period).astype(np.float32)
    rate = -random.uniform(1e-3, 16, n * period // per).astype(np.float32)
    z = (x + np.tile(bias.reshape(period, n), (T, 1))).astype(float)
    rates = np.tile(np.repeat(rate, per).reshape(period, n), (T, 1))
    exact = np.exp(rates * np.logaddexp(0, z))
    words = (*at(x), *at(out), bias.ctypes.data, rate.ctypes.data, n, per, period)
    run(recurrent.decays, T * period, *words)
    assert np.allclose(out, exact, rtol=1e-5, atol=1e-6)
    assert_surroundings_kept(out)


def test_sigmoids(run) -> None:
    x, out = rows(T, 5, 1), rows(T, 5, 2)
    x *= 50
    run(recurrent.sigmoids, T, *at(x), *at(out), 5)
    assert np.allclose(out, sigmoid(x.astype(float)), rtol=1e-5, atol=1e-30)
    assert_surroundings_kept(out)


@pytest.mark.parametrize("width", [1, 15, 16, 17, 100])
def test_sigmoid_mul(run, width: int) -> None:
    gate, up = rows(T, width, 1), rows(T, width, 2)
    gate *= 10
    exact = sigmoid(gate.astype(float)) * up
    run(elementwise.sigmoid_mul, T, *at(gate), *at(up), *at(up), width)
    assert np.abs(up - exact).max() <= 1e-6 * np.abs(exact).max()
    assert_surroundings_kept(up)


# ------------------------------------------------------------------------------ the delta rule
def delta_rule(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, decay: np.ndarray, beta: np.ndarray
) -> np.ndarray:
    """[T, heads, d_v]; q, k [T, heads, d_k], decay [T, heads, 1 or d_k], beta [T, heads]."""
    state = np.zeros((q.shape[1], q.shape[2], v.shape[2]))
    out = []
    for t in range(len(q)):
        state *= decay[t, :, :, None]
        change = beta[t, :, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * change[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    return np.stack(out)


@pytest.mark.parametrize("decay_rows", [False, True])
@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("dk", "dv"), [(16, 16), (32, 64), (128, 48)])
def test_delta_rule(run, dk: int, dv: int, tiled: bool, decay_rows: bool) -> None:
    key_heads, heads = 2, 6
    q, k = rows(T, key_heads * dk, 1), rows(T, key_heads * dk, 2)
    q, k = q / np.float32(dk**0.5), k / np.float32(dk**0.5)
    v = rows(T, heads * dv, 3)
    random = np.random.default_rng(4)
    decay = random.uniform(0.2, 1, (T, heads, dk if decay_rows else 1)).astype(np.float32)
    beta = random.uniform(0, 1, (T, heads)).astype(np.float32)
    of = np.arange(heads) % key_heads if tiled else np.arange(heads) // (heads // key_heads)
    by_head = [x.astype(float).reshape(T, key_heads, dk)[:, of] for x in (q, k)]
    wide = v.astype(float).reshape(T, heads, dv)
    exact = delta_rule(*by_head, wide, decay.astype(float), beta).reshape(T, -1)
    sharing = (1, key_heads) if tiled else (heads // key_heads, key_heads)
    outcomes = []
    for cut in CUTS:
        out, states = rows(T, heads * dv, 5), np.zeros((2, heads * dk * dv), np.float32)
        for number, part in enumerate(steps(cut)):
            words = [word for x in (q, k, v, out) for word in at(x[part])]
            words += [decay[part].ctypes.data, decay.strides[0], *at(beta[part])]
            words += [states[number % 2].ctypes.data, states[1 - number % 2].ctypes.data]
            words += [dk, dv, part.stop - part.start, *sharing, 4 if decay_rows else 0]
            run(recurrent.delta_rule, heads * dv // recurrent.LANES, *words)
        assert np.abs(out - exact).max() <= 2e-6 * np.abs(exact).max()
        assert_surroundings_kept(out)
        outcomes.append(out)
    assert all(np.array_equal(out, outcomes[0]) for out in outcomes)
