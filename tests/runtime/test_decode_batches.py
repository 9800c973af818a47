"""Decode steps of several sequences: the logits of each are those of a lone step, bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import Running

MODELS = [
    "mixtral/mixtral.Q4_0",
    "mixtral/mixtral.F16",
    "gpt-oss/gpt-oss.MXFP4",
    "qwen3moe/qwen3moe.BF16",
    "phimoe/phimoe.F16",
    "llama4/llama4.F16",
    "lfm2moe/lfm2moe.F16",
    "qwen3next/qwen3next.BF16",
    "kimi-linear/kimi-linear.BF16",
    "deepseek-v3/deepseek-v3.BF16",
    "deepseek-v32/deepseek-v32.BF16",
    "glm-dsa/glm-dsa.BF16",
    "llama-dense/llama-dense.F16",
]


def prompts(count: int) -> list[list[int]]:
    random = np.random.default_rng(count)
    return [random.integers(3, 300, 1 + 7 * number % 40).tolist() for number in range(count)]


@pytest.mark.parametrize("mode", ["int8", "exact"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_of_lone_steps(mini: Path, name: str, mode: str) -> None:
    """Batches of changing size and order, beyond every limit of another kernel form."""
    random = np.random.default_rng(1)
    with Running(mini / f"{name}.gguf", mode) as run:
        alone, together = ([run.sequence() for _ in range(64)] for _ in range(2))
        for sequences in (alone, together):
            for sequence, prompt in zip(sequences, prompts(64), strict=True):
                run.step((sequence, prompt))
        for count in (2, 64, 5, 9, 17, 5):
            chosen = random.permutation(64)[:count].tolist()
            tokens = random.integers(3, 300, (count, 1)).tolist()
            work = list(zip(chosen, tokens, strict=True))
            expected = [run.step((alone[number], token)) for number, token in work]
            got = run.step(*[(together[number], token) for number, token in work])
            assert np.array_equal(got, np.concatenate(expected))
