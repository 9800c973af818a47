"""Every family against its oracle: one small model each, driven the same way.

A new family needs its folder in tests/data/mini and its entry in index.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running

from colibri_mmap import Engine
from colibri_mmap.runtime.kv import Trace

MINI = Path(__file__).parents[1] / "data" / "mini"


@dataclass(frozen=True)
class Case:
    """A model file, its oracle, and the largest difference of logits to accept."""

    model: Path
    oracle: Path
    tolerance: float

    def read(self) -> dict[str, np.ndarray]:
        with np.load(self.oracle) as arrays:
            return dict(arrays)


def cases() -> list[Case]:
    found = []
    for entry in json.loads((MINI / "index.json").read_text()).values():
        for part in (entry, *entry.get("quants", {}).values()):
            paths = MINI / part["file"], MINI / part["oracle"]["file"]
            found.append(Case(*paths, part["tolerance"]))
    return found


each_model = pytest.mark.parametrize("case", cases(), ids=lambda case: case.model.stem)


@each_model
def test_logits_equal_the_oracle(case: Case) -> None:
    oracle = case.read()
    with Engine.open(case.model, mode="exact") as engine:
        for prompt in range(3):
            logits = engine.logits(oracle[f"ids_{prompt}"])
            expected = oracle[f"logits_{prompt}"]
            assert logits.dtype == np.float32
            assert np.abs(logits[-len(expected) :] - expected).max() <= case.tolerance
            assert (logits.argmax(axis=1) == oracle[f"argmax_{prompt}"]).all()


@each_model
def test_greedy_ids_equal_the_oracle(case: Case) -> None:
    oracle = case.read()
    expected = oracle["greedy_1"].tolist()
    with Engine.open(case.model, mode="exact") as engine:
        tokens = engine.generate(oracle["ids_1"], len(expected), GREEDY)
        assert [token.id for token in tokens] == expected


@pytest.mark.parametrize(
    "case", [c for c in cases() if "topk_1" in c.read()], ids=lambda case: case.model.stem
)
def test_routing_equals_the_oracle(case: Case) -> None:
    oracle = case.read()
    trace = Trace()
    with Engine.open(case.model, mode="exact") as engine:
        engine.logits(oracle["ids_1"], trace=trace)
    layers = sorted(trace.experts)
    order = [np.argsort(trace.experts[layer], axis=1) for layer in layers]
    experts, weights = (
        np.stack([np.take_along_axis(by[n], o, 1) for n, o in zip(layers, order, strict=True)])
        for by in (trace.experts, trace.weights)
    )
    assert (experts == oracle["topk_1"]).all()
    assert np.abs(weights - oracle["topw_1"]).max() <= 1e-5


@each_model
def test_chunks_and_batches_change_last_bits_only(case: Case, measured) -> None:
    """The noise floor: what another chunk or batch size, decoding included, does to the logits."""
    ids = case.read()["ids_2"].tolist()
    with Running(case.model) as run:
        whole = run.in_chunks(ids, len(ids))
        others = [run.in_chunks(ids, size) for size in (1, 2, 4, 5, 16, 17)]
        first, second = run.sequence(), run.sequence()
        together = run.step((first, ids), (second, ids[::-1]))[: len(ids)]
    floor = max(np.abs(other - whole).max() for other in (*others, together))
    measured("noise floor of logits in exact mode", f"{case.model.stem}: {floor:.1e}")
    assert floor <= case.tolerance / 10
