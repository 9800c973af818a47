"""The generator of benchmark models: valid blocks, the routing asked for, one seed one file."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize
from numpy.typing import NDArray

from colibri_mmap import Engine
from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.quants import GGMLType

PROGRAM = Path(__file__).parents[1] / "tools" / "make_bench_moe.py"
SMALL = {"layers": 8, "width": 512, "experts": 16, "top_k": 2, "hidden": 256}
SMALL |= {"heads": 4, "kv_heads": 2, "head_size": 64, "vocabulary": 2048}


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_bench_moe", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer(mini: Path) -> GGUF:
    return open_gguf(mini / "qwen3moe" / "qwen3moe.BF16.gguf")


def values(path: Path, name: str) -> NDArray[np.float32]:
    """A tensor in float32, by gguf-py."""
    tensor = next(t for t in gguf.GGUFReader(path).tensors if t.name == name)
    return dequantize(tensor.data, tensor.tensor_type)


@pytest.fixture(scope="module", params=[0.0, 1.0])
def model(
    request: pytest.FixtureRequest,
    maker: ModuleType,
    tokenizer: GGUF,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, float]:
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    maker.write(path, tokenizer, maker.Shape(**SMALL), zipf=request.param)
    return path, request.param


def test_types_are_those_of_q4_k_m(model: tuple[Path, float]) -> None:
    tensors = open_gguf(model[0]).tensors
    for layer in range(8):
        high = GGMLType.Q6_K if layer in (0, 3, 6, 7) else GGMLType.Q4_K
        for name in ("attn_v", "ffn_down_exps"):
            assert tensors[f"blk.{layer}.{name}.weight"].type is high
        for name in ("attn_q", "attn_k", "attn_output", "ffn_gate_exps", "ffn_up_exps"):
            assert tensors[f"blk.{layer}.{name}.weight"].type is GGMLType.Q4_K
    assert tensors["token_embd.weight"].type is GGMLType.Q4_K
    assert tensors["output.weight"].type is GGMLType.Q6_K


@pytest.mark.parametrize("name", ["blk.0.ffn_up_exps.weight", "output.weight"])
def test_weights_have_the_deviation_that_keeps_lengths(
    model: tuple[Path, float], name: str
) -> None:
    weights = values(model[0], name)
    assert weights.std() == pytest.approx(512**-0.5, rel=0.02)
    assert abs(weights.mean()) < 0.03 * weights.std()


def test_routing_is_as_skewed_as_asked_for(model: tuple[Path, float]) -> None:
    path, zipf = model
    embeddings = values(path, "token_embd.weight").astype(np.float64)
    embeddings /= np.sqrt((embeddings**2).mean(axis=1, keepdims=True))
    logits = embeddings @ values(path, "blk.0.ffn_gate_inp.weight").T
    assert logits.std(axis=0) == pytest.approx(np.ones(16), rel=0.1)
    popularity = np.sort(logits.mean(axis=0))[::-1]
    ranks = -zipf * np.log(np.arange(1, 17))
    assert popularity == pytest.approx(ranks - ranks.mean(), abs=0.1)


def test_layers_prefer_different_experts(model: tuple[Path, float]) -> None:
    path, _ = model
    mean = values(path, "token_embd.weight").mean(axis=0)
    favourites = {
        int((values(path, f"blk.{layer}.ffn_gate_inp.weight") @ mean).argmax())
        for layer in range(8)
    }
    assert len(favourites) > 2


def test_the_engine_runs_it_and_experts_matter_little(model: tuple[Path, float]) -> None:
    with Engine.open(model[0], mode="exact", ctx=64) as engine:
        logits = engine.logits(range(100, 140))
    assert np.isfinite(logits).all()
    assert 0.5 < logits.std() < 2


def test_one_seed_one_file(maker: ModuleType, tokenizer: GGUF, tmp_path: Path) -> None:
    shape = maker.Shape(**SMALL | {"layers": 1})
    contents = []
    for number, seed in enumerate((1, 1, 2)):
        path = tmp_path / f"{number}.gguf"
        maker.write(path, tokenizer, shape, seed=seed, zipf=0.5)
        contents.append(path.read_bytes())
    assert contents[0] == contents[1]
    assert len(contents[0]) == len(contents[2])
    assert contents[0] != contents[2]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0.gguf", "1.gguf", "2.gguf"]


def test_the_default_is_a_quarter_of_qwen3_30b_a3b(maker: ModuleType) -> None:
    total = sum(tensor.nbytes for tensor in maker.tensors(maker.Shape(), 0.0, None))
    assert total == 4_960_397_312
    whole = sum(tensor.nbytes for tensor in maker.tensors(maker.Shape(layers=48), 0.0, None))
    assert whole == 18_550_716_416


def test_refusals(maker: ModuleType, tokenizer: GGUF, mini: Path, tmp_path: Path) -> None:
    shape = maker.Shape(**SMALL)
    with pytest.raises(ArgumentError, match="must not be negative"):
        maker.write(tmp_path / "x.gguf", tokenizer, shape, zipf=-1)
    with pytest.raises(ArgumentError, match="no such directory"):
        maker.write(tmp_path / "no" / "x.gguf", tokenizer, shape)
    with pytest.raises(ArgumentError, match="tokens, more than 300"):
        maker.write(tmp_path / "x.gguf", tokenizer, maker.Shape(**SMALL | {"vocabulary": 300}))
    with pytest.raises(ResourceError, match="GB are free"):
        maker.write(tmp_path / "x.gguf", tokenizer, maker.Shape(width=1 << 20, hidden=1 << 20))
    with pytest.raises(ArgumentError, match="multiple of 256"):
        maker.Shape(width=1000)
    with pytest.raises(ArgumentError, match="top-k must be from 1 to 16"):
        maker.Shape(experts=16, top_k=17)
    assert not list(tmp_path.iterdir())
