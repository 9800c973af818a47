"""Which experts hold the slots of VRAM: frequency with decay, pure bookkeeping.

Every use of an expert in step t adds 2**(t / half_life) to its heat. That equals counts that halve
every `half_life` steps, but nothing has to age: only new uses change the order. Of two experts the
hotter one keeps the slot, so the hottest never leave while they are, and do once they are not.
bench/LOG.md has the figures behind the constants.

    demand     takes a free slot, or that of the coldest expert if it is HYSTERESIS times as hot:
               experts that are equally hot do not push each other out
    prefetch   takes a free slot or that of the coldest, whatever its own heat, and is protected
               until its first use, but for PROTECTED_STEPS at most

Slots are of the sizes that experts have, one class for each; all classes hold the same share of
their experts. n: experts of a call, by their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HALF_LIFE = 100.0  # steps
HYSTERESIS = 1.25
PROTECTED_STEPS = 2.0
PROTECTED_SHARE = 8  # one in so many slots of a class may be protected at a time
_LARGEST_EXPONENT = 512.0  # of heat; then all heat is scaled down


@dataclass(frozen=True, slots=True)
class SlotClass:
    """`count` slots of `slot_bytes` from byte `offset` on, numbered from `first`."""

    slot_bytes: int
    first: int
    count: int
    offset: int

    @property
    def slots(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Admission:
    """An expert may have a slot; `evicted`: who had it, -1 if nobody."""

    number: int
    slot: int
    evicted: int


def divide_slots(sizes: NDArray[np.int64], budget: int) -> tuple[SlotClass, ...]:
    """The classes of slots for experts of these sizes [total], of at most `budget` bytes in all.

    Each class gets the same share of its experts, rounded down; what is left goes to the classes
    in turn, those with the largest experts first.
    """
    values, counts = np.unique(sizes, return_counts=True)
    share = min(1.0, budget / max(1, int(sizes.sum())))
    slots = [int(count * share) for count in counts]
    left = budget - sum(number * int(value) for number, value in zip(slots, values, strict=True))
    for index in reversed(range(len(values))):
        if left >= values[index] and slots[index] < counts[index]:
            slots[index] += 1
            left -= int(values[index])
    classes, first, offset = [], 0, 0
    for value, number in zip(values.tolist(), slots, strict=True):
        classes.append(SlotClass(value, first, number, offset))
        first += number
        offset += value * number
    return tuple(classes)


class SlotPolicy:
    """Who holds which slot, and who gets one."""

    def __init__(
        self,
        sizes: NDArray[np.int64],
        budget: int,
        *,
        layers: int,
        rates: NDArray[np.float64] | None = None,
        half_life: float = HALF_LIFE,
        hysteresis: float = HYSTERESIS,
    ) -> None:
        """`sizes`: bytes of each expert's slot [total]. `layers`: calls of `count` in a step.

        `rates`: uses per step to expect [total].
        """
        self.classes = divide_slots(sizes, budget)
        self._class_of = np.unique(sizes, return_inverse=True)[1].reshape(-1).tolist()
        self._half_life, self._hysteresis, self._step = half_life, hysteresis, 1 / layers
        self._now = 0.0  # steps since heat was scaled
        self._clock = 0.0  # steps
        steady = 0.0 if rates is None else rates * half_life / math.log(2)
        self.heat: NDArray[np.float64] = np.zeros(len(sizes)) + steady
        total = sum(part.count for part in self.classes)
        self.slot_of = np.full(len(sizes), -1, np.int64)
        self._holder = np.full(total, -1, np.int64)
        self._holds = np.zeros(total, np.int64)  # reasons for which a slot cannot be taken
        self._places = [
            (part.offset + index * part.slot_bytes, part.slot_bytes)
            for part in self.classes
            for index in range(part.count)
        ]
        self._free = [list(range(*part.slots.indices(total)))[::-1] for part in self.classes]
        self._floor = [0.0] * len(self.classes)  # no expert in the class is colder, pinned ones may
        self._protected: dict[int, float] = {}  # slot: when protection ends
        self._pinned: frozenset[int] = frozenset()

    # -------------------------------------------------------------------------- what happens
    def count(self, numbers: NDArray[np.int64]) -> None:
        """A layer's turn: distinct experts [n] are used, wherever they are."""
        self._clock += self._step
        self._now += self._step
        exponent = self._now / self._half_life
        if exponent > _LARGEST_EXPONENT:
            scale = 2.0**-exponent
            self.heat *= scale
            self._floor = [floor * scale for floor in self._floor]
            self._now = exponent = 0.0
        self.heat[numbers] += 2.0**exponent
        if self._protected:
            for slot in self.slot_of[numbers].tolist():
                if slot in self._protected:
                    self._unprotect(slot)

    def demand(self, number: int) -> Admission | None:
        """A slot for an expert that was missed, if it deserves one."""
        index = self._class_of[number]
        if self._free[index]:
            return self._place(number, self._free[index].pop())
        heat = math.inf if number in self._pinned else float(self.heat[number])
        if heat <= self._hysteresis * self._floor[index]:
            return None
        slot = self._coldest(index)
        if slot < 0 or heat <= self._hysteresis * self.heat[self._holder[slot]]:
            return None
        return self._place(number, slot)

    def demand_free(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Free slots for distinct experts [n] that have none; -1 where there are not enough."""
        slots = np.full(len(numbers), -1, np.int64)
        classes = np.array(self._class_of)[numbers]
        for index, free in enumerate(self._free):
            positions = np.flatnonzero(classes == index)[: len(free)]
            if not len(positions):
                continue
            chosen, taken = numbers[positions], np.array([free.pop() for _ in positions])
            slots[positions] = taken
            self._holder[taken], self.slot_of[chosen] = chosen, taken
            self._floor[index] = min(self._floor[index], float(self.heat[chosen].min()))
        for number, slot in zip(numbers.tolist(), slots.tolist(), strict=True):
            if slot >= 0 and number in self._pinned:
                self.hold(slot)
        return slots

    def prefetch(self, number: int) -> Admission | None:
        """A protected slot for an expert that is expected, unless too many are protected."""
        index = self._class_of[number]
        part = self.classes[index]
        self._expire()
        protected = sum(part.first <= slot < part.first + part.count for slot in self._protected)
        if protected >= part.count // PROTECTED_SHARE:
            return None
        slot = self._free[index].pop() if self._free[index] else self._coldest(index)
        if slot < 0:
            return None
        self.hold(slot)
        self._protected[slot] = self._clock + PROTECTED_STEPS
        return self._place(number, slot)

    def drop(self, number: int) -> None:
        """An expert's bytes did not arrive: its slot is free again."""
        slot = int(self.slot_of[number])
        if slot in self._protected:
            self._unprotect(slot)
        if number in self._pinned:
            self.release(slot)
        assert self._holds[slot] == 0
        self.slot_of[number] = self._holder[slot] = -1
        self._free[self._class_of[number]].append(slot)

    def pin(self, numbers: Iterable[int]) -> None:
        """These experts, and no others, get a slot when asked for and keep it."""
        for number in self._pinned:
            if self.slot_of[number] >= 0:
                self.release(int(self.slot_of[number]))
        self._pinned = frozenset(numbers)
        for number in self._pinned:
            if self.slot_of[number] >= 0:
                self.hold(int(self.slot_of[number]))
        self._floor = [0.0] * len(self.classes)

    def hold(self, slots: int | list[int]) -> None:
        """Keep a slot, or distinct ones, from being taken, until released as often as held."""
        self._holds[slots] += 1

    def release(self, slots: int | list[int]) -> None:
        self._holds[slots] -= 1

    # -------------------------------------------------------------------------- what is known
    def hottest(self) -> list[int]:
        """As many experts of each class as it has slots: pinned ones, then those of any heat."""
        heat = self.heat.copy()
        heat[list(self._pinned)] = np.inf
        order = np.argsort(-heat, kind="stable")
        room = [part.count for part in self.classes]
        chosen = []
        for number in order[heat[order] > 0].tolist():
            index = self._class_of[number]
            if room[index]:
                room[index] -= 1
                chosen.append(number)
        return chosen

    def place(self, slot: int) -> tuple[int, int]:
        """Offset and size of a slot in bytes."""
        return self._places[slot]

    def check_integrity(self) -> None:
        """Assert that the books agree with one another."""
        resident = np.flatnonzero(self.slot_of >= 0)
        held = self.slot_of[resident]
        assert (self._holder[held] == resident).all()
        assert len(resident) == (self._holder >= 0).sum()
        for index, part in enumerate(self.classes):
            within = self._holder[part.slots]
            assert all(self._class_of[number] == index for number in within[within >= 0].tolist())
            assert sorted(self._free[index]) == (np.flatnonzero(within < 0) + part.first).tolist()
            heats = [self.heat[n] for n in within[within >= 0].tolist() if n not in self._pinned]
            assert all(heat >= self._floor[index] for heat in heats)
        reasons = np.zeros(len(self._holder), np.int64)
        reasons[list(self._protected)] += 1
        reasons[[int(self.slot_of[n]) for n in self._pinned if self.slot_of[n] >= 0]] += 1
        assert (self._holds >= reasons).all()
        assert (self._holds[self._holder < 0] == 0).all()

    # -------------------------------------------------------------------------- within
    def _place(self, number: int, slot: int) -> Admission:
        evicted = int(self._holder[slot])
        if evicted >= 0:
            self.slot_of[evicted] = -1
        self._holder[slot], self.slot_of[number] = number, slot
        if number in self._pinned:
            self.hold(slot)
        index = self._class_of[number]
        self._floor[index] = min(self._floor[index], float(self.heat[number]))
        return Admission(number, slot, evicted)

    def _coldest(self, index: int) -> int:
        """The slot of a full class that may be taken, -1 if there is none."""
        part = self.classes[index]
        if not part.count:
            return -1
        self._expire()
        heats = self.heat[self._holder[part.slots]]
        self._floor[index] = float(heats.min())
        heats[self._holds[part.slots] > 0] = np.inf
        coldest = int(heats.argmin())
        return part.first + coldest if heats[coldest] < np.inf else -1

    def _expire(self) -> None:
        """End the protection of those that waited too long."""
        for slot in [slot for slot, end in self._protected.items() if end < self._clock]:
            self._unprotect(slot)

    def _unprotect(self, slot: int) -> None:
        del self._protected[slot]
        self.release(slot)
