"""What is learned of a model over all runs: how often each expert is used.

At the start it tells which experts to read first; the uses of this run are added to the file every
few minutes and at the end. Only single tokens count, a prompt uses nearly all experts of a layer.
"""

from __future__ import annotations

import time

import numpy as np

from ..format.gguf import GGUF
from .pager import ExpertPager
from .usage import Usage, save_usage

_SAVE_SECONDS = 300.0
_SAMPLE = 16  # experts that tell whether the page cache is cold


class Learning:
    """The usage counts of an open model, in memory and on file."""

    def __init__(self, gguf: GGUF, pager: ExpertPager) -> None:
        self._gguf, self._pager = gguf, pager
        self._top_k = gguf.int(".expert_used_count", minimum=1)
        self._saved = pager.policy.heat()
        self._saved_at = time.monotonic()

    def warm(self, usage: Usage) -> None:
        """Have the most used experts read in idle moments, unless they are in memory anyway."""
        numbers, source = self._pager.numbers, self._pager.source
        index = {layer: place for place, layer in enumerate(numbers.layers)}
        hottest = [index[layer] * numbers.count + expert for layer, expert in usage.hottest()]
        fit = int(source.sizes.sum()) <= self._pager.policy.budget
        sample = hottest[:: max(1, len(hottest) // _SAMPLE)]
        if fit and not source.is_buffer and all(source.resident(n) > 0.5 for n in sample):
            return
        self._pager.warm(hottest)

    def save_now_and_then(self) -> None:
        """Save if it is time to."""
        if time.monotonic() - self._saved_at > _SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Add the uses since the last time to the file; where that fails they are lost."""
        heat = self._pager.policy.heat()
        fresh = heat - self._saved
        counts = np.zeros((max(self._pager.numbers.layers) + 1, fresh.shape[1]), np.int64)
        counts[list(self._pager.numbers.layers)] = fresh
        save_usage(self._gguf, counts, int(fresh[0].sum()) // self._top_k)
        self._saved, self._saved_at = heat, time.monotonic()
