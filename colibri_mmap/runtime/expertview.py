"""What the experts of an open model do, for somebody who watches.

Nothing is recorded for it: uses are the differences of the counts that the policy keeps anyway, and
where an expert is the pager's book says. What the book cannot know, pages that were in memory
before or that the kernel took, is found by asking the kernel about a few experts at every look.
L layers, E experts per layer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pager import ExpertPager

DISK, RAM, VRAM = range(3)

_AUDIT_SECONDS = 0.004  # of a look, for asking the kernel
_MEMORY_TOKENS = 100  # in which a rate forgets


@dataclass(frozen=True, slots=True)
class ExpertLook:
    """The experts at one moment.

    tiers: uint8 [L, E], DISK, RAM or VRAM; rates: float64 [L, E], uses per token, lately; used:
    numbers (layer index * E + expert) of those used since the look before.
    """

    tiers: NDArray[np.uint8]
    rates: NDArray[np.float64]
    used: NDArray[np.int64]


class ExpertView:
    """Looks at the experts of one model; each watcher, or all of them together, has its own."""

    def __init__(
        self,
        pager: ExpertPager,
        used_per_token: int,
        in_vram: Callable[[], dict[int, NDArray[np.bool_]]],
    ) -> None:
        """`in_vram` tells which experts of a layer are in VRAM."""
        self.layers, self.count = pager.numbers.layers, pager.numbers.count
        self.used_per_token = used_per_token
        self.sizes = pager.source.sizes.reshape(len(self.layers), self.count)  # bytes
        self._pager, self._in_vram = pager, in_vram
        self._counts = pager.policy.heat()
        self._rates = pager.policy.rates()
        self._book = pager.present()  # what it said when the kernel was asked
        self._found = self._book.copy()  # what the kernel said
        self._next = 0

    def look(self) -> ExpertLook:
        """The experts now; takes a few milliseconds."""
        counts = self._pager.policy.heat()
        uses = counts - self._counts
        self._counts = counts
        self._age(uses)
        present = self._audit().reshape(uses.shape)
        tiers = np.where(present, np.uint8(RAM), np.uint8(DISK))
        for layer, resident in self._in_vram().items():
            tiers[self.layers.index(layer), : len(resident)][resident] = VRAM
        return ExpertLook(tiers, self._rates.copy(), np.flatnonzero(uses))

    @property
    def resident_bytes(self) -> int:
        """The bytes of the experts that the policy keeps in memory."""
        return self._pager.policy.resident_bytes

    @property
    def budget(self) -> int:
        """The bytes that it may keep."""
        return self._pager.policy.budget

    def _age(self, uses: NDArray[np.int64]) -> None:
        """Bring the rates up to date with more uses [L, E]."""
        tokens = uses.sum(axis=1) / self.used_per_token
        kept = (1 - 1 / _MEMORY_TOKENS) ** tokens
        share = np.divide(1 - kept, tokens, out=np.zeros_like(kept), where=tokens > 0)
        self._rates = self._rates * kept[:, None] + uses * share[:, None]

    def _audit(self) -> NDArray[np.bool_]:
        """Which experts are in memory [L * E]; the kernel is asked about some more of them."""
        book, source = self._pager.present(), self._pager.source
        changed = book != self._book
        self._found[changed] = book[changed]
        self._book = book
        if not source.is_buffer:
            end = time.perf_counter() + _AUDIT_SECONDS
            for _ in range(len(book)):
                if time.perf_counter() >= end:
                    break
                self._found[self._next] = source.resident(self._next) > 0.5
                self._next = (self._next + 1) % len(book)
        return self._found.copy()
