"""The summary of a model, with numbers worked out by hand or by gguf-py."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import gguf
import pytest
import rawgguf as raw
from moe_files import write_model

from colibri_mmap.format.describe import describe
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.format.pack import pack

GATE_UP_DOWN = 3 * 64 * 32  # weights of an expert of the mini mixtral
MIXTRAL = "mixtral/mixtral.Q8_0.gguf"


def test_a_moe_model(mini: Path) -> None:
    path = mini / MIXTRAL
    told = describe(open_gguf(path))
    tensors = gguf.GGUFReader(path).tensors
    parameters = sum(int(tensor.n_elements) for tensor in tensors)
    by_type = {tensor.tensor_type.name: 0 for tensor in tensors}
    for tensor in tensors:
        by_type[tensor.tensor_type.name] += int(tensor.n_bytes)
    experts = 2 * 8 * GATE_UP_DOWN
    expert_bytes = GATE_UP_DOWN // 32 * 34
    assert told == {
        "files": [{"path": str(path), "bytes": path.stat().st_size}],
        "bytes": path.stat().st_size,
        "version": 3,
        "name": "Hf",
        "architecture": "llama",
        "layers": 2,
        "moe_layers": 2,
        "experts": 8,
        "experts_per_token": 2,
        "context_length": 4096,
        "tensors": len(tensors),
        "bytes_by_type": by_type,
        "parameters": parameters,
        "active_parameters": parameters - experts + experts * 2 // 8,
        "trunk_bytes": sum(by_type.values()) - 16 * expert_bytes,
        "expert_bytes": [expert_bytes],
        "experts_bytes": 16 * expert_bytes,
        "reads_per_expert": 3,
        "kv": {"heads": 2, "key_length": 16, "value_length": 16, "values_per_token": 2 * 2 * 32},
        "container": None,
    }


def test_a_container_says_the_same_of_its_model(mini: Path, tmp_path: Path) -> None:
    target = pack(mini / MIXTRAL, tmp_path / "packed.gguf", align=16384)
    before, after = describe(open_gguf(mini / MIXTRAL)), describe(open_gguf(target))
    layout = after.pop("container")
    changed = {"files", "bytes", "tensors", "container", "reads_per_expert"}
    assert {k: v for k, v in before.items() if k not in changed} == {
        k: v for k, v in after.items() if k not in changed
    }
    assert after["reads_per_expert"] == 1
    assert layout["sources"] == ["mixtral.Q8_0.gguf"]
    assert (layout["version"], layout["align"], layout["slabs"]) == (1, 16384, 16)
    assert layout["slab_bytes"] == [16384]
    assert layout["slabs_start"] % 16384 == 0


def test_every_summary_is_json(mini: Path) -> None:
    for path in mini.glob("*/*.gguf"):
        assert json.loads(json.dumps(told := describe(open_gguf(path)))) == told


@pytest.mark.fixtures
def test_reference_models_of_every_family(shared_fixtures: Path) -> None:
    for path in shared_fixtures.glob("mini/*/*.gguf"):
        told = describe(open_gguf(path))
        reader = gguf.GGUFReader(path)
        left_out = "blk.4." if path.stem.startswith("glm-dsa") else "none"  # it guesses ahead
        shapes = [t.shape for t in reader.tensors if not t.name.startswith(left_out)]
        assert told["parameters"] == sum(prod(map(int, shape)) for shape in shapes)
        assert told["kv"]["values_per_token"] > 0


def kv_of(tmp_path: Path, **values: int | list[int] | str) -> dict[str, object] | None:
    pairs = []
    for key, value in values.items():
        name = "test." + key.replace("__", ".")
        if isinstance(value, list):
            pairs.append(raw.array_pair(name, raw.UINT32, value))
        elif isinstance(value, str):
            pairs.append(raw.pair(name, raw.STRING, value))
        else:
            pairs.append(raw.pair(name, raw.UINT32, value))
    path = tmp_path / "model.gguf"
    path.write_bytes(raw.gguf(pairs, raw.ONE_TENSOR, raw.ONE_TENSOR_DATA))
    return describe(open_gguf(path))["kv"]


BASE = {"block_count": 2, "embedding_length": 64, "attention__head_count": 4}


@pytest.mark.parametrize(
    ("more", "values_per_token"),
    [
        ({}, 2 * 4 * 32),
        ({"attention__head_count_kv": [0, 2]}, 2 * 32),
        ({"attention__key_length": 24}, 2 * 4 * 40),
        ({"attention__kv_lora_rank": 32, "rope__dimension_count": 8}, 2 * 40),
        ({"attention__kv_lora_rank": 32}, 2 * 32),
    ],
)
def test_kv_geometry(tmp_path: Path, more: dict[str, int], values_per_token: int) -> None:
    told = kv_of(tmp_path, **BASE, **more)
    assert told is not None
    assert told["values_per_token"] == values_per_token


@pytest.mark.parametrize(
    "broken",
    [
        {"block_count": "two"},
        {"attention__head_count": 0},
        {"attention__head_count_kv": [1]},
        {"block_count": 1 << 31},
    ],
)
def test_no_kv_geometry_where_the_file_does_not_tell(tmp_path: Path, broken) -> None:
    assert kv_of(tmp_path, **(BASE | broken)) is None


def test_a_name_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    pairs = [raw.pair("general.name", raw.UINT32, 1)]
    path.write_bytes(raw.gguf(pairs, raw.ONE_TENSOR, raw.ONE_TENSOR_DATA))
    assert describe(open_gguf(path))["name"] is None


def test_a_container_without_experts(tmp_path: Path) -> None:
    source = tmp_path / "dense.gguf"
    source.write_bytes(raw.gguf((), raw.ONE_TENSOR, raw.ONE_TENSOR_DATA))
    layout = describe(open_gguf(pack(source, tmp_path / "packed.gguf")))["container"]
    assert (layout["slabs"], layout["slabs_start"], layout["slab_bytes"]) == (0, None, [])


def test_layers_of_different_size(tmp_path: Path) -> None:
    told = describe(open_gguf(write_model(tmp_path / "model.gguf", "stacked")))
    assert told["expert_bytes"] == sorted(2 * 32 * 68 + 64 * row + 512 for row in (18, 34))
