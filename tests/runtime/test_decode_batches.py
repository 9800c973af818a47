"""Decode steps of several sequences: the logits of each are those of a lone step, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running

from colibri_mmap import Engine, RamSettings
from colibri_mmap.runtime.generation import Generation, Request
from colibri_mmap.runtime.sources import IoMode
from colibri_mmap.runtime.tracefile import read_trace

MODELS = [
    "mixtral/mixtral.Q4_0",
    "mixtral/mixtral.F16",
    "gpt-oss/gpt-oss.MXFP4",
    "qwen3moe/qwen3moe.BF16",
    "phimoe/phimoe.F16",
    "llama4/llama4.F16",
    "lfm2moe/lfm2moe.F16",
    "qwen3next/qwen3next.BF16",
    "kimi-linear/kimi-linear.BF16",
    "deepseek-v3/deepseek-v3.BF16",
    "deepseek-v32/deepseek-v32.BF16",
    "glm-dsa/glm-dsa.BF16",
    "llama-dense/llama-dense.F16",
]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(3, 300, 1 + 7 * number % 40).tolist() for number in range(count)]


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_lone_steps(mini: Path, name: str, mode: str) -> None:
    """Batches of changing size and order, beyond every limit of another kernel form."""
    random = np.random.default_rng(1)
    with Running(mini / f"{name}.gguf", mode) as run:
        alone, together = ([run.sequence() for _ in range(64)] for _ in range(2))
        for sequences in (alone, together):
            for sequence, prompt in zip(sequences, prompts(64), strict=True):
                run.step((sequence, prompt))
        for count in (2, 64, 5, 9, 17, 5):
            chosen = random.permutation(64)[:count].tolist()
            tokens = random.integers(3, 300, (count, 1)).tolist()
            work = list(zip(chosen, tokens, strict=True))
            expected = [run.step((alone[number], token)) for number, token in work]
            got = run.step(*[(together[number], token) for number, token in work])
            assert np.array_equal(got, np.concatenate(expected))


# ------------------------------------------------------------------------------ what is read
def generations(engine: Engine, prompts: list[list[int]], tokens: int) -> list[Generation]:
    """Replies whose prompts are read."""
    requests = [Request(ids=ids, max_tokens=tokens, sampling=GREEDY) for ids in prompts]
    begun = [engine.prepare(request) for request in requests]
    for each in begun:
        each.begin(engine.new_sequence())
        each.advance(engine.run([each])[0])
    return begun


def decode(engine: Engine, replies: list[Generation]) -> int:
    """Let replies go on to their end, all in one step; how many experts were touched."""
    before = engine.counters()
    while not replies[0].finished:
        for each, row in zip(replies, engine.run(replies), strict=True):
            each.advance(row)
    used = engine.counters() - before
    return used.expert_hits + used.expert_misses


@pytest.mark.parametrize("count", [2, 7])
def test_an_expert_is_touched_once_in_a_step(mini: Path, tmp_path: Path, count: int) -> None:
    trace = tmp_path / "trace"
    with Engine.open(mini / "qwen3moe" / "qwen3moe.BF16.gguf", trace_file=trace) as engine:
        touched = decode(engine, generations(engine, prompts(count), 20))
    passes = read_trace(trace).passes[count:]
    assert {ids.shape[1] for ids in passes} == {1}
    steps = [np.concatenate(passes[at : at + count], 1) for at in range(0, len(passes), count)]
    assert len(steps) == 19
    assert touched == sum(len(np.unique(layer)) for step in steps for layer in step)


def test_the_same_text_twice_touches_half(mini: Path) -> None:
    with Engine.open(mini / "qwen3moe" / "qwen3moe.BF16.gguf") as engine:
        (prompt,) = prompts(1)
        alone = decode(engine, generations(engine, [prompt], 20))
        assert decode(engine, generations(engine, [prompt, prompt], 20)) == alone


@pytest.mark.parametrize("io", ["mmap", "pread", "direct"])
@pytest.mark.parametrize("budget", [0, 2, 9])
def test_more_experts_than_memory_holds(mini: Path, io: IoMode, budget: int) -> None:
    """A step of many replies uses nearly all experts of a layer, some of them at a time."""
    path = mini / "qwen3moe" / "qwen3moe.BF16.gguf"
    with Engine.open(path) as engine:
        expected = generations(engine, prompts(24), 12)
        decode(engine, expected)
    with Engine.open(path, memory=RamSettings(io=io, learn=False)) as engine:
        assert engine._pager is not None
        pager, size = engine._pager, int(engine._pager.source.sizes[0])
        pager.policy.budget = budget * size
        got = generations(engine, prompts(24), 12)
        pager.take_stats()
        touched = decode(engine, got)
        assert pager.stats.misses > touched / 4
        assert pager.stats.evicted
        pager.check_integrity()
    assert [each.ids for each in got] == [each.ids for each in expected]
