"""Steps of any shape through an engine's model: batches of one's own making."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from colibri_mmap import Engine, Sampling
from colibri_mmap.runtime import scheduler
from colibri_mmap.runtime.device import DeviceBackend
from colibri_mmap.runtime.engine import KVType
from colibri_mmap.runtime.kv import KVCache, KVShape, Trace
from colibri_mmap.runtime.ops import Mode
from colibri_mmap.runtime.placement import (
    PlacedTrunk,
    Supported,
    place_trunk,
    supported_layers,
)
from colibri_mmap.runtime.vramsettings import VramSettings

GREEDY = Sampling(temperature=0.0, ignore_eos=True)


class Running(AbstractContextManager["Running"]):
    """The only place in the tests that reaches into an engine."""

    def __init__(self, path: Path, mode: Mode = "exact", kv_type: KVType | None = None) -> None:
        # A device is the test's to place blocks on: two at work on one step would not wait for
        # each other.
        off = VramSettings("off")
        self._engine = Engine.open(path, mode=mode, threads=2, kv_type=kv_type, gpu=off)
        self._model, self._ops = self._engine._model, self._engine._ops

    def __exit__(self, *error: object) -> None:
        if self._model.placed is not None:
            self._model.placed.close()
        self._engine.close()

    def supported_layers(self) -> Supported:
        """How many of the last blocks a device could run."""
        return supported_layers(self._model)

    def place(self, device: DeviceBackend, layers: int | None = None) -> PlacedTrunk:
        """Run the last `layers` blocks on a device from now on; all of them with the head."""
        everything = len(self._model.blk)
        layers = everything if layers is None else layers
        return place_trunk(self._model, device, layers, head=layers == everything)

    def sequence(self, context: int = 64, *, keep_all: bool = False) -> scheduler.Sequence:
        """An empty sequence; with `keep_all`, layers with a window keep every position too."""
        shapes = [
            replace(shape, window=0) if keep_all and isinstance(shape, KVShape) else shape
            for shape in self._model.kv_shapes
        ]
        return scheduler.Sequence(KVCache(shapes, context, self._engine.kv_type))

    def step(
        self,
        *work: tuple[scheduler.Sequence, Sequence[int]],
        trace: Trace | None = None,
        wanted: Literal["none", "last", "all"] = "all",
    ) -> np.ndarray:
        """Logits [T, V] of all new tokens of each sequence in `work`, or of those wanted."""
        return scheduler.step(self._model, self._ops, work, wanted, trace)

    def in_chunks(
        self, ids: Sequence[int], size: int, sequence: scheduler.Sequence | None = None
    ) -> np.ndarray:
        """Logits [T, V] of ids that go through the model `size` at a time."""
        sequence = sequence or self.sequence()
        parts = [ids[start : start + size] for start in range(0, len(ids), size)]
        return np.concatenate([self.step((sequence, part)) for part in parts])
