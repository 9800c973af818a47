"""The larger reference models with all of their blocks on a device."""

from __future__ import annotations

import numpy as np
import pytest
from running import Running
from test_reference_models import PROMPTS, QUANTISED, ROUTED_OTHERWISE, Case, each

from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.hostkernels import execute

ON_CPU = {"deepseek2", "deepseek32", "glm-dsa", "kimi-linear", "lfm2moe", "qwen3next", "qwen35moe"}

pytestmark = pytest.mark.fixtures


def placeable(case: Case) -> bool:
    return open_gguf(case.model).architecture not in ON_CPU


@each([c for c in QUANTISED if placeable(c) and c.model.name not in ROUTED_OTHERWISE])
def test_the_error_is_that_of_rounded_activations(case: Case, measured) -> None:
    """A prompt at once, and 16 tokens at a time: no further from exact logits than llama.cpp."""
    oracle = case.read()
    with Running(case.model, "int8") as run:
        run.place(HostBackend(execute))
        errors = []
        for size in (512, 16):
            strayed = [
                np.abs(run.in_chunks(oracle[f"ids_{n}"].tolist(), size) - oracle[f"deq_{n}"]).mean()
                for n in PROMPTS
            ]
            errors.append(np.mean(strayed))
    measured(
        "on a device: mean |logits - exact| of prompts, of few tokens, and llama.cpp's",
        f"{case.model.name}: {errors[0]:.4f} {errors[1]:.4f} {case.int8_error:.4f}",
    )
    assert max(errors) <= 1.2 * case.int8_error


@each([c for c in QUANTISED if not placeable(c)])
def test_other_families_stay_on_the_cpu(case: Case) -> None:
    with Running(case.model, "int8") as run:
        layers, reason = run.supported_layers()
        assert layers == 0
        assert reason.endswith("runs on the CPU only")
