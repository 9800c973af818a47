"""What a watcher sees of the experts is what they do."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY

from colibri_mmap import Engine
from colibri_mmap.runtime.expertview import DISK, RAM, ExpertView
from colibri_mmap.runtime.pages import forget_file
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.tracefile import read_trace


def seen_by(engine: Engine) -> ExpertView:
    view = engine.expert_view()
    assert view is not None
    return view


def looks_at_all(view: ExpertView) -> None:
    """Look until the kernel was asked about every expert."""
    before = view._next
    view.look()
    while view._next > before:
        before = view._next
        view.look()


@pytest.fixture
def model(mini: Path, tmp_path: Path) -> Path:
    """A copy, so that what is in memory of it is this test's doing."""
    return Path(shutil.copy(next((mini / "qwen3moe").glob("*.gguf")), tmp_path))


def test_the_experts_of_the_latest_tokens(model: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with Engine.open(model, memory=RamSettings(learn=False), trace_file=trace) as engine:
        view = seen_by(engine)
        ids = engine.tokenizer.encode("Hello")
        tokens = engine.generate(ids, max_tokens=6, sampling=GREEDY)
        used = []
        for _ in tokens:
            used.append(set(view.look().used.tolist()))
    assert used[0] == set()  # a prompt uses nearly all experts: it counts for nothing
    decoded = read_trace(trace).passes[1:]
    expected = [
        {layer * view.count + int(e) for layer, ids in enumerate(step[:, 0]) for e in ids}
        for step in decoded
    ]
    assert used[1:] == expected


def test_rates_are_uses_per_token(model: Path) -> None:
    with Engine.open(model, memory=RamSettings(learn=False)) as engine:
        view = seen_by(engine)
        ids = engine.tokenizer.encode("Hello")
        for _ in engine.generate(ids, max_tokens=40, sampling=GREEDY):
            pass
        look = view.look()
        sums = look.rates.sum(axis=1)  # of an average that began at 0 and has seen 39 tokens
        assert sums == pytest.approx(view.used_per_token * (1 - 0.99**39), rel=1e-6)
        assert ((look.rates >= 0) & (look.rates <= 1)).all()
        assert (look.rates.ravel()[look.used] > 0).all()
        assert view.look().used.size == 0


def test_experts_in_a_buffer_are_where_the_book_says(model: Path) -> None:
    memory = RamSettings(io="pread", learn=False)
    with Engine.open(model, memory=memory) as engine:
        view = seen_by(engine)
        assert (view.look().tiers == DISK).all()
        for _ in engine.generate(engine.tokenizer.encode("Hello"), max_tokens=4, sampling=GREEDY):
            pass
        tiers = view.look().tiers
        assert engine._tier is not None
        assert engine._tier.pager is not None
        resident = {tuple(key) for key in np.argwhere(tiers == RAM).tolist()}
        assert resident == set(engine._tier.pager.policy.resident_keys())
        assert int(view.sizes[tiers == RAM].sum()) == view.resident_bytes


def test_what_the_kernel_took_or_had_is_found(model: Path) -> None:
    model.read_bytes()
    with Engine.open(model, memory=RamSettings(learn=False)) as engine:
        view = seen_by(engine)
        looks_at_all(view)
        assert (view.look().tiers == RAM).all()  # in the page cache, though nobody asked for them
        assert engine._tier is not None
        pager = engine._tier.pager
        assert pager is not None
        numbers = range(pager.numbers.total)
        for number in numbers:  # behind the pager's back
            pager.source.evict(number)
        with model.open("rb") as file:
            forget_file(file.fileno())
        gone = [pager.source.resident(number) < 0.5 for number in numbers]
        looks_at_all(view)
        tiers = view.look().tiers.ravel()
        assert [tier == DISK for tier in tiers] == gone


def test_a_model_without_experts_has_no_view(mini: Path) -> None:
    with Engine.open(next((mini / "llama-dense").glob("*.gguf"))) as engine:
        assert engine.expert_view() is None
