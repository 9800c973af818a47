"""Layers with a window keep their window only, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running

from colibri_mmap import Engine
from colibri_mmap.runtime.attend import ALL_KEYS, Sight
from colibri_mmap.runtime.attention import Temperature
from colibri_mmap.runtime.kv import STEP_TOKENS, KVCache, KVShape, cache_bytes

WINDOW = 16  # of the small model
ROOM = 576  # positions: the window and a step, rounded up


@pytest.fixture
def model(mini: Path) -> Path:
    return mini / "gpt-oss" / "gpt-oss.MXFP4.gguf"


@pytest.fixture
def ids() -> list[int]:
    return np.random.default_rng(1).integers(3, 300, 1500).tolist()


def test_memory_is_that_of_the_window() -> None:
    full, windowed = KVShape(2, 16, 16), KVShape(2, 16, 16, WINDOW)
    assert cache_bytes([windowed], 100_000, "f32") == ROOM * 2 * 32 * 4
    assert cache_bytes([windowed], 100, "f32") == cache_bytes([full], 100, "f32")


def test_logits_are_those_of_a_cache_that_keeps_everything(model: Path, ids: list[int]) -> None:
    with Running(model) as run:
        ring, whole = run.sequence(len(ids)), run.sequence(len(ids), keep_all=True)
        start = 0
        for size in (STEP_TOKENS, 1, 100, STEP_TOKENS, 3, 1, 1, 300):
            part = ids[start : start + size]
            assert np.array_equal(run.step((ring, part)), run.step((whole, part)))
            start += size


def test_a_cut_keeps_what_the_window_needs() -> None:
    cache = KVCache([KVShape(1, 16, 16), KVShape(1, 16, 16, WINDOW)], 4096, "f32")
    for start in range(0, 2048, STEP_TOKENS):
        cache.begin(start, start + STEP_TOKENS)
        cache.end(start + STEP_TOKENS)
    earliest = 2048 - ROOM + WINDOW - 1
    assert cache.kept(2048) == 2048
    assert cache.kept(earliest) == earliest
    assert cache.kept(earliest - 1) == 0
    cache.begin(earliest, earliest + 1)  # what was written behind is not undone by this
    assert cache.kept(earliest) == earliest
    assert cache.kept(earliest - 1) == 0
    cache.begin(0, 20)
    assert cache.kept(10) == 10


@pytest.mark.parametrize(("common", "reused"), [(1300, 1300), (600, 0), (10, 0)])
def test_a_prompt_that_goes_back_too_far_is_read_again(
    model: Path, ids: list[int], common: int, reused: int
) -> None:
    prompt = [*ids[:common], ids[common] + 1, 5, 6]
    with Engine.open(model, mode="exact", ctx=2048) as engine:
        fresh = [token.id for token in engine.generate(prompt, 4, GREEDY)]
    with Engine.open(model, mode="exact", ctx=2048) as engine:
        list(engine.generate(ids, 2, GREEDY))
        again = [token.id for token in engine.generate(prompt, 4, GREEDY)]
        assert engine.stats.cached_tokens == reused
    assert again == fresh


def test_sight() -> None:
    assert ALL_KEYS.reach == 0
    assert Sight(window=128).reach == 128
    assert Sight(chunk=8192).reach == 8192


def test_temperature_grows_by_steps() -> None:
    positions = np.array([0, 8190, 8191, 16382, 16383, 8191 + 99 * 8192])
    expected = 1 + 0.1 * np.log1p([0, 0, 1, 1, 2, 100])
    assert np.allclose(Temperature(8192, 0.1).factors(positions), expected, rtol=1e-6)
