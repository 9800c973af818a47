"""The device's products: the CUDA text under the shim, its numpy twins, and a GPU if any."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from devicecases import (
    SHARED,
    SINGLE,
    SPREAD,
    TOLERANCE,
    Recording,
    Workbench,
    as_seen,
    check_matvec,
    check_not_finite,
    check_quantise,
    check_type,
    dequantised,
    expert_shape,
    random_activations,
    random_experts,
    random_weights,
    worst,
)
from devicevectors import DEVIATION, compare
from shim import Shim

from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime.cudasources import WEIGHT_TYPES, cuda_modules, module_of
from colibri_mmap.runtime.devicekernels import ExpertTables, supports
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.hostkernels import execute

SCHEDULES = (0, 1, 12345)  # ascending, descending, shuffled
QUANTISED = WEIGHT_TYPES[3:]


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["shim", "twins", GPU])
def bench(request: pytest.FixtureRequest, shim: Shim) -> Iterator[Workbench]:
    """One device after another."""
    if request.param == "gpu":
        bench = Workbench(request.getfixturevalue("gpu"))
    else:
        bench = Workbench(HostBackend(shim if request.param == "shim" else execute))
    yield bench
    bench.free()


def named(type: GGMLType) -> str:
    return type.name


@pytest.mark.parametrize("bench", ["twins", GPU], indirect=True)
@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=named)
def test_products_are_those_of_float64(bench: Workbench, type: GGMLType) -> None:
    assert check_type(bench, type) <= TOLERANCE


@pytest.mark.parametrize("type", WEIGHT_TYPES, ids=named)
def test_products_are_those_of_float64_in_every_schedule(shim: Shim, type: GGMLType) -> None:
    read = []
    for seed in SCHEDULES:
        bench = Recording(HostBackend(Shim(shim.folder, seed)))
        assert check_type(bench, type) <= TOLERANCE
        read.append(bench.read)
    assert read[0] == read[1] == read[2]


ROUNDINGS = [(GGMLType.Q8_0, 160), (GGMLType.Q4_K, 768)]  # a scale per 32, per 256 activations


@pytest.mark.parametrize(("type", "width"), ROUNDINGS)
@pytest.mark.parametrize("seed", SCHEDULES)
def test_activations_are_rounded_as_defined(
    shim: Shim, seed: int, type: GGMLType, width: int
) -> None:
    bench = Workbench(HostBackend(Shim(shim.folder, seed)))
    check_quantise(bench, type, 3, width, np.random.default_rng(seed))


@pytest.mark.parametrize(("type", "width"), ROUNDINGS)
def test_activations_are_rounded_as_defined_on_every_device(
    bench: Workbench, type: GGMLType, width: int
) -> None:
    check_quantise(bench, type, 5, width, np.random.default_rng(3))


def test_what_is_not_finite_stays_so(bench: Workbench) -> None:
    check_not_finite(bench)


@pytest.mark.parametrize("choices", [SINGLE, SPREAD, SHARED], ids=["single", "spread", "shared"])
def test_experts_of_two_types(bench: Workbench, choices: list[list[int]]) -> None:
    rng = np.random.default_rng(5)
    shape = expert_shape(GGMLType.Q4_K, GGMLType.Q6_K)
    experts = random_experts(shape, choices, rng)
    assert experts.check(bench, random_activations(len(choices), shape.width, rng)) <= TOLERANCE


def test_many_tokens_on_one_expert(bench: Workbench) -> None:
    rng = np.random.default_rng(6)
    shape = expert_shape(GGMLType.Q4_0)
    experts = random_experts(shape, [[1]] * 21, rng, count=3)
    assert experts.check(bench, random_activations(21, shape.width, rng), True) <= TOLERANCE


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.MXFP4])
def test_rows_that_several_warps_share(bench: Workbench, type: GGMLType) -> None:
    rng = np.random.default_rng(7)
    for count in (1, 4):
        assert check_matvec(bench, type, 7, 4096, count, rng) <= TOLERANCE


def test_weights_that_cancel(bench: Workbench) -> None:
    """Minima as large as the products: nothing is lost but what float32 loses."""
    rng = np.random.default_rng(8)
    for type in (GGMLType.Q4_1, GGMLType.Q4_K, GGMLType.Q2_K):
        raw = random_weights(type, 4, 512, rng)
        x = np.full((1, 512), np.float32(3))
        found = bench.matvec(type, raw, x)[:, :4]
        w, seen = dequantised(type, raw), as_seen(type, x)
        assert worst(found, seen @ w.T, np.abs(seen) @ np.abs(w).T) <= TOLERANCE


def test_tables_sort_pairs_by_expert_and_entries_by_token() -> None:
    addresses = np.arange(12).reshape(6, 2) * 256
    experts, tokens = np.array([1, 0, 1]), np.array([0, 0, 2])
    weights = np.array([0.5, 0.25, 1], np.float32)
    tables = ExpertTables.of(addresses, experts, tokens, weights, 3)
    assert tables.starts.tolist() == [0, 1, 3]
    assert tables.tokens.tolist() == [0, 0, 2]
    assert tables.entry_starts.tolist() == [0, 2, 2, 3]
    assert tables.entry_pairs.tolist() == [1, 0, 2]
    assert tables.entry_downs.tolist() == [
        addresses[2, experts].tolist(),
        addresses[5, experts].tolist(),
    ]
    assert (tables.groups, tables.pairs, tables.count, tables.most) == (2, 3, 3, 2)


def test_what_is_supported() -> None:
    assert all(supports(type, 256) for type in WEIGHT_TYPES)
    assert supports(GGMLType.F32, 100)
    assert not supports(GGMLType.F32, 102)
    assert not supports(GGMLType.Q4_K, 128)
    assert supports(GGMLType.Q4_0, 96)
    assert not supports(GGMLType.IQ2_XXS, 256)


def test_every_kernel_has_one_module() -> None:
    kernels = [name for module in cuda_modules().values() for name in module.kernels]
    assert len(kernels) == len(set(kernels))
    assert module_of("matvec_q4_k_c8") == "experts_q4_k"
    assert module_of("quantise_q8") == "rows"


def test_the_vectors_are_what_the_shim_gives(shim: Shim) -> None:
    compare(Workbench(HostBackend(shim)), lambda name, deviation: None, exact=True)


@pytest.mark.parametrize("on", ["twins", GPU])
def test_the_vectors_are_what_every_device_gives(on: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("gpu") if on == "gpu" else HostBackend(execute)
    assert compare(Workbench(device), lambda name, deviation: None) <= DEVIATION
