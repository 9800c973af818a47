"""Sequences longer than a limit have other rope frequencies, from their first token on."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from running import GREEDY
from variants import write_variant

from colibri_mmap import Engine

LIMIT = 20
IDS = np.random.default_rng(3).integers(5, 300, 40).tolist()


@pytest.fixture(scope="module")
def original(mini: Path) -> Path:
    return mini / "phimoe" / "phimoe.F16.gguf"


@pytest.fixture(scope="module")
def model(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a limit of 20 tokens."""
    target = tmp_path_factory.mktemp("rope") / "limited.gguf"
    key = "phimoe.rope.scaling.original_context_length"
    return write_variant(original, target, {key: LIMIT})


@pytest.fixture(scope="module")
def always_long(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with the long frequencies for every sequence."""
    target = tmp_path_factory.mktemp("rope") / "long.gguf"
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(original).tensors}
    factors = tensors["rope_factors_long.weight"]
    changed = {"rope_factors_short.weight": (factors.data, factors.tensor_type)}
    return write_variant(original, target, tensors=changed)


def logits(path: Path, ids: list[int]) -> np.ndarray:
    with Engine.open(path, mode="exact") as engine:
        return engine.logits(ids)


def test_the_length_of_the_sequence_decides(model: Path, original: Path, always_long: Path) -> None:
    short, long = IDS[:LIMIT], IDS[: LIMIT + 1]
    assert np.array_equal(logits(model, short), logits(original, short))
    assert np.array_equal(logits(model, long), logits(always_long, long))
    assert not np.array_equal(logits(model, long)[:LIMIT], logits(model, short))


def test_a_reply_that_passes_the_limit_is_computed_anew(model: Path) -> None:
    prompt, count = IDS[: LIMIT - 5], 12
    with Engine.open(model, mode="exact") as engine:
        said = [token.id for token in engine.generate(prompt, count, GREEDY)]
        for length in range(len(prompt), len(prompt) + count):
            known = (prompt + said)[:length]
            assert engine.logits(known)[-1].argmax() == said[length - len(prompt)]


def test_going_back_below_the_limit_computes_anew(model: Path) -> None:
    with Engine.open(model, mode="exact") as engine:
        expected = [token.id for token in engine.generate(IDS[:10], 5, GREEDY)]
        list(engine.generate(IDS, 3, GREEDY))
        assert engine.stats.cached_tokens == 0
        again = [token.id for token in engine.generate(IDS[:10], 5, GREEDY)]
        assert engine.stats.cached_tokens == 0
    assert again == expected
