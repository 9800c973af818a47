"""Operations on a device beside those on the CPU, one by one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime.device import Address, DeviceBackend
from colibri_mmap.runtime.deviceops import FEW, PANEL_BYTES, DeviceOps
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.hostkernels import execute
from colibri_mmap.runtime.ops import Ops
from colibri_mmap.runtime.pool import Pool
from colibri_mmap.runtime.weights import Matrix


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceBackend:
    return request.getfixturevalue("gpu") if request.param == "gpu" else HostBackend(execute)


@pytest.fixture
def cpu() -> Iterator[Ops]:
    pool = Pool(2)
    yield Ops(pool, "int8")
    pool.close()


@pytest.mark.parametrize("tokens", [1, FEW, FEW + 1])
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16])
def test_a_matrix_larger_than_a_panel(
    device: DeviceBackend, cpu: Ops, kind: GGMLType, tokens: int
) -> None:
    """Many tokens: as float32 it is made and multiplied a part at a time."""
    columns = 64
    rows = PANEL_BYTES // (4 * columns) + 70
    dtype = np.float32 if kind is GGMLType.F32 else np.float16
    random = np.random.default_rng(1)
    weights = (random.standard_normal(rows * columns, np.float32) / 8).astype(dtype)
    x = random.standard_normal((tokens, columns), np.float32)
    matrix = Matrix(weights.ctypes.data, kind, rows, columns, columns * weights.itemsize)
    memory = device.allocate(weights.nbytes)
    staging = device.allocate_staging(weights.nbytes)
    staging[:] = weights.view(np.uint8)
    device.upload(memory.address, staging, device.compute)
    ops = DeviceOps(device, cpu, {matrix.address: Address(memory.address)}, ())
    rows_of_x = cpu.arena.rows(*x.shape)
    cpu.arena.view(rows_of_x)[:] = x
    found = cpu.numpy(ops.to_host(ops.linear(ops.from_host(rows_of_x), matrix)))
    expected = x @ weights.astype(np.float32).reshape(rows, columns).T
    assert np.abs(found - expected).max() < 1e-5
    ops.close()
    memory.free()


def test_rows_go_there_and_back(device: DeviceBackend, cpu: Ops) -> None:
    """Parts of rows, selected ones, none at all."""
    x = np.random.default_rng(2).standard_normal((9, 40), np.float32)
    ops = DeviceOps(device, cpu, {}, ())
    host = cpu.arena.rows(9, 40)
    cpu.arena.view(host)[:] = x
    with ops.temporaries():
        there = ops.from_host(host.columns(8, 24))
        for chosen in ([0, 3, 8], [4, 5, 6], [7], []):
            rows = ops.select(there, np.array(chosen, np.int64))
            assert np.array_equal(cpu.numpy(ops.to_host(rows)), x[chosen, 8:32])
        zeros = ops.zeros(3, 24)
        ops.add(zeros, there.part(2, 3))
        first, second = ops.read(zeros, there).wait()
        assert np.array_equal(cpu.numpy(first), x[2:5, 8:32])
        assert np.array_equal(cpu.numpy(second), x[:, 8:32])
    ops.close()
