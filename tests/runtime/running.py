"""Steps of any shape through an engine's model: batches of one's own making."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import numpy as np

from colibri_mmap import Engine, Sampling
from colibri_mmap.runtime import scheduler
from colibri_mmap.runtime.kv import KVCache, KVShape, Trace
from colibri_mmap.runtime.ops import Mode

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class Running(AbstractContextManager["Running"]):
    """The only place in the tests that reaches into an engine."""

    def __init__(self, path: Path, mode: Mode = "exact") -> None:
        self._engine = Engine.open(path, mode=mode, threads=2)
        self._model, self._ops = self._engine._model, self._engine._ops

    def __exit__(self, *error: object) -> None:
        self._engine.close()

    def sequence(self, context: int = 64, *, keep_all: bool = False) -> scheduler.Sequence:
        """An empty sequence; with `keep_all`, layers with a window keep every position too."""
        shapes = [
            replace(shape, window=0) if keep_all and isinstance(shape, KVShape) else shape
            for shape in self._model.kv_shapes
        ]
        return scheduler.Sequence(KVCache(shapes, context, self._engine.kv_type))

    def step(
        self, *work: tuple[scheduler.Sequence, Sequence[int]], trace: Trace | None = None
    ) -> np.ndarray:
        """Logits [T, V] of all new tokens of each sequence in `work`."""
        return scheduler.step(self._model, self._ops, work, "all", trace)

    def in_chunks(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Logits [T, V] of ids that go through the model `size` at a time."""
        sequence = self.sequence()
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        return np.concatenate([self.step((sequence, part)) for part in parts])
