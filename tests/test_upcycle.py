"""A dense model upcycled to a Mixture of Experts: bytes, routers, likeness to the source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize

from colibri_mmap import Engine, Trace
from colibri_mmap.demo.dense import DenseModel
from colibri_mmap.demo.perturb import SCALE_OFFSETS, perturbed
from colibri_mmap.demo.upcycle import Recipe, calibration_ids, router_rows, upcycle
from colibri_mmap.errors import ArgumentError, ColibriError, ResourceError, UnsupportedError
from colibri_mmap.format.quants import GGMLType, block_geometry

TOOL = Path(__file__).parents[1] / "tools" / "upcycle.py"
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


@pytest.fixture(scope="module")
def dense(mini: Path) -> Path:
    return mini / "llama-dense" / "llama-dense.F16.gguf"


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", [*FLOATS, *SCALE_OFFSETS], ids=lambda kind: kind.name)
def test_perturbed_blocks_are_the_old_ones_times_a_factor(data: Path, kind: GGMLType) -> None:
    weights, size = block_geometry(kind)
    type = GGMLQuantizationType(kind)
    stored = np.load(data / "types" / "types.npz")
    if kind is GGMLType.F32:
        blocks = stored["src"].astype(np.float32).view(np.uint8).reshape(-1, size)
    else:
        blocks = np.ascontiguousarray(stored[f"{kind.name}_q"]).view(np.uint8).reshape(-1, size)
    changed = perturbed(blocks.tobytes(), kind, 0.1, np.random.default_rng(1)).reshape(-1, size)
    before, after = (
        dequantize(b, type).reshape(-1, weights).astype(np.float64) for b in (blocks, changed)
    )
    size_of_terms = np.ptp(before, axis=1) + np.abs(before).max(axis=1)
    normal = size_of_terms > 0.1  # below, float16 scales are subnormal and lose bits
    before, after, size_of_terms = before[normal], after[normal], size_of_terms[normal]
    factor = (before * after).sum(axis=1) / np.square(before).sum(axis=1)
    # Scales are rounded once, to float16 (or bfloat16, which keeps 8 bits of the value itself).
    rounding = 2.0**-8 if kind is GGMLType.BF16 else 2.0**-10
    assert np.all(np.abs(factor - 1) <= 0.1 + rounding)
    assert factor.std() > 0.03
    error = np.abs(after - factor[:, None] * before).max(axis=1)
    assert np.all(error <= rounding * size_of_terms)


def test_types_without_float16_scales_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="MXFP4"):
        perturbed(bytes(17), GGMLType.MXFP4, 0.1, np.random.default_rng(0))


def test_the_file_is_a_mixture_of_experts_around_an_untouched_trunk(
    dense: Path, tmp_path: Path
) -> None:
    target = tmp_path / "mixture 🐦.gguf"
    steps: list[tuple[int, int]] = []
    upcycle(dense, target, Recipe(experts=5, top_k=2), progress=lambda *step: steps.append(step))
    source, result = GGUFReader(dense), GGUFReader(target)
    assert result.fields["llama.expert_count"].contents() == 5
    assert result.fields["llama.expert_used_count"].contents() == 2
    added = {"general.description", "llama.expert_count", "llama.expert_used_count"}
    assert set(result.fields) - set(source.fields) == added
    for name, field in source.fields.items():
        if name not in ("general.name", "GGUF.tensor_count", "GGUF.kv_count"):
            assert result.fields[name].contents() == field.contents()
    old, new = tensors(dense), tensors(target)
    for layer in range(2):
        assert new.pop(f"blk.{layer}.ffn_gate_inp.weight").shape == (5, 64)
        for part in ("gate", "up", "down"):
            original = old.pop(f"blk.{layer}.ffn_{part}.weight")
            experts = new.pop(f"blk.{layer}.ffn_{part}_exps.weight")
            assert experts.shape == (5, *original.shape)
            assert experts.dtype == original.dtype
            assert len({expert.tobytes() for expert in experts}) == 5
            np.testing.assert_allclose(experts, np.tile(original, (5, 1, 1)), rtol=0.031)
    assert list(new) == list(old)
    assert all(np.array_equal(new[name], old[name]) for name in old)
    assert steps[-1] == (target.stat().st_size, target.stat().st_size)
    assert list(tmp_path.iterdir()) == [target]


def test_the_seed_decides_every_byte(dense: Path, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.gguf" for number in range(3)]
    for path, seed in zip(paths, (7, 7, 8), strict=True):
        upcycle(dense, path, Recipe(seed=seed))
    first, again, other = (path.read_bytes() for path in paths)
    assert first == again
    assert first != other


def test_routing_in_the_engine_is_that_of_the_measured_inputs(dense: Path, tmp_path: Path) -> None:
    """Ties the numpy forward pass that routers are fitted on to the engine's."""
    target = tmp_path / "moe.gguf"
    upcycle(dense, target, Recipe(experts=8, top_k=2, perturbation=1e-6))
    ids = np.random.default_rng(3).integers(0, 320, 48).tolist()
    trace = Trace()
    with Engine.open(target, mode="exact") as engine:
        engine.logits(ids, trace=trace)
    routers = tensors(target)
    with DenseModel(dense) as model:
        for layer, inputs in enumerate(model.ffn_inputs(ids)):
            scores = inputs @ routers[f"blk.{layer}.ffn_gate_inp.weight"].T
            order = np.argsort(-scores, axis=1)
            ranked = np.take_along_axis(scores, order, axis=1)
            clear = np.min(ranked[:, :2] - ranked[:, 1:3], axis=1) > 1e-3
            assert clear.sum() > 40
            np.testing.assert_array_equal(trace.experts[layer][clear], order[clear, :2])
            weight = 1 / (1 + np.exp(ranked[:, 1] - ranked[:, 0]))
            np.testing.assert_allclose(trace.weights[layer][clear, 0], weight[clear], atol=1e-3)


def test_logits_stay_near_those_of_the_dense_model(dense: Path, tmp_path: Path) -> None:
    target = tmp_path / "moe.gguf"
    strength = 0.002
    upcycle(dense, target, Recipe(perturbation=strength))
    ids = np.random.default_rng(4).integers(0, 320, 32).tolist()
    logits = []
    for path in (dense, target):
        with Engine.open(path, mode="exact") as engine:
            logits.append(engine.logits(ids))
    change = np.abs(logits[1] - logits[0]).max() / np.abs(logits[0]).max()
    assert 0 < change < 3 * strength  # three matrices, each off by at most `strength`


def test_router_rows_ignore_the_mean_and_have_unit_deviation() -> None:
    rng = np.random.default_rng(5)
    inputs = (rng.standard_normal((400, 64)) + 3).astype(np.float32)
    rows = router_rows(inputs, 16, rng)
    np.testing.assert_allclose(rows @ inputs.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose((inputs @ rows.T).std(axis=0), 1, rtol=1e-4)
    chosen = np.argsort(-(inputs @ rows.T), axis=1)[:, :2]
    assert np.bincount(chosen.ravel(), minlength=16).min() > 0


@pytest.mark.parametrize("space", ["Ġ", "▁"])
def test_calibration_reads_the_sample_in_either_spelling(space: str) -> None:
    words = ["the", "of", "is", "a", "water", "people"]
    ids = calibration_ids(["unused", *(space + word for word in words), "."])
    assert set(ids) == set(range(1, 8))
    assert len(ids) > 64


def test_calibration_falls_back_to_random_ids() -> None:
    ids = calibration_ids(["x"] * 50)
    assert len(ids) == 256
    assert 0 <= min(ids) < max(ids) < 50


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"experts": 1}, "experts"),
        ({"experts": 4, "top_k": 5}, "top-k"),
        ({"perturbation": 0.0}, "perturbation"),
    ],
)
def test_senseless_recipes_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Recipe(**settings)  # type: ignore[arg-type]


def test_sources_and_targets_that_cannot_work_are_refused(
    dense: Path, mini: Path, tmp_path: Path
) -> None:
    mixtral = next((mini / "mixtral").glob("*.gguf"))
    qwen = next((mini / "qwen3-dense").glob("*.gguf"))
    cases: list[tuple[Path, Path, type[ColibriError], str]] = [
        (mixtral, tmp_path / "a.gguf", UnsupportedError, "already a Mixture of Experts"),
        (qwen, tmp_path / "a.gguf", UnsupportedError, "qwen3"),
        (dense, tmp_path / "none" / "a.gguf", ArgumentError, "no such directory"),
        (dense, dense, ArgumentError, "is the source itself"),
        (dense, tmp_path, ResourceError, "writing failed"),
    ]
    for source, target, error, message in cases:
        with pytest.raises(error, match=message):
            upcycle(source, target, Recipe())
    assert list(tmp_path.iterdir()) == []


def test_the_command_writes_a_model_or_one_line(dense: Path, tmp_path: Path) -> None:
    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(TOOL), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    target = tmp_path / "moe.gguf"
    done = run(dense, target, "--experts", 4, "--top-k", 3, "--seed", 2)
    assert done.returncode == 0, done.stderr
    expected = tmp_path / "expected.gguf"
    upcycle(dense, expected, Recipe(experts=4, top_k=3, seed=2))
    assert target.read_bytes() == expected.read_bytes()
    failed = run(tmp_path / "absent.gguf", target)
    assert failed.returncode == 1
    assert len(failed.stderr.splitlines()) == 1
    assert "absent.gguf" in failed.stderr
