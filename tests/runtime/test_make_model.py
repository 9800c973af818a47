"""Models of random weights in real geometries: of the real sizes, and fit to run."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from variants import write_variant

from colibri_mmap import Engine
from colibri_mmap.demo.geometry import MODELS, Geometry, Grouped, Indexer
from colibri_mmap.demo.randommodel import tensors, write_model
from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.describe import describe
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.runtime.kv import cache_bytes

PROGRAM = Path(__file__).parents[2] / "tools" / "make_model.py"
BILLIONS = {
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671.0,
    "deepseek-v3.2": 671.9,
    "glm-4.7-flash": 29.9,
    "glm-5.2": 743.4,
    "kimi-k2": 1026.4,
    "qwen3-235b-a22b": 235.1,
}


def small(name: str, layers: int = 4) -> Geometry:
    """The model with its ways of attention and routing, and sizes that a test can afford."""
    model = MODELS[name].shortened(layers, None)
    attention = model.attention
    if isinstance(attention, Grouped):
        attention = Grouped(kv_heads=2, head_size=64)
    else:
        indexer = attention.indexer
        attention = replace(
            attention,
            q_rank=256 if attention.q_rank else 0,
            rank=256,
            plain=64,
            rotated=32,
            value_size=32,
            indexer=indexer and Indexer(4, 64, 16, indexer.every),
        )
    experts = replace(model.experts, count=16, hidden=256, groups=1, groups_used=1)
    sizes = {"width": 256, "heads": 8, "vocabulary": 512, "context": 4096, "dense_hidden": 512}
    return replace(model, **sizes, attention=attention, experts=experts)


@pytest.fixture(scope="module")
def tokenizer(mini: Path) -> GGUF:
    return open_gguf(mini / "qwen3moe" / "qwen3moe.BF16.gguf")


def test_sizes_are_the_real_ones() -> None:
    for name, model in MODELS.items():
        parameters = sum(math.prod(tensor.shape) for tensor in tensors(model))
        assert parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.06)


@pytest.mark.parametrize("name", MODELS)
def test_the_engine_runs_them(tokenizer: GGUF, tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tokenizer, small(name))
    with Engine.open(path, mode="exact", ctx=64) as engine:
        logits = engine.logits(range(100, 140))
        kv = describe(engine.gguf)["kv"]
        assert 2 * 64 * kv["values_per_token"] == cache_bytes(engine._model.kv_shapes, 64, "f16")
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2


def test_one_seed_one_file(tokenizer: GGUF, tmp_path: Path) -> None:
    contents = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.gguf"
        write_model(path, tokenizer, small("glm-5.2"), seed=seed)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert len(contents[0]) == len(contents[2])
    assert contents[0] != contents[2]


def test_a_sparse_file_has_all_but_the_experts(tokenizer: GGUF, tmp_path: Path) -> None:
    whole, sparse = tmp_path / "whole.gguf", tmp_path / "sparse.gguf"
    model = small("glm-5.2")
    write_model(whole, tokenizer, model)
    write_model(sparse, tokenizer, model, sparse=True)
    layer = expert_layers(open_gguf(whole))[3]
    experts = layer.expert_bytes * layer.n_experts
    assert sparse.stat().st_size == whole.stat().st_size
    assert sparse.stat().st_blocks * 512 < whole.stat().st_blocks * 512 - 0.9 * experts
    a, b = (np.fromfile(path, np.uint8) for path in (whole, sparse))
    for part in layer.parts.values():
        assert not b[part.offsets[0] : part.offsets[-1] + part.nbytes].any()
    first = int(min(part.offsets[0] for part in layer.parts.values()))
    assert np.array_equal(a[:first], b[:first])


def of_flash() -> Geometry:
    return replace(small("glm-4.7-flash", 47), vocabulary=MODELS["glm-4.7-flash"].vocabulary)


def of_v3() -> Geometry:
    experts = replace(small("deepseek-v3").experts, count=256, groups=8, groups_used=4)
    return replace(small("deepseek-v3"), experts=experts)


@pytest.mark.parametrize(
    ("model", "silent_about"),
    [
        (replace(small("glm-5.2", 8), context=1 << 20), ["attention.indexer.types"]),
        pytest.param(of_flash(), ["expert_gating_func"], marks=pytest.mark.slow),
        (of_v3(), ["expert_group_count", "expert_group_used_count"]),
    ],
    ids=["glm-5.2", "glm-4.7-flash", "deepseek-v3"],
)
def test_what_early_conversions_do_not_state(
    tokenizer: GGUF, tmp_path: Path, model: Geometry, silent_about: list[str]
) -> None:
    path = tmp_path / "model.gguf"
    write_model(path, tokenizer, model)
    gone = {f"{model.architecture}.{key}": None for key in silent_about}
    silent = write_variant(path, tmp_path / "silent.gguf", gone)
    answers = []
    for file in (path, silent):
        with Engine.open(file, ctx=64) as engine:
            answers.append(engine.logits(range(100, 140)))
    assert np.array_equal(*answers)


def test_the_program(mini: Path, tmp_path: Path) -> None:
    tokenizer = mini / "glm-dsa" / "glm-dsa.BF16.gguf"
    command = [sys.executable, PROGRAM, tmp_path / "x.gguf", "--tokenizer", tokenizer]
    wrong = subprocess.run([*command, "--model", "glm-9"], capture_output=True, text=True)
    assert wrong.returncode == 1
    assert "error: --model glm-9: choose deepseek-v2-lite" in wrong.stderr
    options = ["--model", "deepseek-v2-lite", "--layers", "2", "--sparse"]
    subprocess.run([*command, *options], capture_output=True, check=True)
    summary = describe(open_gguf(tmp_path / "x.gguf"))
    assert (summary["layers"], summary["experts"], summary["experts_per_token"]) == (2, 64, 6)
    assert summary["kv"]["values_per_token"] == 2 * 576


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="layers must be from 1 to 78, not 79"):
        MODELS["glm-5.2"].shortened(79, None)
    with pytest.raises(ArgumentError, match="dense layers must be from 0 to 2, not 3"):
        MODELS["glm-5.2"].shortened(2, 3)
