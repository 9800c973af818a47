"""The GPU as a device: the only file that imports cupy.

Memory is allocated outside cupy's pools, streams do not synchronise with the default one, kernels
are compiled by NVRTC for the GPU that is there, products of matrices are cuBLAS's. Errors of CUDA
become DeviceError here.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .cubins import kept_code
from .cudasources import CudaModule
from .device import (
    Address,
    DeviceError,
    Dimensions,
    Event,
    KernelLaunch,
    OutOfDeviceMemory,
    Stream,
)

OLDEST = (6, 1)  # compute capability: kernels use __dp4a

_OPTIONS = ("-std=c++17",)
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_FLOAT32, _DEFAULT_ALGORITHM = 0, -1  # CUDA_R_32F, CUBLAS_GEMM_DEFAULT


def open_cuda(modules: Iterable[CudaModule]) -> CudaBackend | str:
    """The GPU, with the kernels of `modules`; or in one line why there is none."""
    if importlib.util.find_spec("cupy") is None:
        return "cupy is not installed: pip install 'colibri-mmap[cuda13]'"
    try:
        import cupy

        return _missing(cupy) or CudaBackend(cupy, modules)
    except ImportError as error:
        return f"cupy is incomplete ({_first_line(error)}): pip install 'colibri-mmap[cuda13]'"
    except Exception as error:  # whatever a broken installation comes up with
        return f"the GPU cannot be used: {type(error).__name__}: {_first_line(error)}"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _missing(cupy: Any) -> str:
    """What keeps a working cupy from using a GPU; empty if nothing does."""
    runtime = cupy.cuda.runtime
    driver, needed = runtime.driverGetVersion(), runtime.runtimeGetVersion()
    if not driver:
        return "no NVIDIA driver is loaded"
    if driver // 1000 < needed // 1000:
        return (
            f"the NVIDIA driver is made for CUDA {_version(driver)}, cupy for {_version(needed)}: "
            f"update the driver, or pip install 'colibri-mmap[cuda{driver // 1000}]'"
        )
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        if "cudaErrorNoDevice" not in str(error):
            raise
        count = 0
    if not count:
        return "no NVIDIA GPU is visible"
    properties = runtime.getDeviceProperties(0)
    capability = properties["major"], properties["minor"]
    if capability < OLDEST:
        return (
            f"{properties['name'].decode()} is too old: compute capability "
            f"{capability[0]}.{capability[1]}, {OLDEST[0]}.{OLDEST[1]} is needed"
        )
    return ""


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


class CudaMemory:
    """An allocation by cudaMalloc, which aligns to 256 bytes."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.address, self.nbytes = Address(memory.ptr), int(memory.size)

    def free(self) -> None:
        self._memory = None


class _Kernel:
    """A compiled kernel and the place where its parameters are laid out for a launch.

    Every parameter gets 8 bytes, of which the device takes as many as it declares: integers are
    written as 64 bits, their lower half comes first.
    """

    __slots__ = ("function", "keep", "pack", "parameters")

    def __init__(self, function: Any, arguments: Sequence[int | float]) -> None:
        """`arguments`: of the first launch; later ones have the same types."""
        kinds = ("f4x" if isinstance(value, (float, np.floating)) else "q" for value in arguments)
        layout = struct.Struct("<" + "".join(kinds))
        values = ctypes.create_string_buffer(max(8, layout.size))
        start = ctypes.addressof(values)
        places = (ctypes.c_void_p * max(1, len(arguments)))(*range(start, start + layout.size, 8))
        self.function = int(function.ptr)
        self.parameters = ctypes.addressof(places)
        self.keep = function, values, places
        self.pack = partial(layout.pack_into, values, 0)


class _Binding(threading.local):
    """Whether this thread has the device's context, which launches need."""

    bound = False


class _Translation:
    """Within it, CUDA's errors become DeviceError."""

    __slots__ = ("_failures", "_name")

    def __init__(self, name: str, failures: tuple[type[Exception], ...]) -> None:
        self._name, self._failures = name, failures

    def error(self, error: BaseException) -> DeviceError:
        return DeviceError(
            f"{self._name}: {_first_line(error)}: "
            "restart, or go on without the GPU with COLIBRI_DEVICE=none"
        )

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self._failures):
            raise self.error(error) from error


class CudaBackend:
    """The DeviceBackend on the first GPU that CUDA shows (CUDA_VISIBLE_DEVICES)."""

    kind: Literal["cuda"] = "cuda"

    def __init__(self, cupy: Any, modules: Iterable[CudaModule]) -> None:
        self._cuda, self._runtime = cupy.cuda, cupy.cuda.runtime
        self._cublas = cupy.cuda.cublas
        properties = self._runtime.getDeviceProperties(0)
        self._target = f"{properties['major']}.{properties['minor']}"
        self.name = f"{properties['name'].decode()} (compute capability {self._target})"
        self._failures = (
            self._runtime.CUDARuntimeError,
            cupy.cuda.driver.CUDADriverError,
            self._cublas.CUBLASError,
            cupy.cuda.compiler.CompileException,
        )
        self._translated = _Translation(self.name, self._failures)
        self._launch = cupy.cuda.driver.launchKernel
        self._binding = _Binding()
        self._module_of = {kernel: module for module in modules for kernel in module.kernels}
        self._compiled: dict[str, Any] = {}
        self._kernels: dict[str, _Kernel] = {}
        self._factors = np.array([1, 0], np.float32)  # of the product and of what was there
        with self._translated:
            self.compute: Any = self.stream()
            # Not `compute`: other threads may record events there meanwhile, to free memory.
            self._capture = self.stream()
            cupy.cuda.device.get_cublas_handle()  # takes its memory now

    # -------------------------------------------------------------------------- memory
    def memory_info(self) -> tuple[int, int]:
        with self._translated:
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    def allocate(self, nbytes: int) -> CudaMemory:
        try:
            return CudaMemory(self._cuda.Memory(nbytes))
        except self._runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise self._translated.error(error) from error
        raise OutOfDeviceMemory(self.name, nbytes, *self.memory_info())

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        with self._translated:
            memory = self._cuda.PinnedMemory(nbytes)  # alloc_pinned_memory would round up
        return np.frombuffer(self._cuda.PinnedMemoryPointer(memory, 0), np.uint8, nbytes)

    # -------------------------------------------------------------------------- work
    def stream(self) -> Stream:
        with self._translated:
            return self._cuda.Stream(non_blocking=True)

    def upload(self, address: int, source: NDArray[np.uint8], stream: Stream) -> None:
        assert source.flags.c_contiguous
        with self._translated:
            self._runtime.memcpyAsync(
                address,
                source.ctypes.data,
                source.nbytes,
                self._runtime.memcpyHostToDevice,
                stream.ptr,
            )

    def download(self, target: NDArray[np.uint8], address: int, stream: Stream) -> None:
        assert target.flags.c_contiguous
        with self._translated:
            self._runtime.memcpyAsync(
                target.ctypes.data,
                address,
                target.nbytes,
                self._runtime.memcpyDeviceToHost,
                stream.ptr,
            )

    def prepare(self, kernels: Iterable[str]) -> None:
        modules = {self._module_of[kernel].name: self._module_of[kernel] for kernel in kernels}
        missing = [module for name, module in modules.items() if name not in self._compiled]
        with self._translated, ThreadPoolExecutor() as pool:
            list(pool.map(self._compile, missing))

    def _compile(self, module: CudaModule) -> None:
        """Not by cupy.RawModule, which has the smallest numbers computed as zeros (-ftz)."""
        compiler = self._cuda.compiler

        def make() -> bytes:
            made = compiler.compile_using_nvrtc(module.source, _OPTIONS, cache_in_memory=True)
            return bytes(made[0])

        version = self._cuda.nvrtc.getVersion()
        loaded = self._cuda.function.Module()
        loaded.load(kept_code(f"{version} {self._target} {_OPTIONS} {module.source}", make))
        self._compiled[module.name] = loaded

    def _find(self, kernel: str, arguments: Sequence[int | float]) -> _Kernel:
        module = self._compiled[self._module_of[kernel].name]
        with self._translated:
            return _Kernel(module.get_function(kernel), arguments)

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: Stream,
    ) -> None:
        found = self._kernels.get(kernel)
        if found is None:
            self.prepare((kernel,))
            found = self._kernels[kernel] = self._find(kernel, arguments)
        with self._translated:
            if not self._binding.bound:
                self._runtime.setDevice(0)
                self._binding.bound = True
            found.pack(*arguments)
            self._launch(found.function, *grid, *block, 0, stream.ptr, found.parameters, 0)

    def joined(self, launches: Sequence[KernelLaunch]) -> Callable[[], None]:
        """They become a CUDA graph, which the host launches with one call."""
        capture, compute = self._capture, self.compute
        with self._translated:
            capture.begin_capture()
            try:
                for each in launches:
                    self.launch(*each, capture)
            finally:
                graph = capture.end_capture()

        def launch() -> None:
            with self._translated:
                graph.launch(compute)

        return launch

    def matmul(
        self,
        out: int,
        x: int,
        w: int,
        tokens: int,
        rows: int,
        columns: int,
        stream: Stream,
    ) -> None:
        # cuBLAS counts columns first: to it this is out.T [rows, tokens] = w @ x.T
        blas, one = self._cublas, self._factors.ctypes.data
        with self._translated, stream:
            blas.gemmEx(
                self._cuda.device.get_cublas_handle(),
                blas.CUBLAS_OP_T,
                blas.CUBLAS_OP_N,
                *(rows, tokens, columns),
                *(one, w, _FLOAT32, columns),
                *(x, _FLOAT32, columns),
                *(one + 4, out, _FLOAT32, rows),
                blas.CUBLAS_COMPUTE_32F,
                _DEFAULT_ALGORITHM,
            )

    # -------------------------------------------------------------------------- order
    def record(self, stream: Stream, *, sleep: bool = False) -> Event:
        with self._translated:
            event = self._cuda.Event(block=sleep, disable_timing=True)
            event.record(stream)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        with self._translated:
            stream.wait_event(event)

    def done(self, event: Event) -> bool:
        return bool(event.done)

    def synchronize(self, event: Event) -> None:
        with self._translated:
            event.synchronize()

    def close(self) -> None:
        """Wait for the device; what failed before has been told already."""
        with contextlib.suppress(*self._failures):
            self._runtime.deviceSynchronize()
