"""Models in several files: opened by any of them or by their directory, or refused by name."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
import rawgguf as raw
from rawgguf import ONE_TENSOR, ONE_TENSOR_DATA

from colibri_mmap.errors import ArgumentError, FormatError
from colibri_mmap.format.gguf import open_gguf

SPLIT = "model-{:05d}-of-{:05d}.gguf"


def shard(number: int, count: int, tensors: int, name: str, **changed: int) -> bytes:
    keys = {"split.no": number, "split.count": count, "split.tensors.count": tensors} | changed
    pairs = [raw.pair(key.replace("_", "."), raw.UINT16, value) for key, value in keys.items()]
    architecture = "test" if number == 0 else None
    return raw.gguf(pairs, [raw.tensor(name, [8])], bytes(32), architecture=architecture)


@pytest.fixture
def split(tmp_path: Path):
    """Writes three shards, some of them changed, and returns their directory."""

    def split(**changed: bytes) -> Path:
        for number, name in enumerate("abc"):
            content = changed.get(name, shard(number, 3, 3, name))
            (tmp_path / SPLIT.format(number + 1, 3)).write_bytes(content)
        return tmp_path

    return split


def test_a_split_model_opens_by_any_shard_or_directory(split) -> None:
    directory = split()
    for path in [directory, *sorted(directory.iterdir())]:
        model = open_gguf(path)
        assert list(model.tensors) == ["a", "b", "c"]
        assert [model.tensors[name].shard for name in "abc"] == [0, 1, 2]
        assert model.path == model.shards[0].path == directory / SPLIT.format(1, 3)
        assert model.architecture == "test"


def test_lost_shards_are_named(split) -> None:
    directory = split()
    (directory / SPLIT.format(2, 3)).unlink()
    (directory / SPLIT.format(1, 3)).unlink()
    with pytest.raises(FormatError, match=r"2 of 3 are missing: model-00001-of.*model-00002-of"):
        open_gguf(directory)


def test_many_lost_shards_are_counted(tmp_path: Path) -> None:
    path = tmp_path / SPLIT.format(1, 9)
    path.write_bytes(shard(0, 9, 9, "a"))
    with pytest.raises(FormatError, match=r"8 of 9 are missing.* and 5 more"):
        open_gguf(path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"b": shard(1, 4, 3, "b")}, "'split.count': is 4, expected 3"),
        ({"b": shard(2, 3, 3, "b")}, "'split.no': is 2, expected 1"),
        ({"b": raw.gguf((), ONE_TENSOR, bytes(32))}, "'split.count': is None, expected 3"),
        ({"b": shard(1, 3, 3, "a")}, "'a': is also in model-00001-of-00003.gguf"),
        ({"a": shard(0, 3, 4, "a")}, "'split.tensors.count': says 4, but the shards hold 3"),
        ({"a": shard(1, 3, 3, "a")}, "is shard 2 of 3: give the files their names back"),
    ],
)
def test_shards_that_do_not_fit(split, changed: dict[str, bytes], message: str) -> None:
    directory = split(**changed)
    with pytest.raises(FormatError) as caught:
        open_gguf(directory / SPLIT.format(1, 3))
    assert message in str(caught.value)


def test_a_shard_needs_its_name(tmp_path: Path) -> None:
    (tmp_path / "renamed.gguf").write_bytes(shard(0, 3, 3, "a"))
    with pytest.raises(FormatError, match="give the files their names back"):
        open_gguf(tmp_path / "renamed.gguf")


def test_a_merged_file_may_say_that_it_has_0_shards(tmp_path: Path) -> None:
    (tmp_path / "merged.gguf").write_bytes(shard(0, 0, 1, "a"))
    assert list(open_gguf(tmp_path).tensors) == ["a"]


def test_a_directory_must_hold_one_model(split, tmp_path: Path) -> None:
    split()
    (tmp_path / "other.gguf").write_bytes(raw.gguf((), ONE_TENSOR, ONE_TENSOR_DATA))
    with pytest.raises(ArgumentError, match=r"holds 2 models.*model-00001-of-00003.*other\.gguf"):
        open_gguf(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ArgumentError, match=r"holds no \.gguf file"):
        open_gguf(tmp_path / "empty")


@pytest.mark.fixtures
def test_real_shards_hold_the_bytes_of_the_unsplit_model(shared_fixtures: Path) -> None:
    whole = gguf.GGUFReader(shared_fixtures / "mixtral-kq" / "mixtral-kq.Q4_K_M.gguf")
    expected = {tensor.name: tensor.data.tobytes() for tensor in whole.tensors}
    split = shared_fixtures / "split"
    for path in [split, *split.glob("*.gguf")]:
        model = open_gguf(path)
        files = [shard.path.read_bytes() for shard in model.shards]
        assert expected == {
            name: files[info.shard][info.offset : info.offset + info.nbytes]
            for name, info in model.tensors.items()
        }
