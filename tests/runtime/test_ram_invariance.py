"""How memory is used changes no bit of the logits and no token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY

from colibri_mmap import Engine
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.sources import IoMode

IO: tuple[IoMode, ...] = ("mmap", "pread", "direct")
MODELS = (
    "mixtral/mixtral.Q8_0",
    "qwen3moe/qwen3moe.BF16",
    "qwen3moe-fused/qwen3moe-fused.BF16",
    "gpt-oss/gpt-oss.MXFP4",
)
IDS = [1, 17, 300, 45, 45, 212, 9, 130, 77, 5, 260, 31, 8, 99, 150, 3, 201, 64, 2, 118]
TOKENS = 24

Answer = tuple[np.ndarray, list[int]]


def answer(
    path: Path, budget: int | None = None, cold: bool = False, **settings: object
) -> tuple[np.ndarray, list[int], int]:
    """Logits of a prompt, then the ids of a reply to it, and how many experts that missed.

    `budget` experts may stay in memory. `cold`: the page cache forgets the file now and then.
    """
    settings.setdefault("learn", False)
    memory = RamSettings(**settings)  # type: ignore[arg-type]
    with Engine.open(path, memory=memory) as engine:
        assert engine._tier is not None
        pager = engine._tier.pager
        assert pager is not None
        if budget is not None:
            pager.policy.budget = budget * int(pager.source.sizes[0])
            pager.distrusts = True
        forget(engine, cold)
        logits = engine.logits(IDS)
        forget(engine, cold)
        said = []
        for token in engine.generate(IDS, TOKENS, GREEDY):
            said.append(token.id)
            pager.audit()
            if len(said) % 7 == 0:
                forget(engine, cold)
        missed = engine.stats.expert_misses
    return logits, said, missed


def forget(engine: Engine, cold: bool) -> None:
    for file in engine._weights.files if cold else ():
        file.evict(0, file.size)


@pytest.fixture(scope="module")
def expected(mini: Path) -> Callable[[str], Answer]:
    """The answers with all settings as they are by default, and all of the model in memory."""
    known: dict[str, Answer] = {}

    def of(name: str) -> Answer:
        if name not in known:
            logits, said, _ = answer(mini / f"{name}.gguf")
            known[name] = logits, said
        return known[name]

    return of


def check(got: tuple[np.ndarray, list[int], int], expected: Answer) -> None:
    assert np.array_equal(got[0], expected[0])
    assert got[1] == expected[1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("budget", [0, 3, 9])
def test_budgets(mini: Path, expected: Callable, name: str, io: IoMode, budget: int) -> None:
    got = answer(mini / f"{name}.gguf", budget, io=io)
    check(got, expected(name))
    assert got[2] > TOKENS / 2, "experts must have been read again and again"


@pytest.mark.parametrize(
    "settings",
    [
        {"lfu_weight": 0.0},
        {"lfu_weight": 1.0},
        {"pin": ((0, 3), (1, 0))},
        {"prefetch": 2},
        {"prefetch": 8},
        {"prefetch": 8, "prefetch_threads": 4},
        {"prefetch": 2, "prefetch_threads": 1, "io": "pread"},
        {"prefetch": 8, "prefetch_threads": 4, "io": "direct"},
        {"prefetch_threads": 1},
        {"prefetch_threads": 4, "io": "direct"},
        {"learn": True},
        {"learn": True, "io": "pread"},
    ],
    ids=repr,
)
@pytest.mark.parametrize("budget", [None, 5])
def test_settings(mini: Path, expected: Callable, settings: dict, budget: int | None) -> None:
    check(answer(mini / f"{MODELS[0]}.gguf", budget, **settings), expected(MODELS[0]))


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("budget", [None, 4])
def test_cold_and_warm_caches(
    mini: Path, expected: Callable, io: IoMode, budget: int | None
) -> None:
    check(answer(mini / f"{MODELS[1]}.gguf", budget, cold=True, io=io), expected(MODELS[1]))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("io", IO)
def test_packed_files(
    mini: Path, tmp_path: Path, expected: Callable, name: str, io: IoMode
) -> None:
    packed = tmp_path / "packed.gguf"
    pack(mini / f"{name}.gguf", packed)
    check(answer(packed, 4, cold=True, io=io, prefetch=2), expected(name))


@pytest.mark.fixtures
@pytest.mark.parametrize("io", IO)
def test_split_files(shared_fixtures: Path, io: IoMode) -> None:
    logits, said, _ = answer(shared_fixtures / "mixtral-kq" / "mixtral-kq.Q4_K_M.gguf")
    check(answer(shared_fixtures / "split", 4, cold=True, io=io, prefetch=2), (logits, said))


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("budget", [0, 2, 6])
def test_long_prompts(mini: Path, io: IoMode, budget: int) -> None:
    """Several chunks, each streamed through a window of an expert or two, in several waves."""
    path = mini / f"{MODELS[1]}.gguf"
    random = np.random.default_rng(4)
    prompt = random.integers(3, 200, 1100).tolist()

    def run(engine: Engine) -> tuple[np.ndarray, list[int]]:
        logits = engine.logits(prompt)
        return logits[::50], [t.id for t in engine.generate(prompt, 8, GREEDY)]

    with Engine.open(path, ctx=1200, memory=RamSettings(learn=False)) as engine:
        expected = run(engine)
    with Engine.open(path, ctx=1200, memory=RamSettings(io=io, learn=False)) as engine:
        assert engine._tier is not None
        pager = engine._tier.pager
        assert pager is not None
        pager.policy.budget = budget * int(pager.source.sizes[0])
        pager.take_stats()
        got = run(engine)
        assert engine.stats.prompt_tokens == len(prompt)
        pager.check_integrity()
    assert np.array_equal(got[0], expected[0])
    assert got[1] == expected[1]
