"""Experts with biases whose weights have no kernels: the slow way gives the same."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from running import Running
from variants import write_dequantised, write_variant

IDS = np.random.default_rng(2).integers(5, 300, 30).tolist()
TYPE = gguf.GGMLQuantizationType.IQ4_NL


def test_experts_without_kernels(mini: Path, tmp_path: Path) -> None:
    source = mini / "gpt-oss" / "gpt-oss.MXFP4.gguf"
    random = np.random.default_rng(1)
    tensors = {}
    for layer in range(2):
        raw = random.integers(0, 256, (8 * 64, 18), np.uint8)
        raw[:, :2] = np.full((len(raw), 1), 2e-3, np.float16).view(np.uint8)
        tensors[f"blk.{layer}.ffn_down_exps.weight"] = raw.reshape(8, 64, 18), TYPE
    path = write_variant(source, tmp_path / "slow.gguf", tensors=tensors)
    with Running(path) as run:
        whole = run.in_chunks(IDS, len(IDS))
        steps = run.in_chunks(IDS, 1)
    with Running(write_dequantised(path, tmp_path / "dequantised.gguf")) as run:
        expected = run.in_chunks(IDS, len(IDS))
    assert np.abs(whole - expected).max() <= 1e-4
    assert np.abs(steps - expected).max() <= 1e-4
