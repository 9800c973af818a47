"""The memory options: each acts, none changes a reply; what is learned is kept between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import Colibri

from colibri_mmap.format.container import slab_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.tracefile import read_trace
from colibri_mmap.runtime.usage import load_usage

TOKENS = 20


@pytest.fixture
def model(mini: Path) -> Path:
    return next((mini / "qwen3moe").glob("*.gguf"))


@pytest.fixture
def usage(tmp_path: Path) -> Path:
    """Where the command keeps what it learns."""
    return tmp_path / "state" / "colibri-mmap" / "usage"


def reply(colibri: Colibri, model: Path, *options: str | Path) -> dict[str, object]:
    done = colibri(
        *("chat", "-m", model, "-p", "Hello", "--temp", "0", "-n", str(TOKENS)),
        *("--ignore-eos", "--json", *options),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_no_option_changes_a_reply(colibri: Colibri, model: Path) -> None:
    plain = reply(colibri, model, "--no-learn")
    options = ("--io", "direct", "--prefetch", "2", "--prefetch-threads", "1", "--lfu-weight", "0")
    changed = reply(colibri, model, *options, "--pin", "0:1,1:0-2", "--ram", "90%")
    assert changed["reply"] == plain["reply"]
    stats = changed["stats"]
    assert isinstance(stats, dict)
    assert stats["expert_hits"] + stats["expert_misses"] > 0
    assert 0 <= stats["wait_share"] <= 1


def test_prefetched_experts_are_counted(colibri: Colibri, model: Path) -> None:
    options = ("-p", "1", "-n", "12", "-r", "1", "--no-learn", "--io", "pread", "--json")
    for prefetch in ("0", "4"):
        done = colibri("bench", "-m", model, *options, "--prefetch", prefetch)
        (sample,) = json.loads(done.stdout)["samples"]
        assert bool(sample["prefetched_experts"]) == (prefetch != "0")
        assert sample["prefetch_hits"] <= sample["prefetched_experts"]


def test_the_routing_of_every_token_is_traced(
    colibri: Colibri, model: Path, tmp_path: Path
) -> None:
    prompt = 0
    for runs in (1, 2):
        stats = reply(colibri, model, "--trace", "routing.trace")["stats"]
        assert isinstance(stats, dict)
        prompt = stats["prompt_tokens"]
        trace = read_trace(tmp_path / "routing.trace")
        # the last token is sampled, but not computed with
        assert trace.tokens == runs * (prompt + TOKENS - 1)
        assert len(trace.passes) == runs * TOKENS


def test_uses_are_counted_unless_told_otherwise(colibri: Colibri, model: Path, usage: Path) -> None:
    gguf = open_gguf(model)
    reply(colibri, model, "--no-learn")
    assert not usage.exists()
    for runs in (1, 2):
        reply(colibri, model)
        found = load_usage(gguf, usage)
        assert found.tokens == runs * (TOKENS - 1)
        per_layer = found.counts.sum(axis=1)
        assert (per_layer == found.tokens * gguf.int(".expert_used_count")).all()


def test_hot_experts_are_packed_first(
    colibri: Colibri, model: Path, usage: Path, tmp_path: Path
) -> None:
    done = colibri("pack", model, "hot.gguf", "--order", "hot")
    assert done.returncode == 1
    assert b"generate some text" in done.stderr
    plain = reply(colibri, model)
    assert colibri("pack", model, "hot.gguf", "--order", "hot").returncode == 0
    packed = open_gguf(tmp_path / "hot.gguf")
    order = load_usage(packed, usage).order()
    for layer, slabs in slab_layers(packed).items():
        stored = sorted(range(len(slabs.index_of)), key=lambda expert: slabs.index_of[expert])
        assert stored == order[layer]
    assert reply(colibri, tmp_path / "hot.gguf")["reply"] == plain["reply"]


@pytest.mark.parametrize("options", [("--pin", "0:1", "--io", "direct"), ("--trace", "x.trace")])
def test_options_that_a_dense_model_cannot_obey(
    colibri: Colibri, mini: Path, options: tuple[str, ...]
) -> None:
    model = next((mini / "llama-dense").glob("*.gguf"))
    done = colibri("chat", "-m", model, "-p", "Hi", *options)
    assert done.returncode == 1
    assert b"has no experts" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--pin", "3"], "--pin 3: expected LAYER:EXPERT"),
        (["--pin", "99:0"], "--pin 99:0"),
        (["--prefetch", "many"], "--prefetch many"),
        (["--prefetch", "5000"], "--prefetch 5000"),
        (["--prefetch-threads", "0"], "--prefetch-threads 0"),
        (["--lfu-weight", "2"], "--lfu-weight 2"),
        (["--ram", "lots"], "'lots'"),
        (["--ram", "10M"], "--ram"),
        (["--trace", "absent/x.trace"], "absent/x.trace"),
    ],
)
def test_options_that_make_no_sense(
    colibri: Colibri, model: Path, options: list[str], names: str
) -> None:
    done = colibri("chat", "-m", model, "-p", "Hi", *options)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: ")
    assert names in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1
