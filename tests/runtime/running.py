"""A model on a pool of its own, without the engine: batches of one's own making."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np

from colibri_mmap import Sampling
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime import scheduler
from colibri_mmap.runtime.kv import KVCache
from colibri_mmap.runtime.models import load_model
from colibri_mmap.runtime.ops import Mode, Ops
from colibri_mmap.runtime.pool import Pool
from colibri_mmap.runtime.weights import Weights

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class Running(AbstractContextManager["Running"]):
    """Steps of any shape through a model; exact mode keeps keys and values in float32."""

    def __init__(self, path: Path, mode: Mode = "exact", threads: int = 2) -> None:
        self.weights = Weights(open_gguf(path))
        self.ops = Ops(Pool(threads), mode)
        self.model = load_model(self.weights, self.ops)
        self.kv_type = "f32" if mode == "exact" else "f16"

    def __exit__(self, *error: object) -> None:
        self.ops.pool.close()
        self.weights.close()

    def sequence(self, context: int = 64) -> scheduler.Sequence:
        return scheduler.Sequence(KVCache(self.model.kv_shapes, context, self.kv_type))

    def step(self, *work: tuple[scheduler.Sequence, Sequence[int]]) -> np.ndarray:
        """Logits [T, V] of all new tokens of each sequence in `work`."""
        return scheduler.step(self.model, self.ops, work, "all")

    def in_chunks(self, ids: Sequence[int], size: int) -> np.ndarray:
        """Logits [T, V] of ids that go through the model `size` at a time."""
        sequence = self.sequence()
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        return np.concatenate([self.step((sequence, part)) for part in parts])
