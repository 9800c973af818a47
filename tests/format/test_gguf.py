"""The reader: real headers against gguf-py, values of every type, and look-ups."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
import rawgguf as raw
from gguf_oracle import assert_same_as_gguf_py
from rawgguf import ONE_TENSOR, ONE_TENSOR_DATA

from colibri_mmap.errors import FormatError
from colibri_mmap.format.gguf import GGUFArray, open_gguf

DATA = Path(__file__).parents[1] / "data"


@pytest.mark.parametrize("path", sorted(DATA.glob("mini/*/*.gguf")), ids=lambda path: path.name)
def test_mini_models_read_as_gguf_py_does(path: Path) -> None:
    assert_same_as_gguf_py(path)


@pytest.mark.fixtures
def test_every_reference_model_reads_as_gguf_py_does(shared_fixtures: Path) -> None:
    paths = [
        p for p in shared_fixtures.glob("*/*.gguf") if p.parent.name not in ("hostile", "split")
    ]
    assert len(paths) > 30
    for path in paths:
        assert_same_as_gguf_py(path)


def test_versions_2_and_3_read_alike(write) -> None:
    models = [
        open_gguf(write(raw.gguf((), ONE_TENSOR, ONE_TENSOR_DATA, version=v), f"{v}.gguf"))
        for v in (2, 3, 0x70003)  # the upper half of the number is not part of it
    ]
    assert [model.shards[0].version for model in models] == [2, 3, 3]
    assert models[0].tensors == models[1].tensors == models[2].tensors


def test_a_header_above_8_mib(write) -> None:
    tokens = ["x" * 1000] * 9000
    path = write(
        raw.gguf([raw.array_pair("tokens", raw.STRING, tokens)], ONE_TENSOR, ONE_TENSOR_DATA)
    )
    model = open_gguf(path)
    assert model.shards[0].data_offset > 8 << 20
    assert model.strs("tokens") == tuple(tokens)


# --- values


VALUES = [
    (raw.UINT8, 255), (raw.INT8, -128), (raw.UINT16, 65535), (raw.INT16, -32768),
    (raw.UINT32, 2**32 - 1), (raw.INT32, -(2**31)), (raw.UINT64, 2**64 - 1), (raw.INT64, -(2**63)),
    (raw.FLOAT32, 0.5), (raw.FLOAT64, 0.1), (raw.BOOL, True), (raw.STRING, "grüße 🐦"),
]  # fmt: skip


@pytest.mark.parametrize(("type", "value"), VALUES)
def test_values_of_every_type(opened, type: int, value: object) -> None:
    model = opened(raw.pair("one", type, value), raw.array_pair("many", type, [value, value]))
    assert model.metadata["one"] == value
    many = model.metadata["many"]
    assert isinstance(many, GGUFArray)
    assert many.tolist() == list(many) == [many[0], many[-1]] == many[:] == [value, value]
    assert len(many) == 2
    assert "many" in repr(many)
    if type != raw.STRING:
        numbers = many.numpy()
        assert numbers.dtype.itemsize == struct.calcsize(raw.CODES[type])
        assert numbers.flags.owndata
        assert numbers.tolist() == [value, value]


def test_any_byte_but_0_is_true(opened) -> None:
    head = struct.pack("<IIQ", raw.ARRAY, raw.BOOL, 3)
    assert opened(raw.text("flags") + head + bytes([0, 1, 2])).bools("flags") == (False, True, True)


def test_strings_are_not_numbers(opened) -> None:
    model = opened(raw.array_pair("words", raw.STRING, ["a"]))
    with pytest.raises(FormatError, match=r"'words'.*holds strings"):
        model.metadata["words"].numpy()


def test_a_list_handed_out_is_the_callers(opened) -> None:
    words = opened(raw.array_pair("words", raw.STRING, ["a"])).metadata["words"]
    words.tolist().clear()
    assert words.tolist() == ["a"]


def test_a_string_that_is_not_utf8_is_named_when_read(opened) -> None:
    model = opened(raw.array_pair("words", raw.STRING, ["a", b"\xff"]))
    with pytest.raises(FormatError, match=r"'words', element 1: .*UTF-8"):
        model.metadata["words"].tolist()


def test_metadata_cannot_be_changed(opened) -> None:
    with pytest.raises(TypeError):
        opened().metadata["x"] = 1


# --- look-ups


def test_look_ups(opened) -> None:
    model = opened(
        raw.pair("test.count", raw.UINT32, 7),
        raw.pair("scale", raw.FLOAT32, 0.5),
        raw.pair("on", raw.BOOL, False),
        raw.pair("name", raw.STRING, "n"),
        raw.array_pair("heads", raw.INT32, [1, 0, 2]),
        raw.array_pair("factors", raw.FLOAT32, [0.5, 1.5]),
        raw.array_pair("none", raw.INT32, []),
        raw.array_pair("words", raw.STRING, ["a", "b"]),
    )
    assert model.int(".count") == model.int("test.count") == 7
    assert model.int(".count", minimum=7, maximum=7) == 7
    assert model.int("lost", 3) == 3
    assert model.int("lost", None) is None
    assert model.float("scale") == 0.5
    assert type(model.float(".count")) is float
    assert model.float("lost", None) is None
    assert model.bool("on") is False
    assert model.bool("lost", True) is True
    assert model.str("name") == "n"
    assert model.str("lost", "x") == "x"
    assert model.ints("heads", 3) == model.ints("heads") == (1, 0, 2)
    assert model.ints(".count", 2) == (7, 7)
    assert model.ints("none") == ()
    assert model.ints("lost", 2, (1, 2)) == (1, 2)
    assert model.floats("factors", 2) == (0.5, 1.5)
    assert model.floats("scale", 3) == (0.5, 0.5, 0.5)
    assert model.floats("lost", 3, None) is None
    assert model.bools("on", 2) == (False, False)
    assert model.strs("words") == ("a", "b")


@pytest.mark.parametrize(
    ("look_up", "message"),
    [
        (lambda m: m.int("lost"), "'lost': is missing"),
        (lambda m: m.float(".lost"), "'test.lost': is missing"),
        (lambda m: m.bool("lost"), "'lost': is missing"),
        (lambda m: m.str("lost"), "'lost': is missing"),
        (lambda m: m.ints("lost", 2), "'lost': is missing"),
        (lambda m: m.int("scale"), "'scale': must be an integer, is 0.5"),
        (lambda m: m.int("on"), "'on': must be an integer, is True"),
        (lambda m: m.float("name"), "'name': must be a number, is 'n'"),
        (lambda m: m.bool("count"), "'count': must be a boolean, is 7"),
        (lambda m: m.str("count"), "'count': must be a string, is 7"),
        (lambda m: m.int("count", minimum=8), "'count': must be at least 8, is 7"),
        (lambda m: m.int("count", maximum=6), "'count': must be at most 6, is 7"),
        (lambda m: m.ints("heads", 4), "'heads': must hold 4 integers, holds 3"),
        (lambda m: m.ints("count"), "'count': must be an array of integers, is 7"),
        (lambda m: m.ints("scale", 2), "'scale': must be an array of integers"),
        (lambda m: m.strs("heads"), "'heads': must be an array of strings"),
        (lambda m: m.ints("count", 1 << 40), "'count': would have to stand for"),
    ],
)
def test_a_look_up_that_fails_names_the_key(opened, look_up, message: str) -> None:
    model = opened(
        raw.pair("count", raw.UINT32, 7),
        raw.pair("scale", raw.FLOAT32, 0.5),
        raw.pair("on", raw.BOOL, True),
        raw.pair("name", raw.STRING, "n"),
        raw.array_pair("heads", raw.INT32, [1, 0, 2]),
    )
    with pytest.raises(FormatError) as caught:
        look_up(model)
    assert message in str(caught.value)
    assert caught.value.path == model.path


def test_tensors_by_name_and_shape(write) -> None:
    tensors = [raw.tensor("a", [4, 2, 1]), raw.tensor("b", [1], offset=32)]
    model = open_gguf(write(raw.gguf((), tensors, bytes(36))))
    a = model.tensor("a", (4, 2))  # trailing ones do not count
    assert (a.name, a.shape, a.nbytes) == ("a", (4, 2, 1), 32)
    assert a.offset == model.shards[0].data_offset
    assert model.tensor("b", (1, 1, 1)).offset == a.offset + 32
    assert model.tensor("lost", optional=True) is None
    with pytest.raises(FormatError, match=r"'lost': is missing"):
        model.tensor("lost")
    with pytest.raises(FormatError, match=r"'a': has shape \[4, 2, 1\], expected \[2, 4\]"):
        model.tensor("a", (2, 4))
