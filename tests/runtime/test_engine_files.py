"""Files at Engine.open: broken ones are refused by name, unsupported ones say what is supported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from variants import write_variant

from colibri_mmap import Engine
from colibri_mmap.errors import ColibriError, FormatError, UnsupportedError
from colibri_mmap.runtime.models import ARCHITECTURES

HOSTILE = Path(__file__).parents[1] / "data" / "hostile"
INDEX = json.loads((HOSTILE / "index.json").read_text())

OPEN_ALL = """
import json, resource, sys, time
from colibri_mmap import Engine
from colibri_mmap.errors import ColibriError

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

folder, names = sys.argv[1], sys.argv[2:]
Engine.open(f"{folder}/ok_control.gguf").close()  # compiles kernels
before = peak()
found = {}
for name in names:
    start = time.perf_counter()
    try:
        with Engine.open(f"{folder}/{name}") as engine:
            found[name] = ["", "", 0.0]
    except ColibriError as error:
        found[name] = [type(error).__name__, str(error), 0.0]
    found[name][2] = time.perf_counter() - start
print(json.dumps([found, peak() - before]))
"""


@pytest.fixture(scope="module")
def opened() -> tuple[dict[str, tuple[str, str, float]], float]:
    """Every hostile file opened in one process: error type, message and seconds; MiB of growth."""
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", OPEN_ALL, HOSTILE, *INDEX],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found, growth = json.loads(ran.stdout)
    return found, growth


@pytest.mark.parametrize("name", INDEX)
def test_hostile_files(name: str, opened) -> None:
    kind, message, seconds = opened[0][name]
    expected = INDEX[name]["expect"]
    must_reject = expected in ("reject", "reject (or byte-swap)")
    must_accept = re.match("accept(?! or)", expected) is not None
    if must_reject:
        assert kind == "FormatError"
    elif must_accept:
        assert kind == ""
    else:
        assert kind in ("", "FormatError")
    if kind == "FormatError":
        assert re.fullmatch(r"[^:\n]+/" + re.escape(name) + r": [^\n]+: [^\n]+", message)
    assert "\n" not in message
    assert seconds < 1


def test_hostile_files_take_little_memory(opened) -> None:
    assert opened[1] < 100


def test_weights_that_are_infinite_are_reported() -> None:
    with (
        Engine.open(HOSTILE / "m_inf_router.gguf") as engine,
        pytest.raises(ColibriError, match="NaN or infinite logits"),
    ):
        list(engine.generate([1], 2))


KEYS = {
    "block_count": [None, 0, 2**31 - 1],
    "context_length": [None, "long"],
    "embedding_length": [None, 0, 63],
    "feed_forward_length": [None, 0],
    "attention.head_count": [None, 0, 3, 1000],
    "attention.head_count_kv": [0, 3],
    "attention.layer_norm_rms_epsilon": [None, "tiny"],
    "expert_count": [4, 2**31 - 1],
    "expert_used_count": [None, 0, 9],
    "rope.dimension_count": [0, 15, 1000],
    "rope.freq_base": [-1.0, 1.0, float("nan"), float("inf")],
    "rope.scaling.factor": [-2.0, float("nan")],
}
# Values that only disagree with the tensors are told by the first tensor that does not fit.
BY_TENSOR = {("block_count", 2**31 - 1): "blk.2.", ("embedding_length", 63): "rope.dimension_count"}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k in KEYS for v in KEYS[k]])
def test_hyperparameters(mixtral: Path, tmp_path: Path, key: str, value: object) -> None:
    path = write_variant(mixtral, tmp_path / "model.gguf", {f"llama.{key}": value})
    with pytest.raises(FormatError) as raised:
        Engine.open(path)
    assert BY_TENSOR.get((key, value), key) in raised.value.place
    assert raised.value.path == path
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"attention.head_count_kv": None}, "tensor 'blk.0.attn_k.weight'"),
        ({"attention.head_count_kv": 1}, "tensor 'blk.0.attn_k.weight'"),
        ({"feed_forward_length": 33}, "gate experts of layer 0"),
        ({"block_count": 3}, "tensor 'blk.2.attn_norm.weight'"),
        ({"expert_count": None}, "tensor 'blk.0.ffn_gate.weight'"),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "context_length": 0},
            "key 'llama.rope.scaling.original_context_length'",
        ),
    ],
)
def test_hyperparameters_and_tensors_disagree(
    mixtral: Path, tmp_path: Path, changes: Mapping[str, object], place: str
) -> None:
    changes = {f"llama.{key}": value for key, value in changes.items()}
    path = write_variant(mixtral, tmp_path / "model.gguf", changes)
    with pytest.raises(FormatError) as raised:
        Engine.open(path)
    assert raised.value.place == place


@pytest.mark.parametrize(
    "name",
    ["token_embd", "output_norm", "blk.1.attn_norm", "blk.0.attn_v", "blk.1.ffn_gate_inp"],
)
def test_missing_tensors(mixtral: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_variant(mixtral, path, without_tensor=f"{name}.weight")
    with pytest.raises(FormatError, match=re.escape(f"tensor '{name}.weight': is missing")):
        Engine.open(path)


def test_unsupported_architecture(mixtral: Path, tmp_path: Path) -> None:
    path = write_variant(mixtral, tmp_path / "model.gguf", architecture="mamba")
    with pytest.raises(UnsupportedError, match="'mamba' is not supported") as raised:
        Engine.open(path)
    assert all(name in str(raised.value) for name in ARCHITECTURES)


def test_unsupported_rope_scaling(mixtral: Path, tmp_path: Path) -> None:
    changes = {"llama.rope.scaling.type": "spiral", "llama.rope.scaling.factor": 4.0}
    path = write_variant(mixtral, tmp_path / "model.gguf", changes)
    with pytest.raises(UnsupportedError, match="'spiral'; supported: none, linear, yarn"):
        Engine.open(path)


@pytest.mark.parametrize(("key", "unstated"), [("rope.freq_base", 0.0), ("context_length", 0)])
def test_zero_means_unstated(mixtral: Path, tmp_path: Path, key: str, unstated: float) -> None:
    path = write_variant(mixtral, tmp_path / "model.gguf", {f"llama.{key}": unstated})
    with Engine.open(path) as engine:
        assert engine.context_length == 4096
        assert len(engine.logits([1, 2])) == 2


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"not a model at all, but text"])
def test_other_files(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ColibriError, match=re.escape(str(path))) as raised:
        Engine.open(path)
    assert "\n" not in str(raised.value)
