"""Learning: uses are counted over runs, and the next run starts with the hottest experts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import GREEDY

from colibri_mmap import Engine
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.pager import ExpertPager
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.usage import load_usage

TOKENS = 12


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def model(mini: Path) -> Path:
    return next((mini / "qwen3moe").glob("*.gguf"))


def generated(engine: Engine) -> list[int]:
    ids = engine.tokenizer.encode("Hello")
    return [token.id for token in engine.generate(ids, max_tokens=TOKENS, sampling=GREEDY)]


def warmed(engine: Engine) -> ExpertPager:
    """The pager of an engine, once nothing is left to be read."""
    assert engine._tier is not None
    pager = engine._tier.pager
    assert pager is not None
    with pager._changed:
        idle = pager._changed.wait_for(lambda: not pager._warming and not pager._loading, 60)
    assert idle
    return pager


def test_the_hottest_are_there_before_they_are_asked_for(model: Path) -> None:
    buffered = RamSettings(io="pread")  # a buffer of its own starts empty, whatever is cached
    with Engine.open(model, memory=buffered) as engine:
        assert warmed(engine).policy.resident_keys() == []
        first = generated(engine)
        assert engine.stats.expert_misses > 0
    usage = load_usage(open_gguf(model))
    assert usage.tokens == TOKENS - 1
    with Engine.open(model, memory=buffered) as engine:
        pager = warmed(engine)
        numbers = pager.numbers
        resident = {
            (numbers.layers[index], expert) for index, expert in pager.policy.resident_keys()
        }
        assert resident == set(usage.hottest())
        assert generated(engine) == first
        assert engine.stats.expert_misses == 0
        assert engine.stats.expert_hits == (TOKENS - 1) * len(numbers.layers) * (
            engine.gguf.int(".expert_used_count")
        )


def test_counts_are_those_of_the_trace(model: Path, tmp_path: Path) -> None:
    from colibri_mmap.runtime.tracefile import read_trace

    with Engine.open(model, trace_file=tmp_path / "trace") as engine:
        generated(engine)
    trace = read_trace(tmp_path / "trace")
    usage = load_usage(open_gguf(model))
    counts = np.zeros_like(usage.counts)
    for ids in trace.passes:
        if ids.shape[1] == 1:
            for layer, chosen in zip(trace.header.layers, ids[:, 0], strict=True):
                counts[layer, chosen] += 1
    assert (usage.counts == counts).all()


def test_without_learning_nothing_is_written(model: Path, tmp_path: Path) -> None:
    with Engine.open(model, memory=RamSettings(learn=False)) as engine:
        generated(engine)
    assert not (tmp_path / "colibri-mmap").exists()


def test_a_read_only_home_costs_the_counts_only(model: Path, tmp_path: Path) -> None:
    (tmp_path / "colibri-mmap").write_text("in the way")
    with Engine.open(model) as engine:
        assert generated(engine)
