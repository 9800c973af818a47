"""The slots of VRAM against a slow, perfect model of them, and each promise by itself."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from numpy.typing import NDArray

from colibri_mmap.runtime.vrampolicy import (
    HYSTERESIS,
    PROTECTED_SHARE,
    PROTECTED_STEPS,
    SlotPolicy,
    divide_slots,
)

SMALL, LARGE = 256, 1024
SIZES = np.array([SMALL] * 24 + [LARGE] * 24, np.int64)  # a layer of each
BUDGET = 12 * (SMALL + LARGE)  # half of each
HALF_LIFE = 5.0


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def one_class(experts: int, slots: int, **settings: float) -> SlotPolicy:
    """A policy of one layer with experts of one size."""
    sizes = np.full(experts, SMALL, np.int64)
    return SlotPolicy(sizes, slots * SMALL, layers=1, **settings)  # type: ignore[arg-type]


def resident(policy: SlotPolicy) -> set[int]:
    return set(np.flatnonzero(policy.slot_of >= 0).tolist())


def use(policy: SlotPolicy, *numbers: int) -> None:
    """A step: count these and propose the missed ones, as the cache does."""
    policy.count(ids(*numbers))
    for number in numbers:
        if policy.slot_of[number] < 0:
            policy.demand(number)


class Machine(RuleBasedStateMachine):
    """Drives a policy and keeps the whole history, from which everything is computed anew."""

    numbers = st.integers(0, len(SIZES) - 1)
    number_sets = st.sets(numbers, max_size=6)

    def __init__(self) -> None:
        super().__init__()
        self.policy = SlotPolicy(SIZES, BUDGET, layers=2, half_life=HALF_LIFE)
        self.uses: list[set[int]] = []  # of every turn
        self.slots: dict[int, int] = {}  # number: slot
        self.protected: dict[int, int] = {}  # number: turns when its protection began
        self.held: list[int] = []  # slots
        self.pinned: set[int] = set()

    def heat(self, number: int) -> float:
        """Uses, each halved once per half-life since; relative to now."""
        turns = len(self.uses)
        return sum(
            2.0 ** ((turn + 1 - turns) / 2 / HALF_LIFE)
            for turn, used in enumerate(self.uses)
            if number in used
        )

    def is_protected(self, number: int) -> bool:
        return (len(self.uses) - self.protected[number]) / 2 <= PROTECTED_STEPS

    def candidates(self, size: int) -> list[int]:
        """Those whose slots can be taken, the coldest first."""
        can_leave = [
            number
            for number, slot in self.slots.items()
            if SIZES[number] == size
            and slot not in self.held
            and number not in self.pinned
            and not (number in self.protected and self.is_protected(number))
        ]
        return sorted(can_leave, key=self.heat)

    def full(self, size: int) -> bool:
        return sum(SIZES[number] == size for number in self.slots) == 12

    def placed(self, number: int, slot: int, evicted: int) -> None:
        if evicted >= 0:
            assert self.slots.pop(evicted) == slot
            self.protected.pop(evicted, None)
        assert slot not in self.slots.values()
        self.slots[number] = slot

    @rule(numbers=number_sets)
    def count(self, numbers: set[int]) -> None:
        self.policy.count(ids(*sorted(numbers)))
        self.uses.append(numbers)
        for number in numbers:
            self.protected.pop(number, None)

    @rule(number=numbers)
    def demand(self, number: int) -> None:
        if number in self.slots:
            return
        size = int(SIZES[number])
        admission = self.policy.demand(number)
        candidates = self.candidates(size)
        if not self.full(size):
            assert admission is not None
            assert admission.evicted == -1
        elif not candidates:
            assert admission is None
        else:
            heat = math.inf if number in self.pinned else self.heat(number)
            ratio = heat - HYSTERESIS * self.heat(candidates[0])
            if abs(ratio) < 1e-9:  # rounding decides
                assert admission is None or admission.evicted >= 0
            else:
                assert (admission is not None) == (ratio > 0)
            if admission is not None:
                coldest = self.heat(candidates[0])
                assert math.isclose(self.heat(admission.evicted), coldest, abs_tol=1e-9)
        if admission is not None:
            self.placed(number, admission.slot, admission.evicted)

    @rule(number=numbers)
    def prefetch(self, number: int) -> None:
        if number in self.slots:
            return
        size = int(SIZES[number])
        waiting = [n for n in self.protected if SIZES[n] == size and self.is_protected(n)]
        admission = self.policy.prefetch(number)
        room = not self.full(size) or self.candidates(size)
        assert (admission is not None) == bool(room and len(waiting) < 12 // PROTECTED_SHARE)
        if admission is not None:
            self.placed(number, admission.slot, admission.evicted)
            self.protected[number] = len(self.uses)

    @rule(number=numbers)
    def drop(self, number: int) -> None:
        if number in self.slots and self.slots[number] not in self.held:
            self.policy.drop(number)
            del self.slots[number]
            self.protected.pop(number, None)

    @rule(numbers=number_sets)
    def pin(self, numbers: set[int]) -> None:
        self.policy.pin(numbers)
        self.pinned = numbers

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.slots.values())))
        self.policy.hold(slot)
        self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule()
    def release(self) -> None:
        self.policy.release(self.held.pop())

    @invariant()
    def agrees(self) -> None:
        self.policy.check_integrity()
        assert resident(self.policy) == set(self.slots)
        for number, slot in self.slots.items():
            assert self.policy.slot_of[number] == slot
            assert self.policy.place(slot)[1] == SIZES[number]


Machine.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestMachine = Machine.TestCase


# ------------------------------------------------------------------------------ dividing
@given(
    st.lists(st.sampled_from([256, 512, 768, 4096]), min_size=1, max_size=200),
    st.integers(0, 200 * 4096),
)
def test_slots_never_overlap_nor_exceed_the_budget(sizes: list[int], budget: int) -> None:
    classes = divide_slots(np.array(sizes, np.int64), budget)
    assert sum(part.count * part.slot_bytes for part in classes) <= budget
    for part in classes:
        assert part.count <= sizes.count(part.slot_bytes)
    for before, after in pairwise(classes):
        assert after.first == before.first + before.count
        assert after.offset == before.offset + before.count * before.slot_bytes


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0, 1))
def test_every_class_holds_the_same_share(small: int, large: int, share: float) -> None:
    sizes = np.array([256] * small + [1024] * large, np.int64)
    first, second = divide_slots(sizes, int(share * sizes.sum()))
    assert abs(first.count - share * small) <= 1
    assert abs(second.count - share * large) <= 1


def test_a_budget_for_all_holds_all() -> None:
    assert [part.count for part in divide_slots(SIZES, int(SIZES.sum()))] == [24, 24]


# ------------------------------------------------------------------------------ promises
def test_equally_hot_experts_do_not_push_each_other_out() -> None:
    policy = one_class(8, 4, half_life=100)
    for _ in range(50):
        for number in range(8):
            use(policy, number)
    assert resident(policy) == {0, 1, 2, 3}  # the first that came
    eager = one_class(8, 4, half_life=100, hysteresis=0.0)
    changes, before = 0, set[int]()
    for _ in range(50):
        for number in range(8):
            use(eager, number)
            changes += resident(eager) != before
            before = resident(eager)
    assert changes > 300  # what the hysteresis spares


def test_the_hottest_stay_and_leave_once_others_are() -> None:
    policy = one_class(64, 8, half_life=20)
    random = np.random.default_rng(3)

    def run(hot: range, steps: int) -> None:
        for _ in range(steps):
            use(
                policy, *random.choice(hot, 3, replace=False).tolist(), int(random.integers(16, 64))
            )

    run(range(8), 200)
    assert resident(policy) == set(range(8))
    run(range(8, 16), 200)
    assert resident(policy) == set(range(8, 16))


def test_expected_rates_count_until_other_uses_weigh_more() -> None:
    rates = np.zeros(16)
    rates[4:8] = 0.5
    sizes = np.full(16, SMALL, np.int64)
    policy = SlotPolicy(sizes, 4 * SMALL, layers=1, rates=rates, half_life=10)
    assert sorted(policy.hottest()) == [4, 5, 6, 7]
    for number in policy.hottest():
        policy.demand(number)
    use(policy, 0, 1)
    assert resident(policy) == {4, 5, 6, 7}
    for _ in range(40):
        use(policy, 0, 1)
    assert {0, 1} < resident(policy)


def test_expected_rates_are_worth_what_uses_at_that_rate_are() -> None:
    policy = one_class(2, 1, half_life=50)
    for step in range(2000):
        policy.count(ids(0) if step % 4 == 0 else ids())
    expecting = SlotPolicy(
        np.full(2, SMALL), SMALL, layers=1, rates=np.array([0.25, 0]), half_life=50
    )
    now = 2.0 ** (policy._now / 50)
    assert policy.heat[0] / now == pytest.approx(expecting.heat[0], rel=0.03)


def test_heat_keeps_its_order_when_scaled() -> None:
    policy = one_class(4, 2, half_life=0.5)  # scaled every 256 steps
    for step in range(2000):
        use(policy, step % 3)
        policy.check_integrity()
        assert np.isfinite(policy.heat).all()
        latest = [(step - back) % 3 for back in range(min(step + 1, 3))]
        assert (np.diff(policy.heat[latest]) < 0).all()


def test_a_prefetched_expert_waits_for_its_first_use() -> None:
    policy = one_class(32, 8)
    for number in range(8):
        use(policy, number)
    assert policy.prefetch(20) is not None
    use(policy, 21)
    use(policy, 21)  # twice as hot as any: it gets a slot, but not that of the cold 20
    assert {20, 21} < resident(policy)
    policy.count(ids(20))
    for _ in range(9):
        use(policy, *(number for number in range(8) if policy.slot_of[number] >= 0), 22)
    assert 20 not in resident(policy)  # protected no more, and the coldest


def test_protection_ends_without_a_use() -> None:
    policy = one_class(32, 8)
    for number in range(8):
        use(policy, number)
    policy.prefetch(20)
    for _ in range(math.ceil(PROTECTED_STEPS) + 1):
        policy.count(ids())
    use(policy, 21)
    assert 20 not in resident(policy)
    assert 21 in resident(policy)


def test_few_are_protected_at_a_time() -> None:
    policy = one_class(64, 16)
    for number in range(16):
        use(policy, number)
    taken = [policy.prefetch(number) for number in range(20, 30)]
    assert sum(admission is not None for admission in taken) == 16 // PROTECTED_SHARE


def hits_with_prefetch(*, protected: bool) -> int:
    """Hits of 6 layers of 32 experts in 64 slots, where each next turn is guessed."""
    layers, experts, slots = 6, 32, 64
    sizes = np.full(layers * experts, SMALL, np.int64)
    policy = SlotPolicy(sizes, slots * SMALL, layers=layers, half_life=20)
    random = np.random.default_rng(5)
    popularity = 1 / np.arange(1, experts + 1)
    popularity /= popularity.sum()
    turns = [
        turn % layers * experts + random.choice(experts, 4, False, popularity)
        for turn in range(300 * layers)
    ]
    hits = 0
    for now, following in pairwise(turns):
        hits += int((policy.slot_of[now] >= 0).sum())
        use(policy, *now.tolist())
        for guess in following.tolist():
            if policy.slot_of[guess] < 0:
                admission = policy.prefetch(guess)
                if admission is not None and not protected:
                    policy._unprotect(admission.slot)
    return hits


def test_protection_is_what_makes_prefetching_pay() -> None:
    assert hits_with_prefetch(protected=True) > 1.1 * hits_with_prefetch(protected=False)


def test_pinned_experts_stay_until_unpinned() -> None:
    policy = one_class(16, 4, half_life=5)
    policy.pin([0])
    use(policy, 0, 1, 2, 3)
    for _ in range(20):
        use(policy, 8, 9, 10, 11)
    assert resident(policy) == {0, 8, 9, 10}
    policy.pin([])
    use(policy, 11)
    assert resident(policy) == {8, 9, 10, 11}


def test_pinned_experts_come_first_and_need_no_heat() -> None:
    policy = one_class(16, 4)
    policy.pin([12, 13])
    use(policy, 0, 1, 2, 3)
    assert policy.hottest() == [12, 13, 0, 1]
    for number in (12, 13):
        assert policy.demand(number) is not None
    assert {12, 13} < resident(policy)
    policy.pin(range(16))
    assert policy.demand(14) is None  # all that are there are pinned too


def test_nothing_is_prefetched_while_all_slots_are_read() -> None:
    policy = one_class(16, 8)
    use(policy, *range(8))
    for slot in range(8):
        policy.hold(slot)
    assert policy.prefetch(9) is None
    policy.release(3)
    assert policy.prefetch(9) is not None
    assert resident(policy) == {0, 1, 2, 9, 4, 5, 6, 7}


def test_a_dropped_expert_leaves_nothing_behind() -> None:
    policy = one_class(16, 8)
    policy.pin([5])
    for admission in (policy.prefetch(4), policy.demand(5)):
        assert admission is not None
        policy.drop(admission.number)
        policy.check_integrity()
    use(policy, *range(6, 14))
    assert resident(policy) == set(range(6, 14))
    use(policy, 1)
    use(policy, 1)
    assert 1 in resident(policy)  # no slot is held any more


def test_no_slots_at_all() -> None:
    policy = one_class(8, 0)
    use(policy, 1, 2)
    assert policy.prefetch(3) is None
    assert resident(policy) == set()
    assert policy.hottest() == []
    policy.check_integrity()
