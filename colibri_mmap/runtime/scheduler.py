"""One step: new tokens of one or several sequences through the model."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .kv import Batch, KVCache, SequenceSlice, Trace
from .models import Model
from .ops import Ops


@dataclass(slots=True)
class Sequence:
    """Tokens that the cache knows, in order; `announced`: how many there will be, at least."""

    cache: KVCache
    ids: list[int] = field(default_factory=list)
    announced: int = 0

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens; all where the cache cannot (KVCache.kept)."""
        assert length <= len(self.ids)
        del self.ids[self.cache.kept(length) :]

    def announce(self, length: int, limit: int) -> list[int]:
        """Say how many tokens there will be; the ids that have to be computed anew for that.

        `limit` is the model's: what was computed for a sequence of up to `limit` tokens is of no
        use to a longer one, and the other way round. 0 if there is none.
        """
        before, self.announced = self.announced, length
        if not limit or (before > limit) == (length > limit):
            return []
        lost = self.ids.copy()
        self.rewind(0)
        return lost


def step(
    model: Model,
    ops: Ops,
    work: Items[tuple[Sequence, Items[int]]],
    wanted: Literal["none", "last", "all"],
    trace: Trace | None = None,
) -> NDArray[np.float32]:
    """Append new tokens to each sequence; logits float32 [rows, V] of the wanted ones among them.

    The tokens count as part of a sequence only when the step is done. If each sequence gets one,
    the logits are those of steps of its own, bit by bit.
    """
    slices: list[SequenceSlice] = []
    start = 0
    for sequence, new in work:
        assert new
        known, end = len(sequence.ids), len(sequence.ids) + len(new)
        sequence.cache.begin(known, end)
        length = max(end, sequence.announced)
        slices.append(SequenceSlice(sequence.cache, start, start + len(new), known, length))
        start += len(new)
    tokens = np.concatenate([np.asarray(new, np.int64) for _, new in work])
    positions = np.concatenate(
        [np.arange(s.position, s.position + s.stop - s.start) for s in slices]
    )
    rows = {
        "none": np.empty(0, np.int64),
        "last": np.array([s.stop - 1 for s in slices], np.int64),
        "all": np.arange(start),
    }[wanted]
    ops.alone = start == len(slices)
    with ops.temporaries():
        out = model.forward(Batch(tokens, positions, slices, rows, trace))
        logits = ops.numpy(out)
    for sequence, new in work:
        sequence.cache.end(len(sequence.ids) + len(new))
        sequence.ids.extend(new)
    return logits
