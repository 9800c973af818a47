"""What the engine promises to its callers: errors, endings, text, reuse."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from itertools import islice
from math import inf
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY
from variants import write_variant

from colibri_mmap import Engine, Sampling
from colibri_mmap.errors import ArgumentError, ContextLengthError, ResourceError, TemplateError
from colibri_mmap.runtime.kv import STEP_TOKENS

PROMPT = [5, 9, 33, 120, 7, 64]
USER = {"role": "user", "content": "Hi"}


@pytest.fixture
def engine(dense: Path) -> Iterator[Engine]:
    with Engine.open(dense, threads=2) as engine:
        yield engine


def only(engine: Engine, text: str) -> dict[int, float]:
    """A logit bias that leaves the single-character tokens of `text`."""
    allowed = {engine.tokenizer.encode(character, add_special=False)[0] for character in text}
    return {i: -inf for i in range(engine.tokenizer.vocab_size) if i not in allowed}


def ids_of(tokens) -> list[int]:
    return [token.id for token in tokens]


def kernel_threads() -> set[threading.Thread]:
    """Those of every pool that lives, that of the tests' own included."""
    return {thread for thread in threading.enumerate() if thread.name == "colibri-kernel"}


# ------------------------------------------------------------------------------ arguments
@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "fast"},
        {"kv_type": "q8"},
        {"threads": 0},
        {"threads": 5000},
        {"ctx": 0},
        {"ctx": -1},
    ],
)
def test_open_refuses_settings(dense: Path, settings: dict[str, object]) -> None:
    with pytest.raises(ArgumentError, match=r"choose|must") as raised:
        Engine.open(dense, **settings)
    assert "\n" not in str(raised.value)


def test_open_refuses_a_context_beyond_the_address_space(dense: Path) -> None:
    before = kernel_threads()
    with pytest.raises(ResourceError, match="choose a smaller context"):
        Engine.open(dense, ctx=10**15)
    assert kernel_threads() == before


def test_open_refuses_a_broken_template(dense: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.chat_template": "{% for %}"}
    path = write_variant(dense, tmp_path / "model.gguf", changes)
    before = kernel_threads()
    with pytest.raises(TemplateError, match="the chat template is invalid"):
        Engine.open(path)
    assert kernel_threads() == before


@pytest.mark.parametrize("call", ["logits", "generate"])
@pytest.mark.parametrize("ids", [[], [-1], [320], [1, 10**30], ["a"], [1.5], "text"])
def test_ids_are_checked_at_once(engine: Engine, call: str, ids: list[object]) -> None:
    with pytest.raises(ArgumentError, match=r"at least one|outside|integers") as r:
        getattr(engine, call)(ids)
    assert "\n" not in str(r.value)


def test_numpy_ids_and_lists_are_the_same(engine: Engine) -> None:
    ids = np.array(PROMPT, np.int32)
    assert np.array_equal(engine.logits(ids), engine.logits(PROMPT))
    assert ids_of(engine.generate(ids, 4, GREEDY)) == ids_of(engine.generate(PROMPT, 4, GREEDY))
    assert ids.tolist() == PROMPT


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
        ({"sampling": Sampling(logit_bias={320: 1.0})}, "320 is not a token id"),
    ],
)
def test_settings_are_checked_at_once(
    engine: Engine, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        engine.generate(PROMPT, **settings)


def test_prompts_that_fill_the_context(dense: Path) -> None:
    with Engine.open(dense, ctx=len(PROMPT)) as engine:
        with pytest.raises(ContextLengthError, match="6 tokens, the context holds 6"):
            engine.generate(PROMPT)
        with pytest.raises(ContextLengthError, match="larger context"):
            engine.chat([USER])
        assert ids_of(engine.generate(PROMPT[:5], sampling=GREEDY))
        assert engine.stats.finish_reason == "context"


# ------------------------------------------------------------------------------ endings
def test_finish_reasons(dense: Path) -> None:
    with Engine.open(dense, ctx=len(PROMPT) + 10) as engine:
        assert len(list(engine.generate(PROMPT, 4, GREEDY))) == 4
        assert engine.stats.finish_reason == "length"
        for limit in (None, 11):
            assert len(list(engine.generate(PROMPT, limit, GREEDY))) == 10
            assert engine.stats.finish_reason == "context"
        tokens = engine.generate(PROMPT, 4, GREEDY)
        next(tokens)
        tokens.close()
        assert engine.stats.finish_reason == "cancelled"


def test_end_tokens_end_unless_ignored(engine: Engine) -> None:
    lengths = set()
    for seed in range(20):
        settings = {"temperature": 1.5, "seed": seed}
        engine.reset()
        reply = ids_of(engine.generate(PROMPT, 40, Sampling(**settings, ignore_eos=True)))
        assert len(reply) == 40
        ends = [i for i, token in enumerate(reply) if token in engine.tokenizer.end_ids]
        length = min([*ends, 40])
        engine.reset()
        assert ids_of(engine.generate(PROMPT, 40, Sampling(**settings))) == reply[:length]
        assert engine.stats.finish_reason == ("stop" if ends else "length")
        lengths.add(length)
    assert len(lengths) > 2


def test_stop_strings_across_tokens(engine: Engine) -> None:
    bias = only(engine, "abcdefghijklm")
    settings = {"temperature": 1.0, "seed": 3, "logit_bias": bias}
    text = "".join(t.text for t in engine.generate(PROMPT, 30, Sampling(**settings)))
    assert len(text) == 30
    for start in range(25):
        stop = text[start : start + 3]
        sampling = Sampling(**settings, stop=("never", stop))
        shown = "".join(t.text for t in engine.generate(PROMPT, 30, sampling))
        assert shown == text[: text.index(stop)]
        assert engine.stats.finish_reason == "stop"
    held = Sampling(**settings, stop=(text[-2:] + "!",))
    assert "".join(t.text for t in engine.generate(PROMPT, 30, held)) == text
    assert engine.stats.finish_reason == "length"


# ------------------------------------------------------------------------------ text
@pytest.mark.parametrize("name", ["dense", "mixtral"])
def test_pieces_are_the_text_of_the_ids(request: pytest.FixtureRequest, name: str) -> None:
    """Any bytes: pieces of characters, invalid ones, and an incomplete one at the end."""
    with Engine.open(request.getfixturevalue(name)) as engine:
        for seed in range(20):
            sampling = Sampling(temperature=1.5, top_k=0, top_p=1.0, min_p=0.0, seed=seed)
            tokens = list(engine.generate(PROMPT, 25, sampling))
            text = "".join(token.text for token in tokens)
            decode = engine.tokenizer.decode
            assert text == decode(ids_of(tokens), skip_special=True, at_start=False)


def test_characters_split_over_tokens_come_whole(engine: Engine) -> None:
    parts = engine.tokenizer.encode("é", add_special=False)
    assert len(parts) == 2
    bias = {i: -inf for i in range(engine.tokenizer.vocab_size) if i not in parts}
    sampling = Sampling(temperature=9.0, top_p=1.0, min_p=0.0, seed=1, logit_bias=bias)
    tokens = list(engine.generate(PROMPT, 100, sampling))
    assert any(token.text.endswith("é") for token in tokens)
    text = "".join(token.text for token in tokens)
    assert text == engine.tokenizer.decode(ids_of(tokens), at_start=False)


# ------------------------------------------------------------------------------ sampling
def test_logit_bias(engine: Engine) -> None:
    first = ids_of(engine.generate(PROMPT, 1, GREEDY))[0]
    never = Sampling(temperature=0.0, ignore_eos=True, logit_bias={first: -inf})
    assert first not in ids_of(engine.generate(PROMPT, 20, never))
    always = Sampling(temperature=0.0, logit_bias={77: 1e4})
    assert ids_of(engine.generate(PROMPT, 5, always)) == [77] * 5


def test_seeds(engine: Engine) -> None:
    def reply(seed: int) -> list[int]:
        return ids_of(engine.generate(PROMPT, 20, Sampling(temperature=1.0, seed=seed)))

    assert reply(1) == reply(1) != reply(2)


# ------------------------------------------------------------------------------ state
def test_abandoned_generations_leave_no_trace(dense: Path) -> None:
    with Engine.open(dense) as fresh:
        expected = ids_of(fresh.generate(PROMPT, 12, GREEDY))
    with Engine.open(dense) as engine:
        for count in (1, 2, 7):
            tokens = engine.generate([*PROMPT[:4], 99, 98, 97], 20, GREEDY)
            list(islice(tokens, count))
            tokens.close()
            assert ids_of(engine.generate(PROMPT, 12, GREEDY)) == expected


def test_a_second_generation_ends_the_first(engine: Engine) -> None:
    expected = ids_of(engine.generate(PROMPT, 6, GREEDY))
    first = engine.generate(PROMPT[::-1], 10, GREEDY)
    next(first)
    assert ids_of(engine.generate(PROMPT, 6, GREEDY)) == expected
    with pytest.raises(ArgumentError, match="another generation was started"):
        list(first)


def test_reset_ends_the_generation(engine: Engine) -> None:
    tokens = engine.generate(PROMPT, 10, GREEDY)
    next(tokens)
    engine.reset()
    with pytest.raises(ArgumentError, match="cannot go on"):
        list(tokens)


def test_closing(dense: Path) -> None:
    before = kernel_threads()
    engine = Engine.open(dense, threads=3)
    assert len(kernel_threads() - before) == 2
    tokens = engine.generate(PROMPT, 10, GREEDY)
    next(tokens)
    engine.close()
    engine.close()
    assert kernel_threads() == before
    with pytest.raises(ArgumentError, match="the engine is closed"):
        list(tokens)
    for call in (engine.logits, engine.generate):
        with pytest.raises(ArgumentError, match="the engine is closed"):
            call(PROMPT)
    with pytest.raises(ArgumentError, match="the engine is closed"):
        engine.chat([USER])


def test_closing_while_another_thread_generates(dense: Path) -> None:
    """The step that is running ends first; at most one more token comes."""
    for _ in range(5):
        engine, failures = Engine.open(dense, threads=2), []
        begun = threading.Event()

        def generate(engine: Engine = engine, failures: list = failures, begun=begun) -> None:
            try:
                for _ in engine.generate(PROMPT, 100_000, GREEDY):
                    begun.set()
            except ArgumentError as error:
                failures.append(error)

        thread = threading.Thread(target=generate)
        thread.start()
        assert begun.wait(60)
        engine.close()
        thread.join(60)
        assert "the engine is closed" in str(failures[0])
        assert engine.stats.finish_reason == "cancelled"
        assert engine.stats.bytes_read >= 0


def test_logits_do_not_disturb_a_generation(engine: Engine) -> None:
    expected = ids_of(engine.generate(PROMPT, 8, GREEDY))
    tokens = engine.generate(PROMPT, 8, GREEDY)
    reply = []
    for token in tokens:
        reply.append(token.id)
        engine.logits([4, 5, 6])
    assert reply == expected


# ------------------------------------------------------------------------------ figures
def test_stats_and_progress(engine: Engine) -> None:
    prompt = PROMPT * 200
    calls: list[tuple[int, int]] = []
    reply = ids_of(engine.generate(prompt, 5, GREEDY, lambda *call: calls.append(call)))
    chunks = [*range(0, len(prompt), STEP_TOKENS), len(prompt)]
    assert calls == [(done, len(prompt)) for done in chunks]
    stats = engine.stats
    assert (stats.prompt_tokens, stats.cached_tokens) == (len(prompt), 0)
    assert stats.generated_tokens == len(reply) == 5
    assert 0 < stats.prefill_seconds <= stats.ttft_seconds
    assert stats.prefill_tokens_per_second == len(prompt) / stats.prefill_seconds
    assert stats.decode_tokens_per_second == 4 / stats.decode_seconds
    assert json.loads(json.dumps(stats.as_dict()))["finish_reason"] == "length"


# ------------------------------------------------------------------------------ chat
def test_chat_reuses_what_was_said(engine: Engine, dense: Path) -> None:
    """The reply is one whose text is tokenised as it was generated: a fresh engine agrees."""
    sampling = Sampling(temperature=0.0, logit_bias=only(engine, "W"))
    said = list(engine.chat([USER], 8, sampling))
    first_prompt = engine.stats.prompt_tokens
    text = "".join(token.text for token in said)
    assert engine.tokenizer.encode(text, add_special=False) == ids_of(said)
    history = [USER, {"role": "assistant", "content": text}, {"role": "user", "content": "More"}]
    reply = ids_of(engine.chat(history, 10, GREEDY))
    assert engine.stats.cached_tokens == first_prompt + len(said) - 1
    with Engine.open(dense) as fresh:
        assert ids_of(fresh.chat(history, 10, GREEDY)) == reply
        assert fresh.stats.cached_tokens == 0
        assert fresh.stats.prompt_tokens == engine.stats.prompt_tokens


def test_chat_after_a_stop_string(engine: Engine, dense: Path) -> None:
    """The tokens of the stop string are no part of the conversation."""
    sampling = Sampling(temperature=0.0, logit_bias=only(engine, "W"), stop=("WWWWW",))
    assert "".join(token.text for token in engine.chat([USER], 8, sampling)) == ""
    history = [USER, {"role": "assistant", "content": ""}, {"role": "user", "content": "More"}]
    reply = ids_of(engine.chat(history, 10, GREEDY))
    with Engine.open(dense) as fresh:
        assert ids_of(fresh.chat(history, 10, GREEDY)) == reply
        assert fresh.stats.prompt_tokens == engine.stats.prompt_tokens
