"""The container byte for byte, and containers that are cut, damaged, newer or inconsistent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import rawgguf as raw
import xxhash
from moe_files import write_model

from colibri_mmap.errors import FormatError, UnsupportedError
from colibri_mmap.format.arrays import ValueType
from colibri_mmap.format.container import header_checksum
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import GGUFArray, open_gguf
from colibri_mmap.format.header import read_header
from colibri_mmap.format.pack import pack
from colibri_mmap.format.verify import Verification, verify


def write_golden_source(path: Path) -> Path:
    """The model of docs/format.md: D = 32, F = 32, two experts of F16, Q8_0 and Q4_0."""
    pairs = [
        raw.pair("golden.block_count", raw.UINT32, 1),
        raw.pair("golden.expert_count", raw.UINT32, 2),
    ]
    tensors, data = [], b""
    for name, shape, type, nbytes in (
        ("output.weight", [32, 2], 1, 128),
        ("blk.0.ffn_down_exps.weight", [32, 32, 2], 2, 32 * 18 * 2),
        ("blk.0.ffn_gate_exps.weight", [32, 32, 2], 1, 32 * 64 * 2),
        ("blk.0.ffn_up_exps.weight", [32, 32, 2], 8, 32 * 34 * 2),
        ("token_embd.weight", [32, 2], 0, 256),
    ):
        tensors.append(raw.tensor(name, shape, type, len(data)))
        data += bytes((len(data) + 7 * i) % 251 for i in range(nbytes))
    path.write_bytes(raw.gguf(pairs, tensors, data, architecture="golden"))
    return path


def test_golden_bytes(data: Path, tmp_path: Path) -> None:
    source = write_golden_source(tmp_path / "golden-source.gguf")
    target = pack(source, tmp_path / "golden.gguf")
    assert target.read_bytes() == (data / "container.gguf").read_bytes()


def test_the_specification_shows_the_golden_container(data: Path) -> None:
    text = (data.parents[1] / "docs" / "format.md").read_text()
    model = open_gguf(data / "container.gguf")
    for key, value in model.metadata.items():
        shown = value.tolist() if isinstance(value, GGUFArray) else value
        assert f"{key} = {shown}" in text
    for info in model.tensors.values():
        assert f"{info.name} {info.type.name} {list(info.shape)} at {info.offset}" in text


def test_checksums_are_those_of_the_specification(data: Path) -> None:
    path = data / "container.gguf"
    model, content = open_gguf(path), path.read_bytes()
    slabs = model.tensors["blk.0.ffn_exps.0"]
    assert model.ints("colibri.blk.0.ffn_exps.0.checksums") == tuple(
        xxhash.xxh3_64_intdigest(content[slabs.offset + 4096 * i :][:4096]) for i in range(2)
    )
    trunk = [model.tensors[name] for name in ("token_embd.weight", "output.weight")]
    assert model.ints("colibri.trunk.checksums") == tuple(
        xxhash.xxh3_64_intdigest(content[info.offset :][:4096]) for info in trunk
    )
    header = content[: model.shards[0].data_offset]
    own = header.index(b"colibri.header.checksum") + 23 + 4
    blank = header[:own] + bytes(8) + header[own + 8 :]
    assert model.int("colibri.header.checksum") == xxhash.xxh3_64_intdigest(blank)


# --- containers that are wrong


@pytest.fixture
def container(tmp_path: Path) -> Path:
    return pack(write_model(tmp_path / "source.gguf", "stacked"), tmp_path / "container.gguf")


def rewritten(path: Path, change: Callable[[dict[str, bytes], list[bytes]], None]) -> Path:
    """The container with changed pairs and tensors, and a right header checksum again."""
    header = read_header(path)
    content = path.read_bytes()
    pairs = {key: content[slice(*span)] for key, span in header.spans.items()}
    start = header.shard.data_offset
    tensors = [
        raw.tensor(info.name, info.shape, info.type, info.offset - start) for info in header.tensors
    ]
    change(pairs, tensors)
    unsigned = raw.gguf(
        list(pairs.values()), tensors, content[start:], alignment=4096, architecture=None
    )
    path.write_bytes(unsigned)
    if "colibri.header.checksum" in pairs:
        names = list(pairs)
        end = 24 + sum(len(pairs[n]) for n in names[: names.index("colibri.header.checksum") + 1])
        header_size = len(unsigned) - len(content) + start
        checksum = header_checksum(unsigned[:header_size], end).to_bytes(8, "little")
        path.write_bytes(unsigned[: end - 8] + checksum + unsigned[end:])
    return path


def test_rewriting_nothing_changes_nothing(container: Path) -> None:
    before = container.read_bytes()
    assert rewritten(container, lambda pairs, tensors: None).read_bytes() == before


CLASS = "colibri.blk.1.ffn_exps.0."
LAYER = "colibri.blk.1.experts."


def u32(key: str, *values: int) -> tuple[str, bytes]:
    return key, raw.array_pair(key, ValueType.UINT32, values)


def number(key: str, value: int) -> tuple[str, bytes]:
    return key, raw.pair(key, ValueType.UINT32, value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (number("colibri.version", 2), "the container has version 2, this program reads 1"),
        (number("colibri.version", 0), "must be at least 1"),
        (number("colibri.align", 12288), "must be a power of two"),
        (number("colibri.align", 2048), "must be at least 4096"),
        (number("colibri.align", 1 << 20), "is no multiple of 1048576"),
        (u32("colibri.trunk.checksums", 1), "must hold 9 integers, holds 1"),
        (u32(CLASS + "checksums", 1), "must hold 4 integers, holds 1"),
        (u32(CLASS + "types", 8), "must hold 6 integers, holds 1"),
        (u32(CLASS + "types", 8, 8, 2, 0, 0, 99), "part 'down_bias': 99 is not a valid"),
        (u32(CLASS + "row_lengths", 64, 33, 32, 32, 32, 64), "part 'up': a Q8_0 row of 33"),
        (u32(CLASS + "rows", 32, 32, 0, 1, 1, 1), "part 'down' overlaps"),
        (u32(CLASS + "rows", 32, 32, 64, 1, 1, 99), "part 'down_bias' overlaps another"),
        (u32(CLASS + "rows", 31, 32, 64, 1, 1, 1), "gate has shape [64, 31], expected [64, 32]"),
        (u32(CLASS + "offsets", 0, 2177, 4352, 5504, 5632, 5760), "part 'up' overlaps another"),
        (u32(CLASS + "offsets", 0, 64, 4352, 5504, 5632, 5760), "part 'up' overlaps another"),
        (u32(LAYER + "class", 0, 0, 0, 1), "are not one to one"),
        (u32(LAYER + "index", 0, 1, 2, 2), "are not one to one"),
        (u32(LAYER + "index", 0, 1, 2, 4), "are not one to one"),
        (u32(LAYER + "index", 0, 1, 2), "must hold 4 integers, holds 3"),
    ],
)
def test_broken_tables(container: Path, changed: tuple[str, bytes], message: str) -> None:
    path = rewritten(container, lambda pairs, tensors: pairs.update([changed]))
    with pytest.raises(FormatError) as caught:
        expert_layers(open_gguf(path))
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["colibri.header.checksum", "colibri.align", CLASS + "parts"])
def test_lost_tables(container: Path, key: str) -> None:
    path = rewritten(container, lambda pairs, tensors: pairs.pop(key) and None)
    with pytest.raises(FormatError, match=f"'{key}': is missing"):
        open_gguf(path)


def test_slabs_must_be_bytes(container: Path) -> None:
    def change(pairs: dict[str, bytes], tensors: list[bytes]) -> None:
        offset = int.from_bytes(tensors[-1][-8:], "little")
        tensors[-1] = raw.tensor("blk.1.ffn_exps.0", [2048, 4], 0, offset)

    with pytest.raises(FormatError, match=r"'blk\.1\.ffn_exps\.0': is not a matrix of bytes"):
        open_gguf(rewritten(container, change))


def test_a_lost_class_is_named(container: Path) -> None:
    def change(pairs: dict[str, bytes], tensors: list[bytes]) -> None:
        tensors[-1] = tensors[-1].replace(b"ffn_exps.0", b"ffn_exps.1")

    with pytest.raises(FormatError, match=r"layer 1: has the slab classes \[1\]: one is lost"):
        open_gguf(rewritten(container, change))


def as_second_class(pairs: dict[str, bytes], tensors: list[bytes], types: list[int]) -> None:
    """Makes the last two slabs of layer 1 a class of their own."""
    *_, first = tensors
    offset = int.from_bytes(first[-8:], "little")
    tensors[-1:] = [
        raw.tensor("blk.1.ffn_exps.0", [8192, 2], 24, offset),
        raw.tensor("blk.1.ffn_exps.1", [8192, 2], 24, offset + 16384),
    ]
    pairs.update([u32(LAYER + "class", 1, 0, 0, 1), u32(LAYER + "index", 0, 0, 1, 1)])
    second = CLASS.replace("exps.0", "exps.1")
    for name in ("parts", "types", "row_lengths", "rows", "offsets"):
        key = (second + name).encode()
        old = pairs[CLASS + name]
        pairs[second + name] = raw.text(key) + old[8 + len(CLASS + name) :]
    pairs.update([u32(second + "types", *types)])
    pairs.update([u32(CLASS + "checksums", 1, 2), u32(second + "checksums", 3, 4)])


def test_experts_in_two_classes(container: Path) -> None:
    before = expert_layers(open_gguf(container))[1].parts["down"].offsets.tolist()
    rewritten(container, lambda p, t: as_second_class(p, t, [8, 8, 2, 0, 0, 0]))
    after = expert_layers(open_gguf(container))[1].parts["down"].offsets.tolist()
    start = open_gguf(container).shards[0].data_offset - 4096
    assert [offset - start for offset in after] == [before[i] for i in (2, 0, 1, 3)]
    assert verify(container).damaged == tuple(f"layer 1 expert {e}" for e in (1, 2, 0, 3))


def test_classes_of_different_precision_need_a_newer_version(container: Path) -> None:
    rewritten(container, lambda p, t: as_second_class(p, t, [8, 8, 20, 0, 0, 0]))
    with pytest.raises(UnsupportedError, match="layer 1: experts of different precision"):
        open_gguf(container)


def test_a_container_without_its_last_bytes(container: Path) -> None:
    content = container.read_bytes()
    for lost in (1, 5000, 50000):
        container.write_bytes(content[:-lost])
        with pytest.raises(FormatError, match="truncated"):
            open_gguf(container)


def test_a_trunk_without_its_padding(tmp_path: Path) -> None:
    source = tmp_path / "source.gguf"
    source.write_bytes(raw.gguf((), raw.ONE_TENSOR, raw.ONE_TENSOR_DATA))
    target = pack(source, tmp_path / "target.gguf")
    target.write_bytes(target.read_bytes()[:-1])
    with pytest.raises(FormatError, match="its padding is cut off: the file is truncated"):
        open_gguf(target)


def test_damage_is_found(container: Path) -> None:
    model, content = open_gguf(container), container.read_bytes()
    gate = expert_layers(model)[1].parts["gate"].offsets
    places = {
        "layer 1 expert 2": int(gate[2]) + 100,
        "layer 1 expert 3": len(content) - 1,  # in the padding
        "tensor 'blk.0.attn_q.weight'": model.tensors["blk.0.attn_q.weight"].offset,
    }
    for name, place in places.items():
        damaged = bytearray(content)
        damaged[place] ^= 1
        container.write_bytes(damaged)
        assert verify(container).damaged == (name,)
    damaged = bytearray(content)
    damaged[content.index(b"gr\xc3\xbc\xc3\x9fe")] ^= 1
    container.write_bytes(damaged)
    with pytest.raises(FormatError, match="the header is damaged"):
        open_gguf(container)


def test_plain_gguf_has_no_checksums(mini: Path) -> None:
    path = mini / "mixtral" / "mixtral.Q8_0.gguf"
    assert verify(path) == Verification(path, False, 0, ())
