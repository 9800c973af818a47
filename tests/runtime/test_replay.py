"""Replays against cases counted by hand and against the best of all possible evictions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mmap.runtime.replay import POLICY_NAMES, PolicyName, ReplayResult, replay
from colibri_mmap.runtime.tracefile import RoutingTrace, TraceHeader, TraceWriter

TOOL = Path(__file__).parents[2] / "tools" / "replay.py"


def routing(passes: list[object], sizes: tuple[int, ...] = (1,), experts: int = 8) -> RoutingTrace:
    """A trace of passes [layers, T, k]."""
    arrays = [np.array(ids, np.uint16) for ids in passes]
    k = arrays[0].shape[2]
    return RoutingTrace(
        TraceHeader("test", "", tuple(range(len(sizes))), experts, k, sizes), tuple(arrays)
    )


def single(*experts: int) -> RoutingTrace:
    """One layer, one expert of one byte per token."""
    return routing([[[[expert]]] for expert in experts])


def synthetic(
    tokens: int, zipf: float, layers: int = 6, experts: int = 64, k: int = 4
) -> RoutingTrace:
    """35 % of the routing is carried over from token to token, the rest popular as rank^-zipf."""
    random = np.random.default_rng(11)
    popularity = [-zipf * np.log(1 + random.permutation(experts)) for _ in range(layers)]
    passes, last = [], np.zeros((layers, k), np.int64)
    for token in range(tokens):
        for layer in range(layers):
            weights = popularity[layer] + random.gumbel(size=experts)
            if token:
                weights[last[layer][random.random(k) < 0.35]] = np.inf
            last[layer] = np.argpartition(-weights, k)[:k]
        passes.append(last[:, None].tolist())
    return routing(passes, (1000,) * layers, experts)


@pytest.mark.parametrize(
    ("policy", "misses"),
    [
        # 0 1 2 0 3 0 1 2 0 in two places
        ("lru", 8),  # all but the second 0 of "0 3 0"
        ("lfu", 7),  # and the last 0, which stays from its second use on
        ("optimum", 5),  # 0 and 1 stay throughout
    ],
)
def test_by_hand(policy: PolicyName, misses: int) -> None:
    result = replay(single(0, 1, 2, 0, 3, 0, 1, 2, 0), 2, policy)
    assert result == ReplayResult(misses, 9, 9 - misses, misses, 9)


def test_lru_of_unequal_sizes_by_hand() -> None:
    # experts of layer 0 have 3 bytes, of layer 1 have 5; 8 bytes hold one of each
    trace = routing([[[[0]], [[0]]], [[[1]], [[0]]], [[[1]], [[2]]], [[[0]], [[2]]]], (3, 5))
    # a0 b0 | a1 evicts a0, b0 | a1, b2 evicts b0 | a0 evicts a1, b2
    result = replay(trace, 8, "lru")
    assert result == ReplayResult(3 + 5 + 3 + 5 + 3, 32, 3, 5, 4)
    assert result.hit_rate == 3 / 8
    assert result.bytes_per_token == 19 / 4


def test_lru_takes_the_experts_of_a_layer_one_by_one() -> None:
    # two fit: 2 evicts 0, whose turn then comes and evicts 1
    trace = routing([[[[0, 1]]], [[[2, 0]]]])
    assert replay(trace, 2, "lru").misses == 4
    assert replay(trace, 2, "optimum").misses == 3


def test_an_expert_of_a_prompt_counts_once() -> None:
    trace = routing([[[[0, 1], [1, 2], [0, 2], [0, 1]]]])
    for policy in POLICY_NAMES:
        assert replay(trace, 100, policy) == ReplayResult(3, 3, 0, 3, 4)


def test_skipped_passes_fill_the_cache() -> None:
    for policy in POLICY_NAMES:
        result = replay(single(0, 1, 0, 1), 2, policy, skip_passes=2)
        assert result == ReplayResult(0, 2, 2, 0, 2)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_extremes(policy: PolicyName) -> None:
    trace = synthetic(40, 0.5)
    everything = replay(trace, 10**9, policy)
    distinct = sum(len(np.unique([p[layer] for p in trace.passes])) for layer in range(6))
    assert everything.misses == distinct
    nothing = replay(trace, 0, policy)
    assert (nothing.hits, nothing.bytes_read) == (0, nothing.bytes_touched)


steps = st.lists(
    st.tuples(*[st.lists(st.integers(0, 4), min_size=2, max_size=2, unique=True)] * 2),
    min_size=1,
    max_size=5,
)


@settings(deadline=None, max_examples=50)
@given(steps=steps, capacity=st.integers(0, 6))
def test_the_optimum_is_the_least_of_all_choices(
    steps: list[tuple[list[int], list[int]]], capacity: int
) -> None:
    trace = routing([[[layer] for layer in step] for step in steps], (1, 1), 5)
    turns = [
        frozenset((layer, expert) for expert in experts)
        for step in steps
        for layer, experts in enumerate(step)
    ]

    @cache
    def least(number: int, resident: frozenset[tuple[int, int]]) -> int:
        if number == len(turns):
            return 0
        union = resident | turns[number]
        ways = combinations(sorted(union), min(capacity, len(union)))
        rest = min(least(number + 1, frozenset(kept)) for kept in ways)
        return len(turns[number] - resident) + rest

    optimum = replay(trace, capacity, "optimum").misses
    assert optimum == least(0, frozenset())
    assert all(replay(trace, capacity, policy).misses >= optimum for policy in POLICY_NAMES)


@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_the_hybrid_is_no_worse_than_lru_and_better_where_use_is_skewed(share: float) -> None:
    for zipf, bound in ((0.0, 1.0), (0.5, 0.97), (1.0, 0.97)):
        trace = synthetic(300, zipf)
        size = int(share * 6 * 64 * 1000)
        read = {
            policy: replay(trace, size, policy, skip_passes=60).bytes_read
            for policy in POLICY_NAMES
        }
        assert read["hybrid"] <= bound * read["lru"]
        assert read["optimum"] < read["hybrid"]


def test_a_prompt_does_not_wash_out_what_decode_uses() -> None:
    decode = [[[[0, 1]]] * 3] * 4  # 6 experts of 3 layers
    prompt = [[[2, 3], [4, 5]]] * 3  # 4 of each layer, for which there is room once
    trace = routing([*decode, prompt, *decode], (1, 1, 1))
    assert replay(trace, 10, "hybrid", skip_passes=5).misses == 0
    assert replay(trace, 10, "lru", skip_passes=5).misses == 6


def run_tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(TOOL.parents[1]), "COLUMNS": "160"}
    command = [sys.executable, str(TOOL), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture(scope="module")
def trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replay") / "trace"
    with TraceWriter(path, TraceHeader("qwen3moe", "tiny", (0, 1), 8, 2, (1000, 2000))) as writer:
        random = np.random.default_rng(1)
        for _ in range(30):
            writer.write({layer: random.permutation(8)[None, :2] for layer in (0, 1)})
    return path


def test_the_tool_prints_a_table(trace_file: Path) -> None:
    done = run_tool(str(trace_file), "--cache", "25%,12000")
    assert done.returncode == 0, done.stderr
    assert "tiny: 2 layers of 8 experts, 24 kB; 30 tokens" in done.stdout
    for text in ("lru", "lfu", "hybrid", "optimum", "6 kB 25%", "12 kB 50%"):
        assert text in done.stdout


def test_the_tool_prints_json(trace_file: Path) -> None:
    done = run_tool(str(trace_file), "--cache", "50%", "--skip", "5", "--json")
    printed = json.loads(done.stdout)
    assert printed["model"]["expert_bytes"] == [1000, 2000]
    by_policy = {row["policy"]: row for row in printed["results"]}
    assert by_policy.keys() == set(POLICY_NAMES)
    for row in by_policy.values():
        assert row["cache_bytes"] == 12000
        assert row["tokens"] == 25
        assert row["hits"] + row["misses"] == 100
        assert row["bytes_per_token"] == row["bytes_read"] / 25


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "many"], "size 'many'"),
        (["--lfu-weight", "2"], "from 0 to 1"),
        (["--skip", "30"], "has 30 forward passes"),
    ],
)
def test_the_tool_explains_mistakes(trace_file: Path, arguments: list[str], message: str) -> None:
    done = run_tool(str(trace_file), *arguments)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
