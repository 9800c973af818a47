"""Block geometry against gguf-py and against bytes that ggml wrote."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest

from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes

# gguf-py counts two float32 in a Q8_1 block; ggml's block_q8_1 has two float16.
DISPUTED = {"Q8_1"}


def test_ids_and_geometry_agree_with_gguf_py() -> None:
    theirs = {
        (type.name, int(type)): size
        for type, size in gguf.GGML_QUANT_SIZES.items()
        if type.name not in DISPUTED
    }
    ours = {(type.name, int(type)): block_geometry(type) for type in GGMLType}
    assert theirs.items() <= ours.items()
    assert {name for name, _ in ours.keys() - theirs.keys()} <= DISPUTED | {"Q2_0"}


def test_geometry_agrees_with_ggml(data: Path) -> None:
    described = json.loads((data / "types" / "index.json").read_text())
    for name, facts in described.items():
        type = GGMLType[name]
        assert int(type) == facts["id"]
        assert block_geometry(type) == (facts["block"], facts["bytes"])


def test_rows_of_every_type_lie_back_to_back_in_a_file_ggml_wrote(data: Path) -> None:
    model = open_gguf(data / "types" / "types.gguf")
    for name, info in model.tensors.items():
        assert name == f"t.{info.type.name}"
        assert info.nbytes == 6 * row_bytes(info.type, 512)


@pytest.mark.parametrize("n", [0, -256, 1, 255, 257])
def test_a_row_must_be_whole_blocks(n: int) -> None:
    with pytest.raises(ValueError, match="Q4_K row of"):
        row_bytes(GGMLType.Q4_K, n)
