"""Experts: every layout gives the same bytes; parts that do not fit are refused by name."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import rawgguf as raw
from moe_files import EXPERT_WIDTH, EXPERTS, LAYERS, LAYOUTS, WIDTH, expert_bytes, write_model

from colibri_mmap.errors import FormatError
from colibri_mmap.format.experts import PART_NAMES, ExpertLayer, expert_layers
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.pack import pack
from colibri_mmap.format.quants import GGMLType


def read_parts(model: GGUF, layer: ExpertLayer, expert: int) -> dict[str, bytes]:
    files = [shard.path.read_bytes() for shard in model.shards]
    return {
        name: files[part.shards[expert]][part.offsets[expert] :][: part.nbytes]
        for name, part in layer.parts.items()
    }


def open_layout(directory: Path, layout: str) -> GGUF:
    if layout != "packed":
        return open_gguf(write_model(directory / "model.gguf", layout))
    source = write_model(directory / "source.gguf", "fused")
    return open_gguf(pack(source, directory / "model.gguf"))


@pytest.mark.parametrize("layout", [*LAYOUTS, "packed"])
def test_every_layout_gives_the_same_bytes(tmp_path: Path, layout: str) -> None:
    model = open_layout(tmp_path, layout)
    layers = expert_layers(model)
    assert list(layers) == list(range(LAYERS))
    content = expert_bytes()
    for number, layer in layers.items():
        assert (layer.layer, layer.n_experts) == (number, EXPERTS)
        assert tuple(layer.parts) == PART_NAMES
        assert layer.parts["gate"].shape == layer.parts["up"].shape == (WIDTH, EXPERT_WIDTH)
        assert layer.parts["down"].shape == (EXPERT_WIDTH, WIDTH)
        assert layer.parts["down"].type == (GGMLType.Q8_0, GGMLType.Q4_0)[number]
        assert layer.parts["up_bias"].shape == (EXPERT_WIDTH, 1)
        assert layer.expert_bytes == sum(content[number, name][0].size for name in PART_NAMES)
        for expert in range(EXPERTS):
            assert read_parts(model, layer, expert) == {
                name: content[number, name][expert].tobytes() for name in PART_NAMES
            }


@pytest.mark.parametrize("layout", [*LAYOUTS, "packed"])
def test_extents_cover_an_expert_and_little_else(tmp_path: Path, layout: str) -> None:
    model = open_layout(tmp_path, layout)
    for layer in expert_layers(model).values():
        for expert in range(EXPERTS):
            extents = layer.extents(expert)
            assert list(extents) == sorted(extents, key=lambda extent: extent.offset)
            for part in layer.parts.values():
                assert any(
                    extent.shard == part.shards[expert]
                    and extent.offset <= part.offsets[expert]
                    and part.offsets[expert] + part.nbytes <= extent.offset + extent.nbytes
                    for extent in extents
                )
            if layout == "packed":
                (extent,) = extents
                assert extent.offset % 4096 == 0
                assert extent.nbytes < layer.expert_bytes + 6 * 64


def test_extents_of_parts_far_apart(mini: Path) -> None:
    layer = expert_layers(open_gguf(mini / "mixtral" / "mixtral.F16.gguf"))[0]
    extents = layer.extents(3)
    assert [(e.offset, e.nbytes) for e in extents] == sorted(
        (int(part.offsets[3]), part.nbytes) for part in layer.parts.values()
    )


def test_dense_models_have_none(mini: Path) -> None:
    assert expert_layers(open_gguf(mini / "llama-dense" / "llama-dense.F16.gguf")) == {}


D, F, N = 8, 4, 3
GATE, UP, DOWN = (f"blk.0.ffn_{name}_exps.weight" for name in ("gate", "up", "down"))
GOOD = {GATE: (D, F, N), UP: (D, F, N), DOWN: (F, D, N)}
SINGLES = {f"blk.0.ffn_{p}.{e}.weight": s for e in range(2) for p, s in
           {"gate": (D, F), "up": (D, F), "down": (F, D)}.items()}  # fmt: skip


@pytest.fixture
def layers_of(tmp_path: Path):
    """Reads the experts of a model with float32 tensors of the given shapes."""

    def layers_of(
        tensors: dict[str, tuple[int, ...]], *pairs: bytes, types: dict[str, int] | None = None
    ) -> dict[int, ExpertLayer]:
        infos = []
        offset = 0
        for name, shape in tensors.items():
            infos.append(raw.tensor(name, shape, (types or {}).get(name, 0), offset))
            offset += 32 * prod(shape)  # room for any type, and aligned
        path = tmp_path / "experts.gguf"
        path.write_bytes(raw.gguf(pairs, infos, bytes(offset)))
        return expert_layers(open_gguf(path))

    return layers_of


def test_experts_without_a_gate(layers_of) -> None:
    assert list(layers_of({UP: (D, F, N), DOWN: (F, D, N)})[0].parts) == ["up", "down"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({UP: (D, F, N)}, "the down matrices are missing"),
        ({GATE: (D, F, N), DOWN: (F, D, N)}, "the up matrices are missing"),
        (GOOD | {UP: (D, F * N)}, "shape [8, 12], expected 3 dimensions"),
        (GOOD | {GATE: (D, F + 1, N)}, "gate has shape [8, 5], expected [8, 4]"),
        (GOOD | {DOWN: (D, F, N)}, "down has shape [8, 4], expected [4, 8]"),
        (GOOD | {GATE: (D, F, N + 1)}, "4 of gate, but 3 of up"),
        (GOOD | {"blk.0.ffn_gate_up_exps.weight": (D, 2 * F, N)}, "a part is stored twice"),
        ({"blk.0.ffn_gate_up_exps.weight": (D, 5, N), DOWN: (F, D, N)}, "cannot be halves"),
        (GOOD | {"blk.0.ffn_gate_up_exps.bias": (5, N)}, "cannot be halves"),
        (GOOD | {"blk.0.ffn_up_exps.bias": (D, N)}, "up_bias has shape [8, 1], expected [4, 1]"),
        (GOOD | {"blk.0.ffn_up_exps.bias": (F, N, 1)}, "expected 2 dimensions"),
        ({UP: (D, F, N), DOWN: (F, D, N), "blk.0.ffn_gate_exps.bias": (F, N)},
         "there are gate_bias values but no gate matrices"),
        ({UP: (1, 1, 1 << 17), DOWN: (1, 1, 1 << 17)}, "stacks 131072 experts"),
        ({"blk.0.ffn_up.1.weight": (D, F), DOWN: (F, D, 1)}, "no sibling for expert 0"),
        (SINGLES | {"blk.0.ffn_up.1.weight": (D, F + 1)}, "differs in type or shape"),
        (SINGLES | {"blk.0.ffn_up.1.weight": (D, F, 1), "blk.0.ffn_up.0.weight": (D, F, 1)},
         "expected 2 dimensions"),
    ],
)  # fmt: skip
def test_parts_that_do_not_fit(layers_of, tensors, message: str) -> None:
    with pytest.raises(FormatError) as caught:
        layers_of(tensors)
    assert message in str(caught.value)


def test_single_experts_of_different_types(layers_of) -> None:
    with pytest.raises(FormatError, match="differs in type"):
        layers_of(SINGLES, types={"blk.0.ffn_down.1.weight": 1})


def test_the_declared_number_of_experts_must_be_right(layers_of) -> None:
    assert layers_of(GOOD, raw.pair("test.expert_count", raw.UINT32, N))[0].n_experts == N
    with pytest.raises(FormatError, match=r"expert_count': is 9, but layer 0 has 3 experts"):
        layers_of(GOOD, raw.pair("test.expert_count", raw.UINT32, 9))
