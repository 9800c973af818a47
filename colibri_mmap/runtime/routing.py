"""The router: which experts a token takes, and the factors on their outputs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .kernels.routing import (
    GROUP_BY_TWO_BEST,
    SOFTMAX,
    SPARSEMIXER,
    route_sparsemixer,
    route_top_k,
)
from .ops import Ops, float_bits
from .pool import job
from .weights import Vector


@dataclass(frozen=True, slots=True)
class Routing:
    """Chosen experts int64 [T, k], best first, and the float32 [T, k] factors on their outputs."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    ids_address: int
    weights_address: int


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How a router chooses `used` of `count` experts, in the words of the GGUF keys.

    normalise: the weights of the chosen ones sum to 1, before `scale`. With `groups` > 1 only the
    `groups_used` best groups are eligible, ranked as `group_rule` says (kernels/routing.py).
    """

    count: int
    used: int
    gating: int = SOFTMAX
    normalise: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_rule: int = GROUP_BY_TWO_BEST


def route(ops: Ops, logits: Rows, shape: RouterShape, bias: Vector | None = None) -> Routing:
    """The experts of each token; `bias` [count] takes part in the choice only."""
    arena, count, k = ops.arena, logits.count, shape.used
    ids_address, weights = arena.take(8 * count * k), arena.rows(count, k)
    words = (logits.address, logits.stride, logits.width, k, ids_address, weights.address)
    groups = (shape.groups, shape.groups_used, shape.group_rule)
    more = (shape.gating, bias.address if bias else 0, *groups, int(shape.normalise))
    key = ("route", *words, *more) if count == 1 else None
    scale = float_bits(shape.scale)
    task = route_sparsemixer if shape.gating == SPARSEMIXER else route_top_k
    ops.run(key, lambda: [[job(task, count, 16, *words, *more, scale)]])
    ids = arena.integers(ids_address, count * k).reshape(count, k)
    return Routing(ids, arena.view(weights), ids_address, weights.address)
