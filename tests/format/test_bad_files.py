"""Files that must be refused, and random ones that gguf-py wrote or that were damaged."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import rawgguf as raw
from gguf_oracle import assert_same_as_gguf_py
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rawgguf import ONE_TENSOR, ONE_TENSOR_DATA

from colibri_mmap.errors import ArgumentError, ColibriError, FormatError
from colibri_mmap.format.gguf import GGUFArray, open_gguf

DATA = Path(__file__).parents[1] / "data"


def model_with(*pairs: bytes, architecture: str = "test") -> bytes:
    return raw.gguf(pairs, ONE_TENSOR, ONE_TENSOR_DATA, architecture=architecture)


BAD_FILES = {
    "a string array that ends early": (
        raw.gguf([raw.array_pair("w", raw.STRING, ["a" * 40], length=3)], alignment=1),
        "beyond the end",
    ),
    "more strings than bytes": (
        raw.gguf([raw.array_pair("w", raw.STRING, [], length=9)]),
        "9 strings cannot fit",
    ),
    "a string longer than the file": (
        raw.gguf([raw.text("k") + struct.pack("<IQ", raw.STRING, 1000) + bytes(40)]),
        "truncated",
    ),
    "a number cut off": (
        raw.gguf([raw.pair("k", raw.UINT64, 1)], alignment=1)[:-4],
        "truncated",
    ),
    "text not in UTF-8": (model_with(raw.pair("k", raw.STRING, b"\xc3")), "not valid UTF-8"),
    "a key not in UTF-8": (model_with(raw.pair(b"\xc3", raw.UINT8, 1)), "not valid UTF-8"),
    "a tensor without dimensions": (raw.gguf((), [raw.tensor("t", [])]), "0 dimensions"),
    "alignment true": (model_with(raw.pair("general.alignment", raw.BOOL, True)), "power of two"),
    "no architecture": (model_with(architecture=""), "name of an architecture"),
    "split.count in words": (
        model_with(raw.pair("split.count", raw.STRING, "2")),
        "must be a count",
    ),
    "split.no below 0": (model_with(raw.pair("split.no", raw.INT32, -1)), "must be a count"),
}


@pytest.mark.parametrize("what", BAD_FILES)
def test_bad_headers_are_refused(write, what: str) -> None:
    content, message = BAD_FILES[what]
    with pytest.raises(FormatError, match=message):
        open_gguf(write(content))


def test_a_hostile_name_cannot_break_the_line(write) -> None:
    bad = raw.tensor("a\nb\x1b[31m", [0])
    with pytest.raises(FormatError) as caught:
        open_gguf(write(raw.gguf((), [bad])))
    assert str(caught.value).isprintable()


def test_absurd_counts_in_a_file_large_enough_for_them(write) -> None:
    path = write(raw.gguf([raw.array_pair("w", raw.STRING, [], 1 << 23)]))
    os.truncate(path, 1 << 30)  # sparse
    with pytest.raises(FormatError, match="8388608 strings"):
        open_gguf(path)


def test_paths_that_are_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ArgumentError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(ArgumentError, match="cannot be opened: No such file"):
        open_gguf(tmp_path / "lost.gguf")


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
keys = st.from_regex(r"[a-z]{1,8}(\.[a-z_]{1,8}){1,3}", fullmatch=True)
values = st.one_of(
    st.booleans(), texts, st.integers(-(2**31), 2**31 - 1),
    st.floats(width=32, allow_nan=False),
    st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=5),
    st.lists(texts, min_size=1, max_size=5), st.lists(st.booleans(), min_size=1, max_size=5),
)  # fmt: skip
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=4)
types = st.sampled_from([gguf.GGMLQuantizationType.Q4_0, gguf.GGMLQuantizationType.Q6_K, None])


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    metadata=st.dictionaries(keys, values, max_size=8),
    tensors=st.lists(st.tuples(shapes, types), min_size=1, max_size=5),
    alignment=st.sampled_from([8, 32, 4096]),
)
def test_what_gguf_py_writes_reads_the_same(tmp_path: Path, metadata, tensors, alignment) -> None:
    path = tmp_path / "random.gguf"
    writer = gguf.GGUFWriter(path, "random")
    writer.add_custom_alignment(alignment)
    for key, value in metadata.items():
        add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_int32,
               float: writer.add_float32, list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for number, (shape, type_) in enumerate(tensors):
        if type_ is None:
            writer.add_tensor(f"t{number}", np.ones(shape[::-1], np.float32))
        else:
            _, size = gguf.GGML_QUANT_SIZES[type_]
            bytes_shape = (*shape[:0:-1], shape[0] * size)
            writer.add_tensor(f"t{number}", np.ones(bytes_shape, np.uint8), raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_same_as_gguf_py(path)


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.integers(0, 2300), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 2400)),
)
def test_random_damage_is_refused_or_harmless(tmp_path: Path, edits, cut: int | None) -> None:
    content = bytearray((DATA / "hostile" / "ok_control.gguf").read_bytes())
    for position, byte in edits:
        content[position] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content[:cut])
    try:
        model = open_gguf(path)
        for value in model.metadata.values():
            if isinstance(value, GGUFArray):
                value.tolist()
        size = path.stat().st_size
        assert all(t.offset + t.nbytes <= size for t in model.tensors.values())
    except ColibriError as error:
        assert str(path) in str(error)  # noqa: PT017 refusing and opening are both right
