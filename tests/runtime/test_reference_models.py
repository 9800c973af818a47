"""The larger reference models: every position, every quantisation, both modes.

A folder belongs here as soon as its architecture is supported.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running
from variants import write_dequantised

from colibri_mmap import Engine
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.kv import Trace
from colibri_mmap.runtime.models import ARCHITECTURES

FIXTURES = Path(__file__).parents[3] / "shared" / "fixtures"
PROMPTS = range(3)

pytestmark = pytest.mark.fixtures


@dataclass(frozen=True)
class Case:
    """A model file and its oracle; `int8_error` is llama.cpp's own, None for exact weights.

    `deviates`: llama.cpp does not compute the official model, so that its logits are no oracle.
    """

    model: Path
    oracle: Path
    int8_error: float | None
    deviates: bool

    def read(self) -> dict[str, np.ndarray]:
        with np.load(self.oracle) as arrays:
            return dict(arrays)


def cases() -> list[Case]:
    found = []
    for meta in sorted(FIXTURES.glob("*/meta.json")):
        about = json.loads(meta.read_text())
        for name, info in about["files"].items():
            model, oracle = meta.parent / name, meta.parent / info["oracle"]
            if open_gguf(model).architecture in ARCHITECTURES:
                int8_error = info.get("native_vs_deq_mean")
                found.append(Case(model, oracle, int8_error, "llamacpp_f32" in about))
    return found


CASES = cases()
QUANTISED = [case for case in CASES if case.int8_error is not None]


def each(cases: list[Case]) -> pytest.MarkDecorator:
    absent = pytest.param(None, marks=pytest.mark.skip("the reference models are not there"))
    return pytest.mark.parametrize(
        "case", cases or [absent], ids=lambda case: case.model.name if case else "none"
    )


@each([case for case in CASES if case.int8_error is None or not case.deviates])
def test_exact_logits_and_greedy_ids(case: Case) -> None:
    """Against transformers; quantised weights against llama.cpp on the dequantised ones."""
    oracle = case.read()
    exact = case.int8_error is None
    expected, tolerance = ("logits", 3e-4) if exact else ("deq", 1e-3)
    with Engine.open(case.model, mode="exact") as engine:
        for prompt in PROMPTS:
            logits = engine.logits(oracle[f"ids_{prompt}"])
            assert np.abs(logits - oracle[f"{expected}_{prompt}"]).max() <= tolerance
        greedy = oracle["greedy_1" if exact else "deq_greedy_1"].tolist()
        tokens = engine.generate(oracle["ids_1"], len(greedy), GREEDY)
        assert [token.id for token in tokens] == greedy


@each([case for case in QUANTISED if case.deviates])
def test_exact_logits_of_quantised_and_of_dequantised_weights(case: Case, tmp_path: Path) -> None:
    oracle = case.read()
    dequantised = write_dequantised(case.model, tmp_path / "dequantised.gguf")
    with (
        Engine.open(case.model, mode="exact") as engine,
        Engine.open(dequantised, mode="exact") as other,
    ):
        for prompt in PROMPTS:
            ids = oracle[f"ids_{prompt}"]
            assert np.abs(engine.logits(ids) - other.logits(ids)).max() <= 1e-3


# Rounding changes the choice of experts for two tokens, which is a jump in models of random
# weights: 1.7 times the error of llama.cpp, whose rounding changes none here.
ROUTED_OTHERWISE = {"mixtral-kq.Q6_K.gguf"}


@each(QUANTISED)
def test_int8_error_is_that_of_rounded_activations(case: Case, measured) -> None:
    """The error, a mean of the prompts' means as in meta.json; and that of tokens routed alike."""
    oracle = case.read()
    errors, native, same = [], [], []
    with Engine.open(case.model, mode="int8") as engine:
        for prompt in PROMPTS:
            trace = Trace()
            logits = engine.logits(oracle[f"ids_{prompt}"], trace=trace)
            expected = oracle[f"deq_{prompt}"]
            errors.append(np.abs(logits - expected).mean(axis=1))
            native.append(np.abs(oracle[f"native_{prompt}"] - expected).mean(axis=1))
            same.append(np.full(len(logits), True))
            if trace.experts:
                chosen = [np.sort(trace.experts[layer], axis=1) for layer in sorted(trace.experts)]
                same[-1] = (np.stack(chosen) == oracle[f"topk_{prompt}"]).all(axis=(0, 2))
    error, equal = np.concatenate(errors), np.concatenate(same)
    measured(
        "int8 mode: mean |logits - exact| of all tokens, of those routed alike, and llama.cpp's",
        f"{case.model.name}: {error.mean():.4f} {error[equal].mean():.4f} "
        f"{np.concatenate(native).mean():.4f} ({np.count_nonzero(~equal)} routed otherwise)",
    )
    if case.model.name not in ROUTED_OTHERWISE:
        assert np.mean([e.mean() for e in errors]) <= 1.2 * case.int8_error
    assert error[equal].mean() <= 1.2 * case.int8_error
    # Every layer with experts chooses anew: with three, llama.cpp strays at as many tokens.
    assert np.count_nonzero(~equal) <= len(equal) * len(trace.experts) // 16


@each(QUANTISED)
def test_int8_decoding_and_prefill(case: Case, measured) -> None:
    """Last bits of a sum may round an activation the other way: less than the rounding itself."""
    ids = case.read()["ids_2"].tolist()
    with Running(case.model, "int8") as run:
        whole = run.in_chunks(ids, len(ids))
        changes = np.stack([np.abs(run.in_chunks(ids, size) - whole) for size in (1, 5, 17)])
    measured(
        "noise floor of logits in int8 mode, largest and mean",
        f"{case.model.name}: {changes.max():.1e} {changes.mean():.1e}",
    )
    assert changes.mean() <= case.int8_error / 2
