"""What must not change a single bit of the logits, and what may change the last ones."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running

from colibri_mmap import Engine
from colibri_mmap.format.pack import pack
from colibri_mmap.runtime.simd import FORM, FORMS

IDS = [1, 17, 300, 45, 45, 212, 9, 130, 77, 5, 260, 31, 8, 99, 150, 3, 201, 64, 2, 118]
MODES = ("int8", "exact")


def logits(path: Path, mode: str = "int8", **settings: int) -> np.ndarray:
    with Engine.open(path, mode=mode, **settings) as engine:
        return engine.logits(IDS)


@pytest.mark.parametrize("mode", MODES)
def test_threads(mixtral: Path, mode: str) -> None:
    one = logits(mixtral, mode, threads=1)
    for threads in (2, 3):
        assert np.array_equal(logits(mixtral, mode, threads=threads), one)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["mixtral", "qwen3moe-fused", "llama-dense"])
def test_packed_and_stock_files(mini: Path, tmp_path: Path, name: str, mode: str) -> None:
    source = sorted((mini / name).glob("*.gguf"))[-1]
    packed = tmp_path / "packed.gguf"
    pack(source, packed)
    assert packed.read_bytes() != source.read_bytes()
    assert np.array_equal(logits(packed, mode), logits(source, mode))


@pytest.mark.fixtures
def test_split_and_single_files(shared_fixtures: Path, tmp_path: Path) -> None:
    single = logits(shared_fixtures / "mixtral-kq" / "mixtral-kq.Q4_K_M.gguf")
    shards = sorted((shared_fixtures / "split").glob("*.gguf"))
    for path in (*shards, shards[0].parent):
        assert np.array_equal(logits(path), single)
    pack(shards[0], tmp_path / "packed.gguf")
    assert np.array_equal(logits(tmp_path / "packed.gguf"), single)


@pytest.mark.parametrize("name", ["with some spaces", "模型 文件", "🐦 колибри", "percent%20#?"])
def test_paths(mixtral: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    shutil.copy(mixtral, folder / f"{name}.gguf")
    expected = logits(mixtral)
    assert np.array_equal(logits(folder / f"{name}.gguf"), expected)
    assert np.array_equal(logits(folder), expected)


@pytest.mark.parametrize("mode", MODES)
def test_context_size(mixtral: Path, mode: str) -> None:
    with Running(mixtral, mode) as run:
        expected = run.step((run.sequence(len(IDS)), IDS))
        for context in (63, 64, 65, 4096, 1_000_000):
            assert np.array_equal(run.step((run.sequence(context), IDS)), expected)


@pytest.mark.parametrize("mode", MODES)
def test_reused_prefix(mixtral: Path, mode: str) -> None:
    """What is kept of an abandoned continuation is what a fresh sequence would hold."""
    with Running(mixtral, mode) as run:
        fresh = run.sequence()
        run.step((fresh, IDS[:12]))
        expected = run.step((fresh, IDS[12:]))
        reused = run.sequence()
        run.step((reused, IDS[:12]))
        run.step((reused, IDS[::-1]))
        run.step((reused, IDS[:1]))
        reused.rewind(12)
        assert np.array_equal(run.step((reused, IDS[12:])), expected)


def test_reused_prefix_of_a_generation(mixtral: Path) -> None:
    with Engine.open(mixtral) as engine:
        first = [token.id for token in engine.generate(IDS, 12, GREEDY)]
        longer = [*IDS, *first[:6]]
        more = [token.id for token in engine.generate(longer, 6, GREEDY)]
        assert engine.stats.cached_tokens == len(longer) - 1
        engine.reset()
        fresh = [token.id for token in engine.generate(IDS, 12, GREEDY)]
        assert engine.stats.cached_tokens == 0
    assert first == fresh
    assert more == first[6:]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [len(IDS), 1])
def test_sequences_stepping_together(dense: Path, mixtral: Path, mode: str, count: int) -> None:
    """A sequence does not notice its neighbours, where they do not move it to other kernels.

    Prompts of two sequences give an expert more tokens than one does, so they may be other kernels.
    """
    with Running(mixtral if count == 1 else dense, mode) as run:
        alone, together = [[run.sequence() for _ in range(2)] for _ in range(2)]
        for ids in (IDS[:count], IDS[-count:], IDS[3:4]):
            prompts = (ids, ids[::-1] if count > 1 else [7])
            expected = [run.step(pair) for pair in zip(alone, prompts, strict=True)]
            got = run.step(*zip(together, prompts, strict=True))
            assert np.array_equal(got, np.concatenate(expected))


DUMP = """
import sys
from colibri_mmap import Engine
from colibri_mmap.runtime.simd import FORM
assert FORM == sys.argv[2], FORM
with Engine.open(sys.argv[1]) as engine:
    sys.stdout.buffer.write(engine.logits(eval(sys.argv[3])).tobytes())
"""


BELOW = FORMS[FORMS.index(FORM) + 1 :]


@pytest.mark.parametrize(
    "form",
    [*BELOW[:1], *(pytest.param(form, marks=pytest.mark.slow) for form in BELOW[1:])],
)
def test_instruction_sets(mini: Path, form: str) -> None:
    model = mini / "mixtral" / "mixtral.Q8_0.gguf"
    ran = subprocess.run(
        [sys.executable, "-c", DUMP, model, form, repr(IDS)],
        env={**os.environ, "COLIBRI_SIMD": form},
        capture_output=True,
        check=True,
    )
    assert ran.stdout == logits(model).tobytes()


def test_forms_that_cannot_run_are_refused() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", "import colibri_mmap.runtime.simd"],
        env={**os.environ, "COLIBRI_SIMD": "avx1024"},
        capture_output=True,
        text=True,
    )
    assert "ArgumentError: COLIBRI_SIMD=avx1024: this CPU can run" in ran.stderr
