"""State that is not per position: rewinding, several sequences, steps that are given up."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running

from colibri_mmap import Engine
from colibri_mmap.runtime.kv import KVCache, KVShape, RecurrentShape, Trace, cache_bytes

MODELS = ["lfm2moe", "qwen3next", "qwen35moe", "kimi-linear"]
IDS = [1, 17, 300, 45, 45, 212, 9, 130, 77, 5, 260, 31, 8, 99, 150, 3, 201, 64, 2, 118]
OTHER = [7, 7, 44, 290, 13, 181, 66, 23, 5, 310, 40, 41, 42, 19, 250, 33, 2, 61, 79, 100]
NOISE = 5e-5  # of logits: what another batch does to their last bits


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, mini: Path) -> Path:
    """A model with recurrent layers and others."""
    return next((mini / request.param).glob("*.gguf"))


class Interrupted(Trace):
    """Ctrl-C at the first layer with experts: it has mixed its tokens, later layers have not."""

    def record(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        raise KeyboardInterrupt


# ------------------------------------------------------------------------------ the cache
def cache(*shapes: KVShape | RecurrentShape) -> KVCache:
    return KVCache(shapes, 64, "f32")


def test_recurrent_state_does_not_grow_with_the_context() -> None:
    recurrent, attention = RecurrentShape(100), KVShape(2, 16, 16)
    assert cache_bytes([recurrent], 64, "f16") == cache_bytes([recurrent], 1 << 20, "f32")
    both = cache_bytes([recurrent, attention], 64, "f16")
    assert both == 2 * recurrent.nbytes + cache_bytes([attention], 64, "f16")
    assert 4 * recurrent.values <= recurrent.nbytes < 4 * recurrent.values + 64


def test_layers_and_states_do_not_overlap() -> None:
    shapes = [RecurrentShape(5), KVShape(1, 16, 20), RecurrentShape(33), KVShape(3, 16, 16)]
    kept = cache(*shapes)
    kept.begin(0, 1)
    places = [
        (address, shape.nbytes)
        for layer, shape in enumerate(shapes)
        if isinstance(shape, RecurrentShape)
        for address in kept.state(layer)
    ]
    for layer, place in kept.layers.items():
        heads = shapes[layer].heads
        places += [
            (place.keys, heads * place.key_head_stride),
            (place.values, heads * place.value_head_stride),
        ]
    places.sort()
    for (address, nbytes), (following, _) in pairwise(places):
        assert address % 64 == 0
        assert address + nbytes == following
    assert sum(nbytes for _, nbytes in places) == cache_bytes(shapes, 64, "f32")


def test_a_cut_keeps_the_ends_of_the_last_step_only() -> None:
    kept = cache(RecurrentShape(16))
    for start, end in ((0, 7), (7, 8), (8, 12)):
        kept.begin(start, end)
        kept.end(end)
    assert [kept.kept(length) for length in (0, 7, 8, 11, 12)] == [0, 0, 8, 0, 12]
    kept.begin(8, 9)  # the step to 12 is taken back
    assert [kept.kept(length) for length in (8, 12)] == [8, 0]
    kept.end(9)
    assert [kept.kept(length) for length in (8, 9, 12)] == [8, 9, 0]


def test_a_cut_keeps_everything_where_all_layers_have_keys() -> None:
    kept = cache(KVShape(1, 16, 16))
    kept.begin(0, 30)
    kept.end(30)
    assert [kept.kept(length) for length in (0, 11, 30)] == [0, 11, 30]


# ------------------------------------------------------------------------------ steps
def test_sequences_by_turns_equal_lone_ones(model: Path) -> None:
    with Running(model) as run:
        alone = run.in_chunks(IDS, 1), run.in_chunks(OTHER, 1)
        first, second = run.sequence(), run.sequence()
        turns = [
            (run.step((first, [a])), run.step((second, [b])))
            for a, b in zip(IDS, OTHER, strict=True)
        ]
    for logits, expected in zip(zip(*turns, strict=True), alone, strict=True):
        assert np.array_equal(np.concatenate(logits), expected)


def test_sequences_in_one_batch_equal_lone_ones(model: Path) -> None:
    with Running(model) as run:
        alone = run.in_chunks(IDS, len(IDS)), run.in_chunks(OTHER, len(OTHER))
        first, second = run.sequence(), run.sequence()
        begun = run.step((first, IDS[:3])), run.step((second, OTHER[:9]))
        both = run.step((first, IDS[3:]), (second, OTHER[9:]))
        rest = len(IDS) - 3
    assert np.abs(np.concatenate([begun[0], both[:rest]]) - alone[0]).max() <= NOISE
    assert np.abs(np.concatenate([begun[1], both[rest:]]) - alone[1]).max() <= NOISE


@pytest.mark.parametrize("known", [0, 1, 12])
def test_an_interrupted_step_changes_nothing(model: Path, known: int) -> None:
    with Running(model) as run:
        whole, cut = run.sequence(), run.sequence()
        for sequence in (whole, cut):
            for token in IDS[:known]:
                run.step((sequence, [token]))
        for tokens in (OTHER[:5], OTHER[:1], IDS[known:]):
            with pytest.raises(KeyboardInterrupt):
                run.step((cut, tokens), trace=Interrupted())
            assert cut.ids == IDS[:known]
        assert np.array_equal(run.step((cut, IDS[known:])), run.step((whole, IDS[known:])))


def test_the_last_step_can_be_taken_back(model: Path) -> None:
    with Running(model) as run:
        straight, back = run.sequence(), run.sequence()
        for sequence in (straight, back):
            run.step((sequence, IDS[:10]))
        run.step((back, OTHER[:4]))
        back.rewind(10)
        assert back.ids == IDS[:10]
        assert np.array_equal(run.step((back, IDS[10:])), run.step((straight, IDS[10:])))


@pytest.mark.parametrize("length", [0, 4, 11])
def test_a_longer_way_back_leads_to_the_start(model: Path, length: int) -> None:
    with Running(model) as run:
        used, fresh = run.sequence(), run.sequence()
        for part in (OTHER[:10], OTHER[10:12], OTHER[12:]):
            run.step((used, part))
        used.rewind(length)
        assert used.ids == []
        assert np.array_equal(run.step((used, IDS)), run.step((fresh, IDS)))


# ------------------------------------------------------------------------------ the engine
def generated(engine: Engine, ids: list[int]) -> list[int]:
    return [token.id for token in engine.generate(ids, 6, GREEDY)]


def fresh(model: Path, ids: list[int]) -> list[int]:
    with Engine.open(model, mode="exact") as engine:
        return generated(engine, ids)


def test_a_conversation_goes_on_from_its_state(model: Path) -> None:
    with Engine.open(model, mode="exact") as engine:
        reply = generated(engine, IDS)
        longer = IDS + reply + OTHER
        again = generated(engine, longer)
        assert engine.stats.cached_tokens == len(IDS) + len(reply) - 1
    assert again == fresh(model, longer)


@pytest.mark.parametrize("kept", [3, len(IDS)])
def test_another_conversation_starts_from_nothing(model: Path, kept: int) -> None:
    with Engine.open(model, mode="exact") as engine:
        generated(engine, IDS)
        other = IDS[:kept] + OTHER
        again = generated(engine, other)
        assert engine.stats.cached_tokens == 0
    assert again == fresh(model, other)


def test_a_reply_that_is_given_up_can_be_asked_for_again(model: Path) -> None:
    with Engine.open(model, mode="exact") as engine:
        tokens = engine.generate(IDS, 6, GREEDY)
        begun = [next(tokens).id for _ in range(3)]
        tokens.close()
        again = generated(engine, IDS)
    assert again[:3] == begun
    assert again == fresh(model, IDS)
