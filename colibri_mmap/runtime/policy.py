"""Which experts to keep in memory: a mix of recency and frequency within a budget of bytes.

Pure bookkeeping: it moves no bytes and knows no clock but the layers' turns. Each expert has two
running means of its uses per token, a short and a long one; its score is (1 - lfu_weight) * short
+ lfu_weight * long. The experts of a layer age when that layer has its turn, not between tokens:
those whose chance has just passed rank below those whose chance is still to come. bench/LOG.md has
the figures behind this and the constants.

L layers, E experts per layer, n experts of a call. Layers without experts have size 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

Key: TypeAlias = tuple[int, int]
"""(layer, expert)."""

Kind: TypeAlias = Literal["demand", "prefetch", "one_shot"]

SHORT_DECAY, LONG_DECAY = 0.5, 0.99  # of the means, per turn of the layer
PROTECTED_TURNS = 2  # turns of its layer that a prefetched expert may wait for its first use

_ABSENT, _ONE_SHOT, _KEPT, _PREFETCHED = range(4)
_CLASSES: dict[Kind, int] = {"demand": _KEPT, "prefetch": _PREFETCHED, "one_shot": _ONE_SHOT}
_RANK_OF_CLASS = np.array([np.inf, -2.0, 0.0, 2.0])  # added to a score, which is 0 to 1
_TIE = 1e-9  # per layer: of equal ranks, the one whose layer's next turn is farther leaves first


class ExpertPolicy:
    """The resident experts and the order in which they leave.

    One-shot experts leave first, then the rest by score, and last the prefetched ones that still
    wait for their first use; pinned ones never leave.
    """

    def __init__(
        self,
        sizes: ArrayLike,
        budget: int,
        lfu_weight: float = 0.3,
        pinned: Iterable[Key] = (),
        rates: ArrayLike | None = None,
    ) -> None:
        """`sizes`: bytes [L, E]. `budget`: bytes, may be changed at any time. `lfu_weight`: from 0,
        recency alone, to 1, frequency alone. `rates`: the uses per token to expect, 0 to 1 [L, E].
        """
        assert 0 <= lfu_weight <= 1
        self._sizes = np.array(sizes, np.int64)
        shape = self._layers, _ = self._sizes.shape
        self.budget = budget
        self.resident_bytes = 0
        self._lfu_weight = lfu_weight
        self._short = np.zeros(shape)
        self._long = np.zeros(shape) if rates is None else np.clip(np.array(rates, float), 0, 1)
        self._counts = np.zeros(shape, np.int64)
        self._classes = np.zeros(shape, np.uint8)
        layers = np.arange(self._layers)
        self._bias = (layers - layers[:, None] - 1) % self._layers * -_TIE
        self._fixed = np.zeros(shape)
        for key in pinned:
            self._fixed[key] = np.inf
        self._turns = np.zeros(self._layers, np.int64)
        self._layer = 0  # whose turn it is
        self._expiry = np.zeros(shape, np.int64)  # the turn in which protection ends
        self._protected_layers: set[int] = set()  # those that may have prefetched experts
        self._ranks = np.full(shape, np.inf)  # the lowest leaves first, infinity never
        self._lowest = np.full(self._layers, np.inf)  # of every layer
        self._stale: set[int] = set()  # layers whose ranks are out of date

    # -------------------------------------------------------------------------- what happens
    def use(self, layer: int, experts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """The layer's turn in a decode step: distinct experts [n] are used and so become resident,
        beyond the budget if need be; which of them were before [n]."""
        self.take_turn(layer, experts)
        return self.admit(layer, experts)

    def take_turn(self, layer: int, experts: NDArray[np.int64]) -> None:
        """The half of `use` that is bookkeeping: some of the experts are admitted later."""
        short, long, counts = self._short[layer], self._long[layer], self._counts[layer]
        short *= SHORT_DECAY
        long *= LONG_DECAY
        short[experts] += 1 - SHORT_DECAY
        long[experts] += 1 - LONG_DECAY
        counts[experts] += 1
        self._turns[layer] += 1
        self._layer = layer
        self._stale.add(layer)

    def count(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Distinct experts [n] were used elsewhere: they count in `heat`, but need not be here."""
        self._counts[layer, experts] += 1

    def admit(
        self, layer: int, experts: NDArray[np.int64], kind: Kind = "demand"
    ) -> NDArray[np.bool_]:
        """Make distinct experts [n] resident; which of them were before [n].

        "prefetch": protected until used, for PROTECTED_TURNS turns of the layer. "one_shot": read
        for a prompt. These two leave alone what is resident already.
        """
        classes = self._classes[layer]
        hits: NDArray[np.bool_] = classes[experts] != _ABSENT
        missing = experts[~hits]
        entering = experts if kind == "demand" else missing
        classes[entering] = _CLASSES[kind]
        if kind == "prefetch":
            self._expiry[layer, entering] = self._turns[layer] + PROTECTED_TURNS
            self._protected_layers.add(layer)
        if missing.size:
            self.resident_bytes += int(self._sizes[layer][missing].sum())
        self._stale.add(layer)
        return hits

    def drop(self, layer: int, experts: NDArray[np.int64]) -> None:
        """These distinct experts [n] turned out not to be in memory."""
        lost = experts[self._classes[layer, experts] != _ABSENT]
        self._classes[layer, lost] = _ABSENT
        self._stale.add(layer)
        self.resident_bytes -= int(self._sizes[layer, lost].sum())

    def victims(self, room: int = 0, keep: Collection[Key] = ()) -> list[Key]:
        """Remove experts, worst first, until `room` bytes of the budget are free; those removed.

        `keep`, the experts in use now, and pinned ones stay, even beyond the budget.
        """
        removed: list[Key] = []
        excess = self.resident_bytes + room - self.budget
        if excess <= 0:
            return removed
        while self._stale:
            self._rank(self._stale.pop())
        bias = self._bias[self._layer]
        kept_layers: set[int] = set()
        while excess > 0:
            layer = int((self._lowest + bias).argmin())
            if self._lowest[layer] == np.inf:
                break
            ranks = self._ranks[layer]
            expert = int(ranks.argmin())
            if (layer, expert) in keep:
                kept_layers.add(layer)
            else:
                self._classes[layer, expert] = _ABSENT
                excess -= int(self._sizes[layer, expert])
                removed.append((layer, expert))
            ranks[expert] = np.inf
            self._lowest[layer] = ranks[ranks.argmin()]
        self._stale |= kept_layers
        self.resident_bytes = excess + self.budget - room
        return removed

    def _rank(self, layer: int) -> None:
        """Bring the ranks of a layer up to date."""
        classes = self._classes[layer]
        if layer in self._protected_layers:
            waiting = classes == _PREFETCHED
            classes[waiting & (self._expiry[layer] <= self._turns[layer])] = _KEPT
            if not (classes == _PREFETCHED).any():
                self._protected_layers.remove(layer)
        ranks = self._ranks[layer]
        np.take(_RANK_OF_CLASS, classes, out=ranks)
        ranks += self._fixed[layer]
        ranks += (1 - self._lfu_weight) * self._short[layer]
        ranks += self._lfu_weight * self._long[layer]
        self._lowest[layer] = ranks[ranks.argmin()]

    # -------------------------------------------------------------------------- what is known
    def resident(self, key: Key) -> bool:
        """Whether the expert counts as in memory."""
        return bool(self._classes[key] != _ABSENT)

    def resident_keys(self) -> list[Key]:
        """All resident experts by layer and number."""
        return [(int(layer), int(expert)) for layer, expert in np.argwhere(self._classes)]

    def heat(self) -> NDArray[np.int64]:
        """How often each expert was used so far [L, E]."""
        return self._counts.copy()

    def rates(self) -> NDArray[np.float64]:
        """The long running mean of each expert's uses per token [L, E]."""
        return self._long.copy()

    def check_integrity(self) -> None:
        """Assert that the books agree with one another."""
        assert self.resident_bytes == self._sizes[self._classes != _ABSENT].sum()
        for mean in (self._short, self._long):
            assert ((mean >= 0) & (mean <= 1 + 1e-9)).all()
        for layer in set(range(self._layers)) - self._stale:
            evictable = (self._classes[layer] != _ABSENT) & (self._fixed[layer] == 0)
            assert (np.isfinite(self._ranks[layer]) == evictable).all()
            assert self._lowest[layer] == self._ranks[layer].min()
        prefetched = (self._classes == _PREFETCHED).any(axis=1)
        assert set(np.flatnonzero(prefetched)) <= self._protected_layers
