"""The router's choice: scores of all experts -> the k chosen ones and their outputs' weights."""

from __future__ import annotations

import math

import numpy as np
from numba import njit

from ..simd import INLINE, load_4_words, load_f32, load_i64, store_f32, store_i64
from ..task import Task

SOFTMAX, SIGMOID, SQRT_SOFTPLUS = 1, 2, 4  # as the key expert_gating_func numbers them
SPARSEMIXER = -1  # a way of choosing that no key names
GROUP_BY_MAXIMUM, GROUP_BY_TWO_BEST = 0, 1  # what a group of experts is ranked by
_GONE = np.float32(-np.inf)
_NEAR = np.float32(0.02)  # relative distance to the best within which SparseMixer lets others count


@njit(**INLINE)
def _gate(row, experts, gating, scores):
    """scores[e] = softmax, sigmoid or sqrt(softplus) of the logits."""
    if gating == SOFTMAX:
        top = load_f32(row)
        for e in range(1, experts):
            top = max(top, load_f32(row + 4 * e))
        total = np.float32(0)
        for e in range(experts):
            share = np.float32(math.exp(load_f32(row + 4 * e) - top))
            store_f32(scores + 4 * e, share)
            total += share
        for e in range(experts):
            store_f32(scores + 4 * e, load_f32(scores + 4 * e) / total)
        return
    for e in range(experts):
        x = load_f32(row + 4 * e)
        if gating == SIGMOID:
            store_f32(scores + 4 * e, np.float32(1) / (np.float32(1) + math.exp(-x)))
        else:
            softplus = max(x, np.float32(0)) + math.log1p(math.exp(-abs(x)))
            store_f32(scores + 4 * e, math.sqrt(softplus))


@njit(**INLINE)
def _best(values, first, count):
    """The number of the largest of `count` values from `first` on; ties to the lower number."""
    best = first
    for i in range(first + 1, first + count):
        if load_f32(values + 4 * i) > load_f32(values + 4 * best):
            best = i
    return best


@njit(**INLINE)
def _drop_groups(choice, experts, groups, used, rule, ranks):
    """Only the experts of the `used` best groups stay in the choice."""
    size = experts // groups
    for g in range(groups):
        best = _best(choice, g * size, size)
        rank = load_f32(choice + 4 * best)
        if rule == GROUP_BY_TWO_BEST and size > 1:
            store_f32(choice + 4 * best, _GONE)
            second = load_f32(choice + 4 * _best(choice, g * size, size))
            store_f32(choice + 4 * best, rank)
            rank += second
        store_f32(ranks + 4 * g, rank)
    for _ in range(used):
        store_f32(ranks + 4 * _best(ranks, 0, groups), _GONE)
    for g in range(groups):
        if load_f32(ranks + 4 * g) != _GONE:  # not among the best
            for e in range(g * size, (g + 1) * size):
                store_f32(choice + 4 * e, _GONE)


@Task
def route_top_k(args: int, lo: int, hi: int, scratch: int) -> None:
    """The k experts with the largest scores, best first, ties to the lower number.

    Arguments: router logits, stride, experts, k, ids int64 [T, k], weights float32 [T, k], gating,
    selection bias float32 [experts] or 0, groups (0 or 1: none), groups used, group rule,
    normalise (1: the k weights are divided by their sum), scale of the weights (float32 bits). The
    bias takes part in the choice only.
    """
    logits, stride, experts, k = load_4_words(args)
    ids, weights, gating, bias = load_4_words(args + 32)
    groups, used, rule, normalise = load_4_words(args + 64)
    scale = load_f32(args + 96)
    scores, choice, ranks = scratch, scratch + 4 * experts, scratch + 8 * experts
    for token in range(lo, hi):
        _gate(logits + token * stride, experts, gating, scores)
        for e in range(experts):
            score = load_f32(scores + 4 * e)
            store_f32(choice + 4 * e, score + load_f32(bias + 4 * e) if bias else score)
        if groups > 1:
            _drop_groups(choice, experts, groups, used, rule, ranks)
        chosen, weight = ids + token * k * 8, weights + token * k * 4
        picked = np.float32(0)
        for j in range(k):
            best = _best(choice, 0, experts)
            store_i64(chosen + 8 * j, best)
            store_f32(choice + 4 * best, _GONE)
            picked += load_f32(scores + 4 * best)
            store_f32(weight + 4 * j, load_f32(scores + 4 * best))
        factor = scale / picked if normalise else scale
        for j in range(k):
            store_f32(weight + 4 * j, load_f32(weight + 4 * j) * factor)


@Task
def route_sparsemixer(args: int, lo: int, hi: int, scratch: int) -> None:
    """The k experts with the largest logits, best first, ties to the lower number.

    The weight of each is its share in a softmax over those that are left and near it (SparseMixer,
    Liu et al. 2023, as in Phi-3.5-MoE). Arguments as of `route_top_k`; from gating on unused.
    """
    logits, stride, experts, k = load_4_words(args)
    ids, weights = load_i64(args + 32), load_i64(args + 40)
    for token in range(lo, hi):
        row = logits + token * stride
        for e in range(experts):
            store_f32(scratch + 4 * e, load_f32(row + 4 * e))
        for j in range(k):
            best = _best(scratch, 0, experts)
            top = load_f32(scratch + 4 * best)
            total = np.float32(0)
            for e in range(experts):
                logit = load_f32(row + 4 * e)
                if not (top - logit) / max(abs(logit), top) > _NEAR:
                    total += np.float32(math.exp(load_f32(scratch + 4 * e) - top))
            store_i64(ids + (token * k + j) * 8, best)
            store_f32(weights + (token * k + j) * 4, np.float32(1) / total)
            store_f32(scratch + 4 * best, _GONE)
