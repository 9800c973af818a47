"""Guessing the experts of the next layer: its router, applied to this layer's input.

The residual stream changes little from layer to layer, so that the next router sees nearly what it
will be asked. A guess only moves reads to moments when the disk would idle; whether that pays
depends on the disk and the model, and is measured by `tune`.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from .arena import Rows
from .ops import Ops
from .weights import Matrix


class RouterPredictor:
    """The `count` likeliest experts of the layer after a given one; `routers` in layer order."""

    def __init__(self, ops: Ops, routers: dict[int, Matrix], count: int) -> None:
        self._ops, self._count = ops, count
        self._next = {layer: routers[after] for layer, after in pairwise(list(routers))}

    def guess(self, h: Rows, layer: int) -> list[int]:
        """Experts of the next layer, by this one's normed input h [1, D]; the likeliest first."""
        router = self._next.get(layer)
        if router is None:
            return []
        with self._ops.temporaries():
            logits = self._ops.numpy(self._ops.linear(h, router))[0]
        top = np.argpartition(-logits, self._count - 1)[: self._count]
        return [int(expert) for expert in top[np.argsort(-logits[top])]]
