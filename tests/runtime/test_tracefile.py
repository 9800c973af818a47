"""Traces: what is written is read, and no damage gives a wrong pass."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.engine import Engine
from colibri_mmap.runtime.kv import Trace
from colibri_mmap.runtime.tracefile import MAGIC, TraceHeader, TraceWriter, read_trace

HEADER = TraceHeader("qwen3moe", "Ünïcode \U0001f426", (1, 2, 5), 300, 4, (100, 200, 100))


def random_pass(tokens: int, seed: int) -> dict[int, np.ndarray]:
    random = np.random.default_rng(seed)
    return {layer: random.integers(0, 300, (tokens, 4)) for layer in HEADER.layers}


def record(path: Path, tokens: list[int], header: TraceHeader = HEADER) -> None:
    with TraceWriter(path, header) as writer:
        for seed, count in enumerate(tokens):
            writer.write(random_pass(count, seed))


def assert_passes(path: Path, tokens: list[int], first_seed: int = 0) -> None:
    passes = read_trace(path).passes
    assert [ids.shape for ids in passes] == [(3, count, 4) for count in tokens]
    for seed, (ids, count) in enumerate(zip(passes, tokens, strict=True), first_seed):
        expected = random_pass(count, seed)
        for row, layer in enumerate(HEADER.layers):
            assert (ids[row] == expected[layer]).all()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [7, 1, 1, 30])
    assert_passes(path, [7, 1, 1, 30])
    trace = read_trace(path)
    assert trace.header == HEADER
    assert trace.tokens == 39


def test_the_layout_on_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    header = TraceHeader("a", "", (0,), 2, 2, (9,))
    with TraceWriter(path, header) as writer:
        writer.write({0: np.array([[1, 0]])})
    data = path.read_bytes()
    text = (
        b'{"architecture": "a", "name": "", "layers": [0], "n_experts": 2, "top_k": 2, '
        b'"expert_bytes": [9]}'
    )
    record_start = len(MAGIC) + 4 + len(text)
    assert data[:record_start] == MAGIC + len(text).to_bytes(4, "little") + text
    assert data[record_start : record_start + 4] == (1).to_bytes(4, "little")
    assert data[record_start + 8 :] == b"\1\0\0\0"


def test_a_pass_is_on_file_as_soon_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with TraceWriter(path, HEADER) as writer:
        writer.write(random_pass(2, 0))
        assert_passes(path, [2])


def test_a_trace_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [3])
    record(path, [3, 5])
    trace = read_trace(path)
    assert [ids.shape[1] for ids in trace.passes] == [3, 3, 5]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_a_torn_tail_is_dropped_and_overwritten(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("torn") / "trace"
    record(path, [])
    whole = [path.stat().st_size]
    for count in (2, 1, 3):
        record(path, [count])
        whole.append(path.stat().st_size)
    size = data.draw(st.integers(whole[0], whole[-1] - 1))
    with path.open("r+b") as file:
        file.truncate(size)
    kept = [2, 1, 3][: sum(size >= end for end in whole[1:])]
    assert [ids.shape[1] for ids in read_trace(path).passes] == kept
    record(path, [4])
    assert [ids.shape[1] for ids in read_trace(path).passes] == [*kept, 4]


def test_any_flipped_byte_ends_the_trace_before_its_record(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [2])
    first = path.stat().st_size
    record(path, [1])
    data = path.read_bytes()
    for position in range(first, len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        path.write_bytes(damaged)
        assert_passes(path, [2])


def test_an_expert_that_the_model_lacks_ends_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    with TraceWriter(path, HEADER) as writer:
        writer.write({layer: np.full((1, 4), 299) for layer in HEADER.layers})
        writer.write({layer: np.full((1, 4), 300) for layer in HEADER.layers})
    assert len(read_trace(path).passes) == 1


def test_traces_of_two_models_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    record(path, [1])
    other = TraceHeader("qwen3moe", "other", (1, 2, 5), 300, 4, (100, 200, 100))
    with pytest.raises(ArgumentError, match="of another model"):
        TraceWriter(path, other)
    assert_passes(path, [1])


@pytest.mark.parametrize(
    "content",
    [
        b"GGUF\3\0\0\0" + bytes(100),
        MAGIC,
        MAGIC + b"\x02\0\0\0[]",
        MAGIC + b"\x02\0\0\0{}",
        MAGIC + b"\xff\xff\xff\xff{}",
        MAGIC + b"\x02\0\0\0\xff\xfe",
    ],
)
def test_other_files_are_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace"
    path.write_bytes(content)
    with pytest.raises(FormatError):
        read_trace(path)
    with pytest.raises(FormatError):
        TraceWriter(path, HEADER)
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    "header",
    [
        TraceHeader("a", "", (0,), 2, 3, (9,)),
        TraceHeader("a", "", (0,), 1 << 17, 3, (9,)),
        TraceHeader("a", "", (0, 1), 2, 1, (9,)),
        TraceHeader("a", "", (), 2, 1, ()),
        TraceHeader("a", "", (0,), 2, 0, (9,)),
    ],
)
def test_senseless_headers_are_refused(tmp_path: Path, header: TraceHeader) -> None:
    path = tmp_path / "trace"
    TraceWriter(path, header).close()
    with pytest.raises(FormatError, match="damaged"):
        read_trace(path)


def test_paths_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be read"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ArgumentError, match="cannot be written"):
        TraceWriter(tmp_path / "missing" / "trace", HEADER)
    with pytest.raises(ArgumentError, match="cannot be written"):
        TraceWriter(tmp_path, HEADER)


def test_a_model_records_its_own_routing(mini: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    model = next((mini / "qwen3moe").glob("*.gguf"))
    gguf = open_gguf(model)
    with Engine.open(model, threads=1) as engine, TraceWriter(path, TraceHeader.of(gguf)) as writer:
        routed = []
        for ids in ([1, 2, 3, 4, 5], [7]):
            trace = Trace()
            engine.logits(ids, trace)
            writer.write(trace.experts)
            routed.append(trace.experts)
    read = read_trace(path)
    assert read.header.layers == tuple(expert_layers(gguf))
    for ids, experts in zip(read.passes, routed, strict=True):
        for row, layer in enumerate(read.header.layers):
            assert (ids[row] == experts[layer]).all()


def test_a_dense_model_has_no_routing(mini: Path) -> None:
    model = next((mini / "llama-dense").glob("*.gguf"))
    with pytest.raises(ArgumentError, match="has no experts"):
        TraceHeader.of(open_gguf(model))
