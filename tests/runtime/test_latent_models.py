"""Latent and sparse attention in whole models: batches, streams, old files, and bad ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from running import GREEDY, Running
from variants import write_variant

from colibri_mmap import Engine
from colibri_mmap.errors import FormatError
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.ops import Mode
from colibri_mmap.runtime.ram import RamSettings

GLM, V32, V3 = (
    "glm-dsa/glm-dsa.BF16",
    "deepseek-v32/deepseek-v32.BF16",
    "deepseek-v3/deepseek-v3.BF16",
)
IDS = list(range(40, 76))  # more than the 16 keys that a token attends to

models = pytest.mark.parametrize("name", [GLM, V32, V3])


@models
@pytest.mark.parametrize("mode", ["int8", "exact"])
def test_sequences_stepping_together(mini: Path, name: str, mode: Mode) -> None:
    """A short sequence attends to all it sees, a long one beside it to what it selected."""
    path = mini / f"{name}.gguf"
    with Running(path, mode) as run:
        alone, together = [[run.sequence() for _ in range(2)] for _ in range(2)]
        for pair in (alone, together):
            for sequence, ids in zip(pair, (IDS, IDS[:6]), strict=True):
                run.step((sequence, ids))
        for token in (7, 9, 11):
            expected = [run.step((sequence, [token])) for sequence in alone]
            got = run.step(*((sequence, [token]) for sequence in together))
            assert np.array_equal(got, np.concatenate(expected))


@models
def test_a_cut_sequence_goes_on_as_a_fresh_one(mini: Path, name: str) -> None:
    with Running(mini / f"{name}.gguf") as run:
        fresh, reused = run.sequence(), run.sequence()
        for sequence in (fresh, reused):
            run.step((sequence, IDS[:20]))
        run.step((reused, IDS[::-1][:10]))
        reused.rewind(20)
        assert np.array_equal(run.step((reused, IDS[20:])), run.step((fresh, IDS[20:])))


@models
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_streamed_is_resident(mini: Path, tmp_path: Path, name: str, io) -> None:
    path, packed = mini / f"{name}.gguf", tmp_path / "packed.gguf"
    pack(path, packed)
    answers = []
    for file, budget in ((path, None), (path, 2), (packed, 2)):
        with Engine.open(file, memory=RamSettings(io=io, learn=False)) as engine:
            assert engine._tier is not None
            pager = engine._tier.pager
            assert pager is not None
            if budget is not None:
                pager.policy.budget = budget * int(pager.source.sizes[0])
                pager.distrusts = True
            said = [token.id for token in engine.generate(IDS, 8, GREEDY)]
            answers.append((said, engine.logits(IDS).tobytes()))
    assert answers[0] == answers[1] == answers[2]


# ------------------------------------------------------------------------------ old files
def test_quantised_keys_and_values_in_one_tensor(mini: Path, tmp_path: Path) -> None:
    """Split at open, they give what the same numbers give in float32."""
    kinds = gguf.GGMLQuantizationType
    source = mini / "deepseek-v2-lite-legacy-kvb" / "deepseek-v2-lite-legacy-kvb.F16.gguf"
    values = {
        tensor.name: tensor.data.astype(np.float32)
        for tensor in gguf.GGUFReader(source).tensors
        if "attn_kv_b" in tensor.name
    }
    blocks = {name: quantize(data, kinds.Q8_0) for name, data in values.items()}
    exact = {name: dequantize(data, kinds.Q8_0) for name, data in blocks.items()}
    answers = []
    for number, (tensors, kind) in enumerate(((blocks, kinds.Q8_0), (exact, kinds.F32))):
        typed = {name: (data, kind) for name, data in tensors.items()}
        path = write_variant(source, tmp_path / f"{number}.gguf", tensors=typed)
        with Engine.open(path, mode="exact") as engine:
            answers.append(engine.logits(IDS))
    assert np.abs(answers[0] - answers[1]).max() < 2e-5


# ------------------------------------------------------------------------------ bad files
KEYS: Mapping[str, list[object]] = {
    "attention.head_count": [None, 0],
    "attention.q_lora_rank": [None, 0],
    "attention.kv_lora_rank": [None, 0, 4096],
    "attention.key_length_mla": [0, 8],
    "attention.value_length_mla": [None, 0],
    "rope.dimension_count": [None, 0, 7, 1000],
    "attention.indexer.head_count": [None, 0],
    "attention.indexer.key_length": [None, 4],
    "attention.indexer.top_k": [None, 0, -1],
    "attention.indexer.types": [[False, True, True, True], [True]],
    "feed_forward_length": [None, 0],
    "expert_feed_forward_length": [None, 0],
    "expert_count": [None, 0],
    "expert_used_count": [None, 0, 5],
    "expert_gating_func": [3],
    "expert_group_count": [3],
    "nextn_predict_layers": [-1, 5],
}
# Values that only disagree are told by the key or tensor that does not fit.
BY_OTHER = {
    ("attention.q_lora_rank", 0): "q_lora_rank",
    ("attention.key_length_mla", 8): "key_length_mla",
    ("rope.dimension_count", 1000): "key_length_mla",
    ("nextn_predict_layers", 5): "block_count",
}


@pytest.mark.parametrize(("key", "value"), [(k, v) for k in KEYS for v in KEYS[k]], ids=repr)
def test_hyperparameters(mini: Path, tmp_path: Path, key: str, value: object) -> None:
    source = mini / f"{GLM}.gguf"
    path = write_variant(source, tmp_path / "model.gguf", {f"glm-dsa.{key}": value})
    hashable = value if not isinstance(value, list) else None
    with pytest.raises(FormatError) as raised:
        Engine.open(path)
    assert BY_OTHER.get((key, hashable), key) in raised.value.place
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "name",
    [
        "attn_kv_a_mqa",
        "attn_kv_a_norm",
        "attn_k_b",
        "attn_v_b",
        "attn_q_a_norm",
        "indexer.attn_k",
        "indexer.proj",
    ],
)
def test_missing_tensors(mini: Path, tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    write_variant(mini / f"{GLM}.gguf", path, without_tensor=f"blk.0.{name}.weight")
    with pytest.raises(FormatError, match=re.escape(f"'blk.0.{name}.weight': is missing")):
        Engine.open(path)


def test_the_block_that_guesses_ahead_is_not_used(mini: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    source = mini / f"{GLM}.gguf"
    write_variant(source, path, without_tensor="blk.4.attn_norm.weight")
    with Engine.open(path) as engine, Engine.open(source) as whole:
        assert np.array_equal(engine.logits(IDS), whole.logits(IDS))
        assert engine._tier is not None
        assert (
            engine._tier.plan.trunk_bytes
            < 200_000
            < sum(t.nbytes for t in engine.gguf.tensors.values())
        )
