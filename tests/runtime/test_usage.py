"""Usage counts: kept between runs, shared by the files of one model, safe against damage."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.usage import (
    MEMORY_TOKENS,
    load_usage,
    model_identity,
    save_usage,
)


def model(mini: Path, name: str = "qwen3moe") -> GGUF:
    return open_gguf(next((mini / name).glob("*.gguf")))


def counts(gguf: GGUF, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50, load_usage(gguf).counts.shape)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "colibri-mmap" / "usage"


def test_nothing_is_known_of_a_new_model(mini: Path, state: Path) -> None:
    gguf = model(mini)
    usage = load_usage(gguf)
    assert usage.counts.shape == (
        gguf.int(".block_count"),
        gguf.int(".expert_count"),
    )
    assert not usage.counts.any()
    assert not usage.rates().any()
    assert (usage.tokens, usage.notices, usage.hottest(), usage.order()) == (0.0, (), [], {})
    assert not state.exists(), "reading writes nothing"


def test_counts_of_runs_add_up(mini: Path, state: Path) -> None:
    gguf = model(mini)
    first, second = counts(gguf, 1), counts(gguf, 2)
    assert save_usage(gguf, first, 100) == ()
    assert save_usage(gguf, second, 20) == ()
    usage = load_usage(gguf)
    assert (usage.counts == first + second).all()
    assert usage.tokens == 120
    assert (usage.rates() == np.minimum((first + second) / 120, 1)).all()
    assert [path.name for path in state.iterdir()] == [f"{model_identity(gguf)}.json"]


def test_a_run_without_tokens_leaves_no_file(mini: Path, state: Path) -> None:
    gguf = model(mini)
    assert save_usage(gguf, counts(gguf), 0) == ()
    assert not state.exists()


def test_old_uses_fade(mini: Path) -> None:
    gguf = model(mini)
    old, new = counts(gguf, 1), counts(gguf, 2)
    save_usage(gguf, old, int(MEMORY_TOKENS))
    save_usage(gguf, new, int(MEMORY_TOKENS / 4))
    usage = load_usage(gguf)
    assert usage.tokens == MEMORY_TOKENS
    np.testing.assert_allclose(usage.counts, 0.75 * old + new, rtol=1e-6)
    save_usage(gguf, new, int(MEMORY_TOKENS * 2))
    assert (load_usage(gguf).counts == new).all(), "a run longer than the memory replaces it"


def test_hottest_and_order(mini: Path) -> None:
    gguf = model(mini)
    uses = np.zeros_like(counts(gguf))
    uses[1, [3, 0, 2]] = 9, 5, 7
    uses[0, 1] = 8
    save_usage(gguf, uses, 10)
    usage = load_usage(gguf)
    assert usage.hottest() == [(1, 3), (0, 1), (1, 2), (1, 0)]
    order = usage.order()
    assert order[1][:3] == [3, 2, 0]
    assert order[0][0] == 1
    assert all(sorted(experts) == list(range(uses.shape[1])) for experts in order.values())


def test_the_order_is_what_pack_takes(mini: Path, tmp_path: Path) -> None:
    gguf = model(mini)
    save_usage(gguf, counts(gguf), 10)
    packed = pack(gguf.path, tmp_path / "packed.gguf", order=load_usage(gguf).order())
    assert (load_usage(open_gguf(packed)).counts == load_usage(gguf).counts).all()


@pytest.mark.parametrize("name", ["qwen3moe", "qwen3moe-fused", "mixtral"])
def test_a_packed_model_shares_the_counts_of_its_source(
    mini: Path, tmp_path: Path, name: str
) -> None:
    gguf = model(mini, name)
    packed = open_gguf(pack(gguf.path, tmp_path / "packed.gguf"))
    assert model_identity(packed) == model_identity(gguf)


def test_quantisations_share_and_models_do_not(mini: Path) -> None:
    types = {model_identity(open_gguf(path)) for path in (mini / "mixtral").glob("*.gguf")}
    assert len(types) == 1
    names = ("mixtral", "olmoe", "qwen2moe", "qwen3moe", "llama-dense", "qwen3-dense")
    assert len({model_identity(model(mini, name)) for name in names}) == len(names)


def test_a_dense_model_has_nothing_to_count(mini: Path) -> None:
    usage = load_usage(model(mini, "llama-dense"))
    assert usage.counts.shape == (0, 0)
    assert usage.hottest() == []


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON",
        "[" * 100_000,
        "[]",
        "7",
        '{"tokens": 1}',
        '{"counts": [[1, 2]], "tokens": 1}',
        '{"counts": [[1, 2], [1]], "tokens": 1}',
        '{"counts": ONES, "tokens": null}',
        '{"counts": ONES, "tokens": Infinity}',
        '{"counts": ONES, "tokens": 1e999}',
        '{"counts": ONES, "tokens": -1}',
        '{"counts": ONES, "tokens": %s}' % ("9" * 400),
        '{"counts": NANS, "tokens": 1}',
        '{"counts": NEGATIVE, "tokens": 1}',
        b"\xff\xfe\x00",
    ],
)
def test_a_damaged_file_is_ignored_with_a_notice_and_replaced(
    mini: Path, state: Path, content: str | bytes
) -> None:
    gguf = model(mini)
    ones = np.ones_like(counts(gguf))
    save_usage(gguf, counts(gguf), 10)
    path = state / f"{model_identity(gguf)}.json"
    if isinstance(content, str):
        content = content.replace("ONES", str(ones.tolist()))
        content = content.replace("NANS", str(ones.tolist()).replace("1", "NaN"))
        content = content.replace("NEGATIVE", str((-ones).tolist())).encode()
    path.write_bytes(content)
    usage = load_usage(gguf)
    assert not usage.counts.any()
    assert [str(path) in notice for notice in usage.notices] == [True]
    assert "\n" not in usage.notices[0]
    assert save_usage(gguf, counts(gguf, 5), 7) == usage.notices
    repaired = load_usage(gguf)
    assert (repaired.counts == counts(gguf, 5)).all()
    assert repaired.notices == ()


def test_a_file_that_is_cut_short_is_noticed(mini: Path, state: Path) -> None:
    gguf = model(mini)
    save_usage(gguf, counts(gguf), 10)
    path = state / f"{model_identity(gguf)}.json"
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert load_usage(gguf).notices


def test_a_failed_write_leaves_no_temporary_file(mini: Path, state: Path) -> None:
    gguf = model(mini)
    path = state / f"{model_identity(gguf)}.json"
    path.mkdir(parents=True)
    unreadable, unwritable = save_usage(gguf, counts(gguf), 10)
    assert "cannot be read" in unreadable
    assert "cannot be written" in unwritable
    assert list(state.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_a_notice(mini: Path, state: Path) -> None:
    gguf = model(mini)
    state.parent.mkdir()
    state.write_text("a file where the directory should be")
    (notice,) = [text for text in save_usage(gguf, counts(gguf), 1) if "written" in text]
    assert str(state) in notice


def test_a_relative_state_directory_is_ignored(
    mini: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    gguf = model(mini)
    save_usage(gguf, counts(gguf), 1)
    assert (tmp_path / ".local/state/colibri-mmap/usage" / f"{model_identity(gguf)}.json").exists()


def test_another_directory_may_be_given(mini: Path, state: Path, tmp_path: Path) -> None:
    gguf = model(mini)
    save_usage(gguf, counts(gguf), 3, tmp_path / "here")
    assert load_usage(gguf, tmp_path / "here").tokens == 3
    assert not state.exists()


def save_many(path: Path, directory: Path, seed: int) -> None:
    gguf = open_gguf(path)
    for _ in range(20):
        save_usage(gguf, counts(gguf, seed), 5, directory)


def test_processes_that_save_together_leave_a_sound_file(mini: Path, tmp_path: Path) -> None:
    gguf = model(mini)
    context = multiprocessing.get_context("spawn")
    savers = [
        context.Process(target=save_many, args=(gguf.path, tmp_path, seed)) for seed in (1, 2)
    ]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert [saver.exitcode for saver in savers] == [0, 0]
    usage = load_usage(gguf, tmp_path)
    assert usage.notices == ()
    assert 100 <= usage.tokens <= 200
    assert len(list(tmp_path.iterdir())) == 1, "no temporary file remains"
