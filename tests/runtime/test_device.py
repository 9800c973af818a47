"""Both backends against one list of promises, and what the search for a device answers."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numpy.typing import NDArray

from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.cuda import _Kernel, open_cuda
from colibri_mmap.runtime.cudasources import CudaModule
from colibri_mmap.runtime.device import (
    ALIGNMENT,
    Address,
    DeviceBackend,
    Dimensions,
    KernelLaunch,
    OutOfDeviceMemory,
    probe,
)
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.vram import VramCache
from colibri_mmap.runtime.vrampolicy import SlotPolicy

KERNELS = CudaModule(
    "test",
    """
typedef unsigned long long u64;

// out[i] = in[i] * factor + offset, after a while
extern "C" __global__ void scale(float* out, const float* in, int n, float factor, int offset,
                                 int delay) {
    for (long long start = clock64(); clock64() - start < delay;) {}
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = in[i] * factor + offset;
}

// adds the number of bytes that differ from those of an expert, see expert_bytes
extern "C" __global__ void compare(const unsigned char* data, int number, int n, int* wrong) {
    int count = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        count += data[i] != (unsigned char)(number * 37 + i % 251);
    if (count) atomicAdd(wrong, count);
}
""",
    ("scale", "compare"),
)
ONE: Dimensions = (1, 1, 1)


def floats(address: int, count: int) -> NDArray[np.float32]:
    return np.frombuffer((ctypes.c_float * count).from_address(address), np.float32)


def execute(
    kernel: str, grid: Dimensions, block: Dimensions, arguments: Sequence[int | float]
) -> None:
    """`scale` on host memory."""
    out, source, n, factor, offset, _ = arguments
    count = min(int(n), grid[0] * block[0])
    scaled = floats(int(source), count) * np.float32(factor) + np.float32(offset)
    floats(int(out), count)[:] = scaled


@pytest.fixture(scope="module")
def cuda() -> Iterator[DeviceBackend]:
    found = open_cuda([KERNELS])
    if isinstance(found, str):
        pytest.skip(found)
    yield found
    found.close()


@pytest.fixture(params=["eager", "deferred", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceBackend:
    if request.param == "cuda":
        found: DeviceBackend = request.getfixturevalue("cuda")
        return found
    return HostBackend(execute, deferred=request.param == "deferred", seed=1)


def staged(device: DeviceBackend, data: NDArray[np.generic]) -> NDArray[np.uint8]:
    staging = device.allocate_staging(data.nbytes)
    staging[:] = data.reshape(-1).view(np.uint8)
    return staging


def fetch(device: DeviceBackend, address: int, nbytes: int) -> NDArray[np.uint8]:
    target = device.allocate_staging(nbytes)
    device.download(target, address, device.compute)
    device.synchronize(device.record(device.compute))
    return target


# ------------------------------------------------------------------------------ promises
@pytest.mark.parametrize("nbytes", [1, 255, 4096, 1_000_003])
def test_bytes_come_back_as_they_went(device: DeviceBackend, nbytes: int) -> None:
    data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
    memory = device.allocate(nbytes + 7)
    device.upload(Address(memory.address + 7), staged(device, data), device.compute)
    assert (fetch(device, Address(memory.address + 7), nbytes) == data).all()
    memory.free()


def test_memory_is_aligned_counted_and_given_back(device: DeviceBackend) -> None:
    free, total = device.memory_info()
    assert 0 < free <= total
    memories = [device.allocate(nbytes) for nbytes in (1, 64 << 20, 300)]
    assert all(memory.address % ALIGNMENT == 0 for memory in memories)
    assert memories[1].nbytes == 64 << 20
    assert device.memory_info()[0] <= free - (64 << 20)
    for memory in memories:
        memory.free()
        memory.free()
    assert device.memory_info()[0] > free - (64 << 20)


def test_what_does_not_fit_is_refused_with_the_numbers(device: DeviceBackend) -> None:
    _, total = device.memory_info()
    with pytest.raises(OutOfDeviceMemory, match="do not fit") as caught:
        device.allocate(total + 1)
    assert caught.value.wanted == total + 1
    assert caught.value.total == total
    device.allocate(1000).free()  # and goes on


def test_a_kernel_receives_every_kind_of_argument(device: DeviceBackend) -> None:
    data = np.arange(1000, dtype=np.float32)
    memory = device.allocate(2 * data.nbytes)
    out = Address(memory.address + data.nbytes)
    device.upload(memory.address, staged(device, data), device.compute)
    for n, factor, offset in ((1000, 0.5, -7), (np.int64(10), np.float32(-2), np.int32(3))):
        arguments = (out, memory.address, n, factor, offset, 0)
        device.launch("scale", (8, 1, 1), (128, 1, 1), arguments, device.compute)
    found = fetch(device, out, data.nbytes).view(np.float32)
    assert (found[:10] == data[:10] * -2 + 3).all()
    assert (found[10:] == data[10:] * 0.5 - 7).all()
    memory.free()


def test_joined_launches_run_again_in_their_order(device: DeviceBackend) -> None:
    """From 1: twice it and 1, three times that; again, 57; after 5 more, again."""
    memory = device.allocate(4)
    place = memory.address
    steps = ((place, place, 1, 2.0, 1, 1000), (place, place, 1, 3.0, 0, 1000))
    launches = [KernelLaunch("scale", ONE, ONE, arguments) for arguments in steps]
    device.upload(place, staged(device, np.ones(1, np.float32)), device.compute)
    for launch in launches:
        device.launch(*launch, device.compute)
    again = device.joined(launches)
    again()
    device.launch("scale", ONE, ONE, (place, place, 1, 1.0, 5, 0), device.compute)
    again()
    assert fetch(device, place, 4).view(np.float32)[0] == 3 * (2 * (57 + 5) + 1)
    memory.free()


def test_launches_are_joined_while_other_threads_use_the_stream(device: DeviceBackend) -> None:
    """Such as those that free memory, once what was launched is done."""
    memory = device.allocate(4)
    launch = KernelLaunch("scale", ONE, ONE, (memory.address, memory.address, 1, 1.0, 1, 0))
    device.upload(memory.address, staged(device, np.zeros(1, np.float32)), device.compute)
    device.launch(*launch, device.compute)
    ended, failures = threading.Event(), []

    def use() -> None:
        try:
            while not ended.is_set():
                device.synchronize(device.record(device.compute))
                device.allocate(1 << 20).free()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    for _ in range(50):
        device.joined([launch, launch])()
    ended.set()
    thread.join()
    assert failures == []
    assert fetch(device, memory.address, 4).view(np.float32)[0] == 101
    memory.free()


def test_kernels_run_in_order_from_any_thread(device: DeviceBackend) -> None:
    memory = device.allocate(4)
    device.upload(memory.address, staged(device, np.zeros(1, np.float32)), device.compute)

    def count() -> None:
        for _ in range(100):
            arguments = (memory.address, memory.address, 1, 1.0, 1, 1000)
            device.launch("scale", ONE, ONE, arguments, device.compute)

    for _ in range(3):
        thread = threading.Thread(target=count)
        thread.start()
        thread.join()
    count()
    assert fetch(device, memory.address, 4).view(np.float32)[0] == 400
    memory.free()


def test_a_stream_waits_for_the_event_of_another(device: DeviceBackend) -> None:
    copies = device.stream()
    memory = device.allocate(8)
    source, out = memory.address, Address(memory.address + 4)
    for value in range(50):
        device.upload(source, staged(device, np.array([value], np.float32)), copies)
        ready = device.record(copies)
        device.wait(device.compute, ready)
        device.launch("scale", ONE, ONE, (out, source, 1, 2.0, 0, 20_000), device.compute)
        used = device.record(device.compute, sleep=True)
        device.wait(copies, used)
        target = device.allocate_staging(4)
        device.download(target, out, copies)
        last = device.record(copies)
        device.synchronize(last)
        assert device.done(last)
        assert device.done(used)
        assert target.view(np.float32)[0] == 2 * value
    memory.free()


@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 1, 1), (7, 33, 65), (64, 256, 1024)])
def test_products_of_matrices(device: DeviceBackend, tokens: int, rows: int, columns: int) -> None:
    random = np.random.default_rng(tokens)
    x = random.standard_normal((tokens, columns), np.float32)
    w = random.standard_normal((rows, columns), np.float32)
    parts = [device.allocate(4 * size) for size in (x.size, w.size, tokens * rows)]
    device.upload(parts[0].address, staged(device, x), device.compute)
    device.upload(parts[1].address, staged(device, w), device.compute)
    addresses = (parts[2].address, parts[0].address, parts[1].address)
    device.matmul(*addresses, tokens, rows, columns, device.compute)
    found = fetch(device, parts[2].address, 4 * tokens * rows).view(np.float32)
    exact = x.astype(np.float64) @ w.astype(np.float64).T
    scale = np.abs(x).astype(np.float64) @ np.abs(w).T  # of what is summed
    error = np.abs(found.reshape(tokens, rows) - exact) / scale
    assert error.max() < (2**-10 if device.kind == "cuda" else 1e-6)
    for part in parts:
        part.free()


# ------------------------------------------------------------------------------ the host's
def test_a_deferred_device_runs_only_in_order() -> None:
    """Of two streams without events every interleaving may happen, of one only its own order."""
    orders = set()
    for seed in range(40):
        log: list[int] = []
        device = HostBackend(
            lambda kernel, grid, block, arguments, log=log: log.append(int(arguments[0])),
            deferred=True,
            seed=seed,
        )
        other = device.stream()
        for value in (1, 2):
            device.launch("log", ONE, ONE, (value,), device.compute)
            device.launch("log", ONE, ONE, (value + 10,), other)
        device.close()
        assert [value for value in log if value < 10] == [1, 2]
        assert [value for value in log if value > 10] == [11, 12]
        orders.add(tuple(log))
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("grid", "block"),
    [
        ((0, 1, 1), ONE),
        ((1, 65536, 1), ONE),
        ((1, 1, 65536), ONE),
        (ONE, (32, 33, 1)),
        (ONE, (1, 1, 65)),
    ],
)
def test_what_a_gpu_refuses_to_launch_is_refused(grid: Dimensions, block: Dimensions) -> None:
    device = HostBackend(execute)
    with pytest.raises(AssertionError, match="CUDA refuses"):
        device.launch("scale", grid, block, (), device.compute)


# ------------------------------------------------------------------------------ the GPU's
def test_parameters_lie_where_a_launch_reads_them() -> None:
    """As cuLaunchKernel does: a pointer to each, of which it takes as much as is declared."""
    first = (Address(1 << 40), 7, 0.5, np.float32(2.5), np.int64(-3))
    kernel = _Kernel(SimpleNamespace(ptr=11), first)
    for arguments in (first, (Address(1 << 41), -8, 1.5, 3, np.int32(4))):
        kernel.pack(*arguments)
        places = (ctypes.c_void_p * 5).from_address(kernel.parameters)
        kinds = (ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_float, ctypes.c_int32)
        found = [
            kind.from_address(place or 0).value for kind, place in zip(kinds, places, strict=True)
        ]
        assert found == list(arguments)
    assert kernel.function == 11
    with pytest.raises(struct.error):
        kernel.pack(Address(0), 7.5, 0.5, 0.5, 1)  # a float where the first launch had an integer
    _Kernel(SimpleNamespace(ptr=11), ()).pack()


def expert_bytes(number: int, nbytes: int) -> NDArray[np.uint8]:
    return ((number * 37 + np.arange(nbytes) % 251) & 255).astype(np.uint8)


@pytest.mark.gpu
def test_no_kernel_reads_a_wrong_expert(cuda: DeviceBackend) -> None:
    """The fences on a GPU: experts of 1 MB come and go as fast as they can while kernels read."""
    nbytes, experts, slots = 1 << 20, 64, 16
    data = [expert_bytes(number, nbytes) for number in range(experts)]
    sizes = np.full(experts, nbytes, np.int64)
    policy = SlotPolicy(sizes, slots * nbytes, layers=1, half_life=3, hysteresis=1.0)

    def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
        staging[:] = data[number][start : start + len(staging)]

    cache = VramCache(cuda, policy, fill, threads=4, piece_bytes=3 << 17)
    wrong = cuda.allocate(4)
    cuda.upload(wrong.address, staged(cuda, np.zeros(1, np.int32)), cuda.compute)
    random = np.random.default_rng(1)
    # How many experts have arrived when they are asked for again depends on the machine.
    turn, end = 0, time.monotonic() + 60
    while turn < 2000 or (cache.stats.hits <= 1000 and time.monotonic() < end):
        numbers = (turn // 20 * 4 + random.choice(24, 6, False)) % experts
        addresses = cache.use(numbers)
        for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
            if address:
                arguments = (Address(address), number, nbytes, wrong.address)
                cuda.launch("compare", (64, 1, 1), (128, 1, 1), arguments, cuda.compute)
        cache.release(numbers)
        cache.offer(numbers[addresses == 0])
        if turn % 10 == 0:
            cuda.synchronize(cuda.record(cuda.compute))
        turn += 1
    found = fetch(cuda, wrong.address, 4).view(np.int32)[0]
    cache.drain()
    cache.check_integrity()
    stats = cache.take_stats()
    cache.close()
    wrong.free()
    assert found == 0
    assert stats.hits > 1000
    assert stats.evicted > 100
    assert stats.failed == 0


# ------------------------------------------------------------------------------ the search
HAS_CUPY = importlib.util.find_spec("cupy") is not None


def answer(**environment: str) -> str:
    """What `probe` says in a process of its own."""
    code = (
        "from colibri_mmap.runtime.device import probe as p; d = p(); print(getattr(d, 'name', d))"
    )
    kept = {name: value for name, value in os.environ.items() if name != "COLIBRI_DEVICE"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=kept | environment,
        check=True,
    )
    assert done.stdout.count("\n") == 1
    return done.stdout.strip()


def install(folder: Path, source: str) -> str:
    """A cupy of our making; what PYTHONPATH must be to import it."""
    (folder / "cupy").mkdir()
    (folder / "cupy" / "__init__.py").write_text(source)
    return f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


def test_a_setting_decides() -> None:
    assert answer(COLIBRI_DEVICE="none") == "COLIBRI_DEVICE=none"
    assert answer(COLIBRI_DEVICE="host") == "host memory in place of a GPU"
    with pytest.raises(ArgumentError, match="choose cuda, host or none"):
        probe({"COLIBRI_DEVICE": "rocm"})


@pytest.mark.skipif(HAS_CUPY, reason="cupy is installed")
def test_without_cupy_the_extra_is_named() -> None:
    assert answer() == "cupy is not installed: pip install 'colibri-mmap[cuda13]'"


def test_a_broken_cupy_is_a_reason(tmp_path: Path) -> None:
    path = install(tmp_path, "raise RuntimeError('made for another numpy\\nsecond line')")
    assert answer(PYTHONPATH=path) == (
        "the GPU cannot be used: RuntimeError: made for another numpy"
    )


def test_missing_libraries_are_a_reason(tmp_path: Path) -> None:
    path = install(tmp_path, "raise ImportError('libcublas.so.13 was not found')")
    assert answer(PYTHONPATH=path) == (
        "cupy is incomplete (libcublas.so.13 was not found): pip install 'colibri-mmap[cuda13]'"
    )


CARD = """
class runtime:
    class CUDARuntimeError(RuntimeError): pass
    driverGetVersion = runtimeGetVersion = staticmethod(lambda: 13000)
    getDeviceCount = staticmethod(lambda: 1)
    getDeviceProperties = staticmethod(
        lambda device: {"name": b"NVIDIA GeForce GTX 980", "major": 5, "minor": 2})
class cuda: runtime = runtime
"""


def test_an_old_gpu_is_a_reason(tmp_path: Path) -> None:
    """A stand-in for a card that is not at hand."""
    assert answer(PYTHONPATH=install(tmp_path, CARD)) == (
        "NVIDIA GeForce GTX 980 is too old: compute capability 5.2, 6.1 is needed"
    )


DRIVER = """
int cuInit(unsigned flags) { return %d; }
int cuDriverGetVersion(int *version) { *version = %d; return 0; }
"""


@pytest.mark.skipif(not HAS_CUPY, reason="cupy is not installed")
@pytest.mark.parametrize(
    ("result", "version", "expected"),
    [
        (100, 13020, "no NVIDIA GPU is visible"),
        (999, 13020, "the GPU cannot be used: CUDARuntimeError: cudaErrorUnknown: unknown error"),
        (
            100,
            12040,
            "the NVIDIA driver is made for CUDA 12.4, cupy for N: "
            "update the driver, or pip install 'colibri-mmap[cuda12]'",
        ),
        (100, 0, "no NVIDIA driver is loaded"),
    ],
)
def test_a_driver_without_a_gpu_is_a_reason(
    tmp_path: Path, result: int, version: int, expected: str
) -> None:
    """A real cupy over a libcuda that can do nothing."""
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text(DRIVER % (result, version))
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    found = answer(LD_LIBRARY_PATH=str(tmp_path))
    assert re.sub(r"cupy for 1\d\.\d+:", "cupy for N:", found) == expected
