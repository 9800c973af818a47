"""pack, verify and inspect on real files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from program import Colibri

MODEL = Path("mixtral/mixtral.Q8_0.gguf")


@pytest.fixture
def packed(colibri: Colibri, mini: Path, tmp_path: Path) -> Path:
    target = tmp_path / "packed 打包 🐦.gguf"
    done = colibri("pack", mini / MODEL, target)
    assert done.returncode == 0
    assert str(target) in done.stdout.decode()
    assert done.stderr == b""
    return target


def test_pack_and_verify(colibri: Colibri, packed: Path) -> None:
    done = colibri("verify", packed)
    assert done.returncode == 0
    assert b"match their checksums" in done.stdout


def test_pack_replaces_a_target_only_when_told_to(
    colibri: Colibri, mini: Path, packed: Path
) -> None:
    before = packed.read_bytes()
    refused = colibri("pack", mini / MODEL, packed)
    assert refused.returncode == 1
    assert b"--force" in refused.stderr
    assert packed.read_bytes() == before
    assert colibri("pack", "--force", "--align", "8192", mini / MODEL, packed).returncode == 0
    assert packed.read_bytes() != before


def test_verify_names_the_damaged_expert(colibri: Colibri, packed: Path) -> None:
    with packed.open("r+b") as file:
        file.seek(-5000, 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    done = colibri("verify", packed)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert b"layer 1 expert 7" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_verify_says_that_a_plain_file_has_no_checksums(colibri: Colibri, mini: Path) -> None:
    done = colibri("verify", mini / MODEL)
    assert done.returncode == 0
    assert b"only packed files and pulled ones have checksums" in done.stdout


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"# Notes on models\nand some more text", "it starts with b'# No'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer in place"),
        (b"<!DOCTYPE html><html><body></body></html>", "a web page"),
        (b"", "0 bytes are too few"),
    ],
)
def test_what_is_no_model_is_called_by_its_name(
    colibri: Colibri, tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    done = colibri("inspect", "x.gguf")
    assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)
    assert done.stderr.startswith(b"error: x.gguf: ")
    assert says in done.stderr.decode()


def test_a_directory_of_many_models(colibri: Colibri, data: Path) -> None:
    done = colibri("inspect", data / "hostile")
    count = len(list((data / "hostile").glob("*.gguf")))
    assert f"holds {count} models" in done.stderr.decode()
    assert done.stderr.decode().rstrip().endswith(f" and {count - 8} more")


def test_inspect_agrees_with_another_reader(colibri: Colibri, mini: Path, packed: Path) -> None:
    reader = gguf.GGUFReader(mini / MODEL)
    summary = json.loads(colibri("inspect", "--json", "--tensors", mini / MODEL).stdout)
    assert summary["parameters"] == sum(int(tensor.n_elements) for tensor in reader.tensors)
    assert [
        (tensor["name"], tensor["type"], tensor["shape"], tensor["bytes"], tensor["offset"])
        for tensor in summary["tensor_list"]
    ] == [
        (t.name, t.tensor_type.name, t.shape.tolist(), int(t.n_bytes), int(t.data_offset))
        for t in reader.tensors
    ]
    in_container = json.loads(colibri("inspect", "--json", packed).stdout)
    same = ("architecture", "layers", "experts", "parameters", "active_parameters", "bytes_by_type")
    assert {key: in_container[key] for key in same} == {key: summary[key] for key in same}
    assert (summary["reads_per_expert"], in_container["reads_per_expert"]) == (3, 1)


def test_inspect_for_people(colibri: Colibri, mini: Path) -> None:
    text = colibri("inspect", "--tensors", mini / MODEL).stdout.decode()
    assert "8 in each of 2 layers, 2 per token" in text
    assert "165 thousand" in text
    assert "blk.1.ffn_up_exps.weight" in text
    assert "\x1b" not in text


def test_inspect_keeps_control_characters_from_the_terminal(colibri: Colibri, data: Path) -> None:
    path = data / "hostile" / "name_escape.gguf"
    assert b"\x1b" in path.read_bytes()
    done = colibri("inspect", "--tensors", path)
    assert done.returncode == 0
    assert b"\x1b" not in done.stdout
