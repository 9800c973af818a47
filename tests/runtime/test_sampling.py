"""Sampling and stop strings against slow, obvious definitions."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.runtime.sampling import Sampler, Sampling, StopMatcher, log_probabilities

OFF: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.0}


def draws(
    logits: list[float],
    settings: Sampling,
    count: int = 400,
) -> Counter[int]:
    sampler = Sampler(settings, len(logits))
    values = np.array(logits, np.float32)
    return Counter(sampler.sample(values, ()) for _ in range(count))


def allowed_slowly(logits: np.ndarray, settings: Sampling) -> set[int]:
    """The tokens left by top-k, top-p and min-p, each written as its definition."""
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: settings.top_k or None]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    total = math.fsum(weights)
    kept = 0
    while kept < len(order) and math.fsum(weights[:kept]) < settings.top_p * total:
        kept += 1
    kept = kept if settings.top_p < 1 else len(order)
    return {i for i, w in zip(order[:kept], weights, strict=False) if w >= settings.min_p}


@given(
    logits=st.lists(st.integers(-8, 8), min_size=1, max_size=300),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.1, 0.37, 0.5, 0.83, 0.9501, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.051, 0.3, 1.0]),
)
def test_filters_follow_their_definitions(
    logits: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    settings = Sampling(temperature=50.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    values = np.array(logits, np.float32)
    allowed = allowed_slowly(values, settings)
    drawn = draws(list(map(float, logits)), settings, count=100)
    assert set(drawn) <= allowed
    if len(allowed) <= 5:  # nearly uniform at this temperature: every one of them turns up
        assert set(drawn) == allowed


@given(logits=st.lists(st.integers(-3, 3), min_size=1, max_size=200))
def test_greedy_takes_the_lowest_id_among_equals(logits: list[int]) -> None:
    sampler = Sampler(Sampling(temperature=0), len(logits))
    assert sampler.sample(np.array(logits, np.float32), ()) == logits.index(max(logits))


def test_top_k_of_a_large_vocabulary_is_exact() -> None:
    logits = np.random.default_rng(3).normal(size=152_064).round(3).astype(np.float32)
    settings = Sampling(temperature=1e6, top_k=40, top_p=1.0, min_p=0.0, seed=7)
    sampler = Sampler(settings, len(logits))
    order = np.lexsort((np.arange(len(logits)), -logits))
    assert {sampler.sample(logits, ()) for _ in range(1000)} == set(order[:40].tolist())


@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
@pytest.mark.parametrize("top_p", [0.001, 0.5, 0.95, 0.9999])
def test_top_p_of_a_large_vocabulary_is_exact(spread: float, top_p: float) -> None:
    """The draws are those from the whole vocabulary, sorted."""
    logits = np.random.default_rng(8).normal(size=50_000) * spread
    logits = logits.round(1 if spread == 6.0 else 7).astype(np.float32)  # with equal ones, too
    order = np.lexsort((np.arange(len(logits)), -logits))
    distance = (logits[order] - logits[order[0]]).astype(np.float64)
    reached = np.cumsum(np.exp(distance))
    kept = int(np.argmax(reached >= top_p * reached[-1])) + 1
    reached = np.cumsum(np.exp(distance[:kept] / 1.7))
    random = np.random.Generator(np.random.PCG64(3))
    expected = [int(order[np.argmax(reached > random.random() * reached[-1])]) for _ in range(25)]
    settings = Sampling(temperature=1.7, top_k=0, top_p=top_p, min_p=0.0, seed=3)
    sampler = Sampler(settings, len(logits))
    assert [sampler.sample(logits, ()) for _ in range(25)] == expected


@given(
    logits=st.lists(st.floats(-80, 80, width=32), min_size=1, max_size=300),
    count=st.integers(0, 12),
    token=st.integers(0, 299),
)
def test_log_probabilities(logits: list[float], count: int, token: int) -> None:
    token %= len(logits)
    highest = max(logits)
    total = highest + math.log(math.fsum(math.exp(x - highest) for x in logits))
    found = log_probabilities(np.array(logits, np.float32), token, count)
    assert found.chosen == pytest.approx(logits[token] - total, abs=1e-5)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:count]
    assert [i for i, _ in found.top] == order
    assert [p for _, p in found.top] == pytest.approx([logits[i] - total for i in order], abs=1e-5)


def test_frequencies_follow_the_probabilities() -> None:
    logits = [math.log(0.5), math.log(0.3), math.log(0.2)]
    drawn = draws(logits, Sampling(**OFF, seed=11), count=20_000)
    for token, probability in enumerate((0.5, 0.3, 0.2)):
        deviation = math.sqrt(probability * (1 - probability) / 20_000)
        assert abs(drawn[token] / 20_000 - probability) < 5 * deviation


def test_temperature_sharpens_and_flattens() -> None:
    logits = [1.0, 0.0]
    counts = [
        draws(logits, Sampling(**(OFF | {"temperature": t}), seed=5), 2000)[0]
        for t in (1e-300, 0.3, 1.0, 100.0)
    ]
    assert counts[0] == 2000
    assert counts == sorted(counts, reverse=True)
    assert 900 < counts[3] < 1100


def test_the_same_seed_gives_the_same_tokens() -> None:
    logits = np.random.default_rng(0).normal(size=500).astype(np.float32)

    def run(seed: int) -> list[int]:
        sampler = Sampler(Sampling(seed=seed, temperature=2.0), 500)
        return [sampler.sample(logits, ()) for _ in range(50)]

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_penalties_are_those_of_the_definition() -> None:
    """Positive logits are divided, others multiplied; then presence and counts are subtracted."""
    greedy: dict[str, Any] = {"temperature": 0}

    def best(logits: list[float], history: tuple[int, ...], **settings: Any) -> int:
        sampler = Sampler(Sampling(**greedy, **settings), len(logits))
        return sampler.sample(np.array(logits, np.float32), history)

    assert best([2.0, 1.1], (0,), repeat_penalty=2.0) == 1
    assert best([2.0, 0.9], (0,), repeat_penalty=2.0) == 0
    assert best([-1.0, -1.9], (0,), repeat_penalty=2.0) == 1
    assert best([2.0, 1.1], (0,), presence_penalty=1.0) == 1
    assert best([2.0, 1.1], (0, 0, 0), presence_penalty=0.8) == 0
    assert best([2.0, 1.1], (0, 0, 0), frequency_penalty=0.4) == 1
    assert best([2.0, 1.1], (0, 1, 1), presence_penalty=1.0, repeat_last_n=2) == 0
    assert best([2.0, 1.1], (0, 1, 1), presence_penalty=1.0, repeat_last_n=-1) == 0
    assert best([2.0, 1.1, 1.2], (0, 1, 1), presence_penalty=1.0, repeat_last_n=-1) == 2
    assert best([2.0, 1.1], (0,), presence_penalty=1.0, repeat_last_n=0) == 0


def test_logits_are_left_unchanged() -> None:
    logits = np.array([1.0, 2.0], np.float32)
    settings = Sampling(logit_bias={0: 5.0}, presence_penalty=1.0, seed=0)
    Sampler(settings, 2).sample(logits, (1,))
    assert logits.tolist() == [1.0, 2.0]


def test_bias_raises_lowers_and_forbids() -> None:
    assert set(draws([0.0, 9.0], Sampling(logit_bias={1: -math.inf}, seed=0), 50)) == {0}
    assert set(draws([0.0, 9.0], Sampling(logit_bias={0: 20.0}, temperature=0), 5)) == {0}
    assert set(draws([0.0, 9.0], Sampling(logit_bias={1: -9.5}, temperature=0), 5)) == {0}
    with pytest.raises(ArgumentError, match="forbids every token"):
        draws([0.0, -math.inf], Sampling(logit_bias={0: -math.inf}), 1)
    with pytest.raises(ArgumentError, match="2 is not a token id"):
        Sampler(Sampling(logit_bias={2: 1.0}), 2)


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -math.inf]
    assert set(draws(logits, Sampling(**OFF, seed=2), 1000)) == {1, 3}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_an_error(bad: float, temperature: float) -> None:
    for logits in ([0.0, bad, 1.0], [-math.inf] * 3):
        with pytest.raises(ColibriError, match="NaN or infinite logits"):
            draws(logits, Sampling(temperature=temperature), 1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repeat_penalty", 0.0),
        ("repeat_penalty", 1e-300),
        ("repeat_penalty", math.inf),
        ("presence_penalty", 1e30),
        ("repeat_last_n", -2),
        ("presence_penalty", math.nan),
        ("frequency_penalty", math.inf),
        ("seed", -1),
        ("stop", ("a", "")),
        ("logit_bias", {3: math.nan}),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=name):
        Sampling(**{name: value})


def stop_slowly(text: str, stops: list[str]) -> tuple[str, bool]:
    """Read character by character; the first stop string that is complete ends the text."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - len(max(found, key=len))], True
    return text, False


@given(
    pieces=st.lists(st.text("abc", max_size=6), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    text, shown, hit = "", "", False
    for piece in pieces:
        text += piece
        emitted, hit = matcher.push(piece)
        shown += emitted
        expected, expected_hit = stop_slowly(text, stops)
        assert hit == expected_hit
        assert expected.startswith(shown)
        assert not hit or shown == expected
        if not hit:  # only what may become a stop string is held back
            held = text[len(shown) :]
            assert not held or any(stop.startswith(held) for stop in stops)
            assert matcher.pending == bool(held)
    assert shown + matcher.flush() == stop_slowly(text, stops)[0]


def test_nothing_is_shown_after_a_stop() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one E") == ("one ", False)
    assert matcher.push("ND two") == ("", True)
    assert matcher.push("three") == ("", True)
    assert matcher.flush() == ""
