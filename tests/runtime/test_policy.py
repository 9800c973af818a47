"""The policy against a slow, perfect model of it, and each promise by itself."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from colibri_mmap.runtime.policy import PROTECTED_TURNS, ExpertPolicy, Key

LAYERS, EXPERTS = 3, 6
SIZES = np.arange(1, LAYERS * EXPERTS + 1).reshape(LAYERS, EXPERTS) * 10
PINNED = {(1, 2), (2, 5)}

layers = st.integers(0, LAYERS - 1)
expert_sets = st.sets(st.integers(0, EXPERTS - 1), max_size=EXPERTS)
keys = st.tuples(layers, st.integers(0, EXPERTS - 1))


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def uniform(layers: int, experts: int, budget: int, **settings: object) -> ExpertPolicy:
    """A policy over experts of one byte each."""
    return ExpertPolicy(np.ones((layers, experts)), budget, **settings)  # type: ignore[arg-type]


class Machine(RuleBasedStateMachine):
    """Drives the policy and keeps the whole history, from which everything is computed anew."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = ExpertPolicy(SIZES, 400, 0.4, PINNED)
        self.budget = 400
        self.history: list[list[set[int]]] = [[] for _ in range(LAYERS)]
        self.classes: dict[Key, str] = {}
        self.expiry: dict[Key, int] = {}
        self.elsewhere: Counter[Key] = Counter()
        self.layer = 0

    def rank(self, key: Key) -> float:
        """The definition: the class, then means that are sums over all turns."""
        layer, expert = key
        ages = [age for age, used in enumerate(reversed(self.history[layer])) if expert in used]
        short = sum(0.5 * 0.5**age for age in ages)
        long = sum(0.01 * 0.99**age for age in ages)
        protected = self.classes[key] == "prefetch" and self.expiry[key] > len(self.history[layer])
        bonus = 2.0 if protected else -2.0 if self.classes[key] == "one_shot" else 0.0
        turns_until = (layer - self.layer - 1) % LAYERS
        return bonus + 0.6 * short + 0.4 * long - 1e-9 * turns_until

    @rule(layer=layers, experts=expert_sets)
    def use(self, layer: int, experts: set[int]) -> None:
        asked = sorted(experts)
        expected = [(layer, expert) in self.classes for expert in asked]
        assert self.policy.use(layer, ids(*asked)).tolist() == expected
        self.history[layer].append(experts)
        self.layer = layer
        self.classes.update({(layer, expert): "demand" for expert in asked})

    @rule(
        layer=layers, experts=expert_sets, kind=st.sampled_from(["demand", "prefetch", "one_shot"])
    )
    def admit(self, layer: int, experts: set[int], kind: str) -> None:
        asked = sorted(experts)
        expected = [(layer, expert) in self.classes for expert in asked]
        assert self.policy.admit(layer, ids(*asked), kind).tolist() == expected  # type: ignore[arg-type]
        for expert, present in zip(asked, expected, strict=True):
            if not present or kind == "demand":
                self.classes[layer, expert] = kind
                self.expiry[layer, expert] = len(self.history[layer]) + PROTECTED_TURNS

    @rule(layer=layers, experts=expert_sets)
    def drop(self, layer: int, experts: set[int]) -> None:
        self.policy.drop(layer, ids(*sorted(experts)))
        for expert in experts:
            self.classes.pop((layer, expert), None)

    @rule(budget=st.integers(0, 1700))
    def change_budget(self, budget: int) -> None:
        self.policy.budget = self.budget = budget

    @rule(room=st.integers(0, 300), keep=st.sets(keys, max_size=6))
    def evict(self, room: int, keep: set[Key]) -> None:
        for victim in self.policy.victims(room, keep):
            assert self.held() + room > self.budget, "evicted more than needed"
            candidates = self.classes.keys() - keep - PINNED
            assert victim in candidates
            lowest = min(map(self.rank, candidates))
            assert self.rank(victim) <= lowest + 1e-12, "a worse one was left"
            del self.classes[victim]
        if self.held() + room > self.budget:
            assert not self.classes.keys() - keep - PINNED, "evicted less than possible"

    @rule(layer=layers, experts=expert_sets)
    def count(self, layer: int, experts: set[int]) -> None:
        self.policy.count(layer, ids(*sorted(experts)))
        self.elsewhere.update((layer, expert) for expert in experts)

    def held(self) -> int:
        return int(sum(SIZES[key] for key in self.classes))

    @invariant()
    def agrees(self) -> None:
        self.policy.check_integrity()
        assert self.policy.resident_keys() == sorted(self.classes)
        assert self.policy.resident_bytes == self.held()
        used = Counter(
            (layer, e) for layer in range(LAYERS) for s in self.history[layer] for e in s
        )
        used += self.elsewhere
        heat = self.policy.heat()
        assert all(heat[key] == used[key] for key in np.ndindex(LAYERS, EXPERTS))
        assert all(
            self.policy.resident(key) == (key in self.classes)
            for key in np.ndindex(LAYERS, EXPERTS)
        )


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nothing_leaves_within_the_budget() -> None:
    policy = uniform(2, 4, 3)
    policy.use(0, ids(0, 1))
    policy.use(1, ids(2))
    assert policy.victims() == []
    assert len(policy.victims(room=1)) == 1


def test_a_layer_larger_than_the_budget_is_kept_whole_while_in_use() -> None:
    policy = uniform(2, 4, 2)
    for layer in (0, 1, 0, 1):
        assert not policy.use(layer, ids(0, 1, 2)).any()
        policy.victims(keep={(layer, 0), (layer, 1), (layer, 2)})
        assert policy.resident_keys() == [(layer, 0), (layer, 1), (layer, 2)]
        assert len(policy.victims()) == 1, "it must come down to the budget afterwards"
        policy.drop(layer, ids(0, 1, 2))


def test_weight_0_evicts_the_least_recent_and_weight_1_the_least_frequent() -> None:
    victims = {}
    for weight in (0.0, 1.0):
        policy = uniform(1, 4, 1, lfu_weight=weight)
        for expert in (0, 0, 0, 1, 2):
            policy.use(0, ids(expert))
        victims[weight] = policy.victims()
    assert victims == {0.0: [(0, 0), (0, 1)], 1.0: [(0, 1), (0, 2)]}


def test_among_equals_the_layer_whose_turn_is_farthest_leaves_first() -> None:
    policy = uniform(4, 1, 0)
    for layer in range(4):
        policy.admit(layer, ids(0))
    policy.use(1, ids())
    assert policy.victims() == [(1, 0), (0, 0), (3, 0), (2, 0)]


def test_a_passed_turn_ages_the_experts_of_that_layer_alone() -> None:
    policy = uniform(3, 2, 2)
    for layer in range(3):
        policy.use(layer, ids(0))
    policy.use(0, ids(1))  # a new token has come as far as layer 0
    assert policy.victims(keep={(0, 1)}) == [(0, 0), (2, 0)]


def test_pinned_experts_stay_even_beyond_the_budget() -> None:
    policy = uniform(1, 3, 0, pinned=[(0, 1)])
    policy.admit(0, ids(0, 1, 2))
    assert sorted(policy.victims()) == [(0, 0), (0, 2)]
    assert policy.victims() == []
    assert policy.resident((0, 1))


def test_prefetched_experts_are_protected_for_some_turns() -> None:
    policy = uniform(1, 3, 1)
    policy.admit(0, ids(0), "prefetch")
    for _ in range(PROTECTED_TURNS - 1):
        policy.use(0, ids(1))
        assert policy.victims() == [(0, 1)], "though it was used more recently"
    policy.use(0, ids(1))
    assert policy.victims() == [(0, 0)], "its protection is over"


def test_one_shot_experts_leave_before_any_other_unless_they_were_there() -> None:
    policy = uniform(2, 3, 2)
    policy.admit(0, ids(0))
    policy.use(1, ids(0))
    assert policy.admit(1, ids(0, 1, 2), "one_shot").tolist() == [True, False, False]
    assert policy.victims() == [(1, 1), (1, 2)]
    policy.admit(1, ids(1), "one_shot")
    policy.use(1, ids(1))
    assert policy.victims() == [(0, 0)], "a use makes it an ordinary one"


def test_expected_rates_decide_among_the_unused() -> None:
    policy = uniform(1, 3, 1, rates=[[0.5, 7.0, 0.1]])
    policy.admit(0, ids(0, 1, 2))
    assert policy.victims() == [(0, 2), (0, 0)]
    policy.check_integrity()


def test_skewed_use_is_kept_better_than_by_recency_alone() -> None:
    random = np.random.default_rng(5)
    likely = 1 / np.arange(1, 33) ** 1.2
    turns = [random.choice(32, 4, False, likely / likely.sum()) for _ in range(400)]

    def misses(weight: float) -> int:
        policy = uniform(1, 32, 10, lfu_weight=weight)
        missed = 0
        for turn in turns:
            missed += int((~policy.use(0, turn)).sum())
            policy.victims(keep={(0, expert) for expert in turn.tolist()})
        return missed

    assert misses(0.3) < 0.97 * misses(0.0)


def test_weights_outside_0_to_1_are_a_bug() -> None:
    with pytest.raises(AssertionError):
        uniform(1, 1, 1, lfu_weight=1.5)
