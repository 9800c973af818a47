"""The choice of experts against a float64 oracle: gatings, selection bias, groups, ties."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from colibri_mmap.runtime.kernels.routing import (
    GROUP_BY_MAXIMUM,
    GROUP_BY_TWO_BEST,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
    route_sparsemixer,
    route_top_k,
)
from colibri_mmap.runtime.ops import float_bits

ROWS = 7


@dataclass(frozen=True)
class Case:
    experts: int
    k: int
    gating: int = SOFTMAX
    biased: bool = False
    groups: int = 1
    groups_used: int = 1
    rule: int = GROUP_BY_TWO_BEST
    normalise: bool = True
    scale: float = 1.0


CASES = [
    *[Case(e, k) for e, k in [(1, 1), (2, 1), (8, 8), (60, 4), (64, 64), (128, 8), (257, 6)]],
    Case(128, 8, normalise=False),
    Case(64, 6, SIGMOID),
    Case(64, 6, SIGMOID, biased=True, scale=2.5),
    Case(64, 6, SQRT_SOFTPLUS, biased=True, normalise=False),
    Case(16, 4, SIGMOID, biased=True, groups=4, groups_used=2),
    Case(256, 8, SIGMOID, biased=True, groups=8, groups_used=4, scale=2.5),
    Case(160, 6, groups=8, groups_used=3, rule=GROUP_BY_MAXIMUM, normalise=False, scale=16.0),
    Case(6, 2, groups=6, groups_used=2),
]


def route(run, case: Case, logits: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    ids = np.full((len(logits), case.k), -1, np.int64)
    weights = np.full((len(logits), case.k), np.nan, np.float32)
    where = (logits.ctypes.data, logits.strides[0], case.experts, case.k)
    groups = (case.groups, case.groups_used, case.rule)
    bias_at = bias.ctypes.data if case.biased else 0
    more = (case.gating, bias_at, *groups, int(case.normalise), float_bits(case.scale))
    run(route_top_k, len(logits), *where, ids.ctypes.data, weights.ctypes.data, *more)
    return ids, weights


def oracle(case: Case, logits: np.ndarray, bias: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = logits.astype(float)
    if case.gating == SOFTMAX:
        scores = np.exp(x - x.max(1, keepdims=True))
        scores /= scores.sum(1, keepdims=True)
    elif case.gating == SIGMOID:
        scores = 1 / (1 + np.exp(-x))
    else:
        scores = np.sqrt(np.log1p(np.exp(x)))
    choice = scores + bias if case.biased else scores.copy()
    if case.groups > 1:
        grouped = np.sort(choice.reshape(len(x), case.groups, -1))
        best = grouped[..., -2:] if case.rule == GROUP_BY_TWO_BEST else grouped[..., -1:]
        ranked = np.argsort(-best.sum(2), axis=1, kind="stable")[:, : case.groups_used]
        eligible = np.zeros((len(x), case.groups), bool)
        np.put_along_axis(eligible, ranked, True, 1)
        choice[~np.repeat(eligible, case.experts // case.groups, 1)] = -np.inf
    ids = np.argsort(-choice, axis=1, kind="stable")[:, : case.k]
    weights = np.take_along_axis(scores, ids, 1)
    if case.normalise:
        weights /= weights.sum(1, keepdims=True)
    return ids, weights * case.scale


@pytest.mark.parametrize("case", CASES, ids=str)
def test_route_top_k(run, case: Case) -> None:
    random = np.random.default_rng(case.experts)
    logits = (3 * random.standard_normal((ROWS, case.experts))).astype(np.float32)
    bias = random.standard_normal(case.experts).astype(np.float32)
    ids, weights = route(run, case, logits, bias)
    expected_ids, expected = oracle(case, logits, bias)
    assert np.array_equal(ids, expected_ids)
    assert np.abs(weights - expected).max() <= 2e-6 * expected.max()


def test_ties_go_to_the_lower_expert(run) -> None:
    logits = np.zeros((5, 9), np.float32)
    logits[1, 3:] = 1
    logits[2] = [0, 1, 0, 1, 0, 1, 0, 1, 0]
    logits[3] = -np.arange(9)
    logits[4] = np.arange(9)
    ids, weights = route(run, Case(9, 5), logits, logits)
    expected = [[0, 1, 2, 3, 4], [3, 4, 5, 6, 7], [1, 3, 5, 7, 0], [0, 1, 2, 3, 4], [8, 7, 6, 5, 4]]
    assert ids.tolist() == expected
    assert (weights[0] == weights[0, 0]).all()


def test_shares_that_underflow_are_chosen_last_and_once(run) -> None:
    logits = np.array([[-500, 500, -400, 0, -np.inf, 499]], np.float32)
    ids, weights = route(run, Case(6, 6), logits, logits)
    assert ids[0, :2].tolist() == [1, 5]
    assert sorted(ids[0].tolist()) == [0, 1, 2, 3, 4, 5]
    assert np.abs(weights.sum() - 1) <= 1e-6
    assert (weights[0, 2:] == 0).all()


@pytest.mark.parametrize("gating", [SIGMOID, SQRT_SOFTPLUS])
def test_large_logits_stay_finite(run, gating: int) -> None:
    logits = np.array([[-500, 500, -90, 0, 90, 499]], np.float32)
    _, weights = route(run, Case(6, 6, gating, normalise=False), logits, logits)
    assert np.isfinite(weights).all()


def test_sparsemixer(run) -> None:
    """The weight of a chosen expert is its share among those within 2 % of it, itself included."""
    near = np.array([1.0, 2.0, -3.0, 1.98, 1.95, 0.0, 1.961, -2.0], np.float32)
    logits = np.stack([near, -near, np.zeros(8, np.float32), 10 * near])
    ids, weights = np.empty((4, 2), np.int64), np.empty((4, 2), np.float32)
    where = (logits.ctypes.data, logits.strides[0], 8, 2, ids.ctypes.data, weights.ctypes.data)
    run(route_sparsemixer, 4, *where)
    assert ids.tolist() == [[1, 3], [2, 7], [0, 1], [1, 3]]
    exp = np.exp(logits.astype(float))
    expected = [
        [exp[0, 1] / exp[0, [1, 3, 6]].sum(), exp[0, 3] / exp[0, [3, 4, 6]].sum()],
        [1.0, 1.0],
        [1 / 8, 1 / 7],
        [exp[3, 1] / exp[3, [1, 3, 6]].sum(), exp[3, 3] / exp[3, [3, 4, 6]].sum()],
    ]
    assert np.abs(weights - expected).max() <= 1e-6
