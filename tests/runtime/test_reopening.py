"""Conversations of real models go on after a restart as if there had been none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY

from colibri_mmap import Engine
from colibri_mmap.runtime.modelkey import model_key
from colibri_mmap.runtime.ops import Mode
from colibri_mmap.runtime.prefixstore import PrefixStore
from colibri_mmap.runtime.scheduler import Sequence

MODELS = {
    "mixtral": "mixtral/mixtral.Q8_0.gguf",
    "windows": "gpt-oss/gpt-oss.MXFP4.gguf",
    "chunks": "llama4/llama4.F16.gguf",
    "latents": "glm-dsa/glm-dsa.BF16.gguf",
    "recurrent": "qwen3next/qwen3next.BF16.gguf",
    "convolutions": "lfm2moe/lfm2moe.F16.gguf",
}
PLENTY = 1 << 30
IDS = np.random.default_rng(7).integers(3, 300, 4200).tolist()


Opened = tuple[Engine, PrefixStore]


@contextmanager
def opened(path: Path, directory: Path, mode: Mode = "int8") -> Iterator[Opened]:
    with Engine.open(path, mode=mode, threads=2, ctx=4500) as engine:
        store = engine.prefix_store(ram_bytes=PLENTY, directory=directory, disk_bytes=PLENTY)
        engine.store = store
        yield engine, store
        store.close()


def said(engine: Engine, ids: list[int], count: int) -> list[int]:
    return [token.id for token in engine.generate(ids, count, GREEDY)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["int8", "exact"])
def test_a_conversation_goes_on(mini: Path, tmp_path: Path, name: str, mode: Mode) -> None:
    """Two turns and a third one: uninterrupted, and with a restart in between."""
    path = mini / MODELS[name]
    first, second = IDS[:700], IDS[700:740]
    with opened(path, tmp_path / "a", mode) as (engine, _):
        reply = said(engine, first, 20)
        expected = said(engine, first + reply + second, 20)
    with opened(path, tmp_path / "b", mode) as (engine, _):
        assert said(engine, first, 20) == reply
    with opened(path, tmp_path / "b", mode) as (engine, store):
        assert said(engine, first + reply + second, 20) == expected
        assert engine.stats.cached_tokens == len(first) + 19
        assert store.status().tokens_from_disk == len(first) + 19


@pytest.mark.parametrize("name", ["mixtral", "windows", "recurrent"])
def test_a_long_prompt_is_not_read_again(mini: Path, tmp_path: Path, name: str) -> None:
    """The logits after 4096 tokens, bit by bit, with a restart before the last one."""
    path = mini / MODELS[name]
    with opened(path, tmp_path / "kept") as (engine, store):
        sequence = store.take(IDS[:4096])
        for start in range(0, 4095, 512):
            engine_step(engine, sequence, IDS[start : min(start + 512, 4095)])
            store.checkpoint(sequence)
        store.give(sequence)
        sequence = store.take(IDS[:4096])
        assert len(sequence.ids) == 4095
        expected = engine_step(engine, sequence, IDS[4095:4096])
        store.give(sequence)
    with opened(path, tmp_path / "kept") as (engine, store):
        sequence = store.take(IDS[:4096])
        assert sequence.ids == IDS[:4095]
        assert np.array_equal(engine_step(engine, sequence, IDS[4095:4096]), expected)


def engine_step(engine: Engine, sequence: Sequence, ids: list[int]) -> np.ndarray:
    return engine._step([(sequence, ids)], "last")


@pytest.mark.parametrize("name", ["windows", "recurrent"])
def test_the_same_prompt_again_starts_from_a_checkpoint(
    mini: Path, tmp_path: Path, name: str
) -> None:
    path = mini / MODELS[name]
    with opened(path, tmp_path / "a") as (engine, _):
        reply = said(engine, IDS[:1300], 12)
    with opened(path, tmp_path / "a") as (engine, _):
        assert said(engine, IDS[:1300], 12) == reply
        assert engine.stats.cached_tokens == 1024


def test_models_by_their_content(mini: Path, tmp_path: Path) -> None:
    """Copies are the same model; a change in one weight, the arithmetic or the cache is not."""
    source = mini / MODELS["mixtral"]
    copy, changed = tmp_path / "elsewhere.gguf", tmp_path / "changed.gguf"
    shutil.copy(source, copy)
    with Engine.open(source) as engine:
        info = engine.gguf.tensors["blk.1.attn_q.weight"]
        shapes = engine._model.kv_shapes
        keys = [
            model_key(engine.gguf, mode, kv_type, shapes)
            for mode, kv_type in (("int8", "f16"), ("exact", "f16"), ("int8", "f32"))
        ]
        keys.append(model_key(engine.gguf, "int8", "f16", shapes[:1]))
    content = bytearray(source.read_bytes())
    content[info.offset + 5] ^= 1
    changed.write_bytes(content)
    with Engine.open(changed) as engine:
        keys.append(model_key(engine.gguf, "int8", "f16", shapes))
    assert len(set(keys)) == len(keys)
    with Engine.open(copy) as engine:
        assert model_key(engine.gguf, "int8", "f16", shapes) == keys[0]
