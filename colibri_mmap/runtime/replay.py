"""What a routing trace would read from disk under several cache policies: pure simulation.

A pass of one token is a decode step; one of more tokens is a prompt, in which each distinct expert
of a layer counts once. Layers are visited in order.

    lru       one expert after the other, evicting the least recently used until it fits
    lfu       evicts those with the fewest uses so far, of these the least recently used
    hybrid    runtime/policy.py as the engine uses it
    optimum   Belady's: evicts those whose next use is farthest in the future; the least possible
              where all experts have one size, otherwise close to it

All but lru evict when a layer's turn ends: until then its experts are in memory together, even
beyond the budget.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from .policy import ExpertPolicy, Key
from .tracefile import RoutingTrace

PolicyName: TypeAlias = Literal["lru", "lfu", "hybrid", "optimum"]
POLICY_NAMES: tuple[PolicyName, ...] = get_args(PolicyName)

Priority: TypeAlias = tuple[int, int]
Step: TypeAlias = Callable[["_Turn"], int]
"""Takes a layer's turn through a cache; how many of its experts missed."""


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What was read; a hit or miss is an expert of a layer's turn. `tokens` are those counted."""

    bytes_read: int
    bytes_touched: int
    hits: int
    misses: int
    tokens: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.hits + self.misses)

    @property
    def bytes_per_token(self) -> float:
        return self.bytes_read / max(1, self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A layer (its index in the trace) in one pass: its distinct experts, in router order."""

    layer: int
    experts: NDArray[np.int64]
    decode: bool
    counted: bool

    @property
    def keys(self) -> list[Key]:
        return [(self.layer, expert) for expert in self.experts.tolist()]


def replay(
    trace: RoutingTrace,
    budget_bytes: int,
    policy_name: PolicyName,
    *,
    lfu_weight: float = 0.3,
    skip_passes: int = 0,
) -> ReplayResult:
    """Run a trace through a cache that starts empty; the first passes fill it but do not count."""
    turns = list(_turns(trace, skip_passes))
    sizes = trace.header.expert_bytes
    step: Step
    if policy_name == "hybrid":
        step = _hybrid(trace, budget_bytes, lfu_weight)
    elif policy_name == "lru":
        step = _lru(sizes, budget_bytes)
    else:
        priorities = _frequency(turns) if policy_name == "lfu" else _foresight(turns)
        step = _ranked(sizes, budget_bytes, priorities)
    read = touched = hits = misses = 0
    for turn in turns:
        missed = step(turn)
        if turn.counted:
            misses += missed
            hits += len(turn.experts) - missed
            read += missed * sizes[turn.layer]
            touched += len(turn.experts) * sizes[turn.layer]
    tokens = sum(ids.shape[1] for ids in trace.passes[skip_passes:])
    return ReplayResult(read, touched, hits, misses, tokens)


def _turns(trace: RoutingTrace, skip_passes: int) -> Iterator[_Turn]:
    for number, ids in enumerate(trace.passes):
        decode = ids.shape[1] == 1
        for layer in range(len(ids)):
            distinct = np.array(list(dict.fromkeys(ids[layer].ravel().tolist())), np.int64)
            yield _Turn(layer, distinct, decode, number >= skip_passes)


def _lru(sizes: tuple[int, ...], budget: int) -> Step:
    cache: OrderedDict[Key, None] = OrderedDict()  # the least recently used first
    held = 0

    def step(turn: _Turn) -> int:
        nonlocal held
        misses = 0
        for key in turn.keys:
            if key not in cache:
                misses += 1
                held += sizes[turn.layer]
            cache[key] = None
            cache.move_to_end(key)
            while held > budget:
                (layer, _), _ = cache.popitem(last=False)
                held -= sizes[layer]
        return misses

    return step


def _hybrid(trace: RoutingTrace, budget: int, lfu_weight: float) -> Step:
    header = trace.header
    sizes = np.repeat(np.array(header.expert_bytes)[:, None], header.n_experts, axis=1)
    policy = ExpertPolicy(sizes, budget, lfu_weight)

    def step(turn: _Turn) -> int:
        if turn.decode:
            hits = policy.use(turn.layer, turn.experts)
        else:
            hits = policy.admit(turn.layer, turn.experts, "one_shot")
        policy.victims(keep=set(turn.keys))
        return int((~hits).sum())

    return step


def _ranked(sizes: tuple[int, ...], budget: int, priorities: Iterator[list[Priority]]) -> Step:
    """Evicts the lowest of the priorities that an expert is given at each use."""
    resident: dict[Key, Priority] = {}
    heap: list[tuple[Priority, Key]] = []  # of all residents, and outdated entries
    held = 0

    def step(turn: _Turn) -> int:
        nonlocal held
        misses = 0
        for key, priority in zip(turn.keys, next(priorities), strict=True):
            if key not in resident:
                misses += 1
                held += sizes[turn.layer]
            resident[key] = priority
            heapq.heappush(heap, (priority, key))
        while held > budget:
            priority, key = heapq.heappop(heap)
            if resident.get(key) == priority:
                del resident[key]
                held -= sizes[key[0]]
        return misses

    return step


def _frequency(turns: list[_Turn]) -> Iterator[list[Priority]]:
    """(uses so far, number of the turn)."""
    uses: Counter[Key] = Counter()
    for number, turn in enumerate(turns):
        uses.update(turn.keys)
        yield [(uses[key], number) for key in turn.keys]


def _foresight(turns: list[_Turn]) -> Iterator[list[Priority]]:
    """(minus the number of the turn of the next use, 0)."""
    next_use: dict[Key, int] = {}
    backwards: list[list[Priority]] = []
    for number, turn in reversed(list(enumerate(turns))):
        backwards.append([(-next_use.get(key, len(turns)), 0) for key in turn.keys])
        next_use.update((key, number) for key in turn.keys)
    yield from reversed(backwards)
