"""The kernels of the trunk: the CUDA text under the shim, its numpy twins, and a GPU if any."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import trunkcases
from devicecases import Workbench
from shim import Shim
from trunkcases import ATTENTION, CASES, FAULTS, FOUND, Attention, Floats, numbers

from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.hostkernels import execute
from colibri_mmap.runtime.kernels import attention as cpu_attention


@pytest.fixture(params=["twins", pytest.param("gpu", marks=pytest.mark.gpu)])
def bench(request: pytest.FixtureRequest) -> Iterator[Workbench]:
    """One device after another."""
    gpu = request.param == "gpu"
    bench = Workbench(request.getfixturevalue("gpu") if gpu else HostBackend(execute))
    yield bench
    bench.free()


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_float64(bench: Workbench, name: str) -> None:
    CASES[name]().check(bench)


@pytest.mark.parametrize("name", CASES)
def test_the_kernels_text_under_three_schedules(shim: Shim, name: str) -> None:
    """Results are the same to the bit."""
    case = CASES[name]()
    found = [case.check(Workbench(HostBackend(replace(shim, seed=n)))) for n in (0, 1, 5)]
    assert all(result.tobytes() == found[0].tobytes() for result in found)


@pytest.mark.parametrize("name", ["prompt goes on", "float32", "window in a ring", "odd sizes"])
def test_the_cache_is_that_of_the_cpu(
    bench: Workbench, run: Callable[..., None], name: str
) -> None:
    case = ATTENTION[name]
    key_stride, value_stride = case.strides
    split = case.heads * key_stride
    memory = np.full(split + case.heads * value_stride, 0xFF, np.uint8)
    k, v = (np.pad(x, ((0, 1), (0, 0))) for x in next(case.values()))  # read past the end
    run(
        getattr(cpu_attention, f"append_kv_{case.kv_type}"),
        len(k) - 1,
        *(k.ctypes.data, k.strides[0], v.ctypes.data, v.strides[0]),
        *(case.heads, case.key_size, case.value_size, 0),
        *(memory.ctypes.data, memory.ctypes.data + split, *case.strides, case.positions),
    )
    places = case.caches(bench)
    case.fill(bench, places)
    found = bench.get(int(places[0, 0]), memory.shape, np.uint8)
    assert np.array_equal(found[:split], memory[:split])
    row = value_stride // case.positions
    used = case.value_size * np.dtype(case.dtype).itemsize  # what pads a row is of no use
    found_values, values = (x[split:].reshape(-1, row)[:, :used] for x in (found, memory))
    assert np.array_equal(found_values, values)


@dataclass(frozen=True)
class _Beside(Attention):
    """The sequence of `alone`, and others."""

    alone: Attention = ATTENTION["one token"]

    def values(self) -> Iterator[tuple[Floats, Floats]]:
        yield next(self.alone.values())
        yield from list(super().values())[1:]

    def queries(self) -> Floats:
        own = self.alone.queries()
        return np.concatenate([own, numbers(2, len(self.sequences) - 1, own.shape[1])])


def test_a_token_is_computed_alike_whatever_is_beside_it(shim: Shim) -> None:
    alone = Attention(((270, 1),), positions=640)
    together = _Beside(((270, 1), (600, 1), (3, 1)), positions=640, alone=alone)
    first, second = (case.run(Workbench(HostBackend(shim))) for case in (alone, together))
    assert np.array_equal(second[:1], first)


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(shim: Shim, fault: str) -> None:
    """In a process of its own: it may crash, which counts."""
    command = [sys.executable, trunkcases.__file__, str(shim.folder), fault]
    here = Path(__file__).parent
    ended = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert ended.returncode == FOUND or ended.returncode < 0, ended.stderr
