"""Profiles: kept by model and machine, used for what settings leave open, never trusted blindly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colibri_mmap import Engine
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.runtime.processor import default_threads
from colibri_mmap.runtime.profile import MachineRates, Profile, load_profile, save_profile
from colibri_mmap.runtime.ram import RamSettings

PROFILE = Profile(1, "pread", 2, 3, MachineRates(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), "8G", 7.5)


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "colibri-mmap" / "profiles"


@pytest.fixture
def model(mini: Path) -> Path:
    return next((mini / "qwen3moe").glob("*.gguf"))


@pytest.fixture
def gguf(model: Path) -> GGUF:
    return open_gguf(model)


def test_a_profile_comes_back(gguf: GGUF, mixtral: Path, state: Path) -> None:
    assert load_profile(gguf) is None
    path = save_profile(gguf, PROFILE)
    assert load_profile(gguf) == PROFILE
    assert [path] == list(state.iterdir())
    assert load_profile(open_gguf(mixtral)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"version": 0},
        {"threads": 0},
        {"threads": "2"},
        {"io": "tape"},
        {"prefetch": -1},
        {"rates": None},
        {"more": 1},
    ],
)
def test_a_profile_that_cannot_be_used_is_none(gguf: GGUF, change: dict[str, object]) -> None:
    path = save_profile(gguf, PROFILE)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_profile(gguf) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", "\xff"])
def test_a_damaged_file_is_none(gguf: GGUF, text: str) -> None:
    save_profile(gguf, PROFILE).write_bytes(text.encode("latin-1"))
    assert load_profile(gguf) is None


def test_it_fills_in_what_is_left_open() -> None:
    assert RamSettings().tuned(None) == RamSettings()
    filled = RamSettings(ram="1G").tuned(PROFILE)
    assert filled == RamSettings(ram="1G", io="pread", prefetch=2, prefetch_threads=3)
    said = RamSettings(io="mmap", prefetch=0, prefetch_threads=1)
    assert said.tuned(PROFILE) == said


def test_the_engine_uses_it(gguf: GGUF, model: Path) -> None:
    save_profile(gguf, PROFILE)
    with Engine.open(model) as engine:
        assert (engine.threads, engine.memory) == (1, RamSettings().tuned(PROFILE))
    with Engine.open(model, threads=2, memory=RamSettings(prefetch=0)) as engine:
        assert engine.threads == 2
        assert (engine.memory.prefetch, engine.memory.io) == (0, "pread")
    with Engine.open(model, profile=False) as engine:
        assert (engine.threads, engine.memory) == (default_threads(), RamSettings())
