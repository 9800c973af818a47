"""CUDA kernels on the CPU: simt.h and simt.cpp run the product's CUDA text under g++.

`Shim(folder)` builds a module when its first kernel is asked for and runs kernels on host
addresses; it is an executor, as HostBackend takes one. `seed` 0 runs the threads in ascending
order, 1 in descending order, others shuffled: results must not differ by a bit. A kernel that
misuses warps or barriers raises AssertionError, and so do arguments that are not of the kernel's
kinds. The fixture `shim` (tests/runtime/conftest.py) keeps what was built. A module that is
asked for is any file of runtime/cuda; what simt.h lacks of CUDA is added there.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules, module_of
from colibri_mmap.runtime.device import Address, Dimensions

HERE = Path(__file__).parent
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-ffp-contract=off")


@dataclass(slots=True)
class Shim:
    """Runs kernels of the CUDA sources, or of `modules` in their place, through g++."""

    folder: Path
    seed: int = 0
    flags: tuple[str, ...] = ()
    modules: dict[str, CudaModule] = field(default_factory=dict)
    _loaded: dict[str, ctypes.CDLL] = field(default_factory=dict)

    def __call__(
        self, kernel: str, grid: Dimensions, block: Dimensions, arguments: Sequence[int | float]
    ) -> None:
        library = self.library(module_of(kernel))
        values = [_c_value(argument) for argument in arguments]
        signature = "".join(letter for letter, _ in values)
        expected = library.simt_signature(kernel.encode())
        assert expected is not None, f"{kernel} is not in its module"
        assert signature == expected.decode(), f"{kernel} takes {expected.decode()}: {signature}"
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for _, v in values))
        sizes = ((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block))
        wrong = library.simt_run(kernel.encode(), *sizes, self.seed, pointers).decode()
        assert not wrong, f"{kernel}: {wrong}"

    def library(self, name: str) -> ctypes.CDLL:
        """The compiled module, built now if it was not yet."""
        if name not in self._loaded:
            self._loaded[name] = library = ctypes.CDLL(str(self.build(name)))
            library.simt_run.restype = library.simt_signature.restype = ctypes.c_char_p
        return self._loaded[name]

    def build(self, name: str) -> Path:
        """The shared library of a module; what has the same content is built once."""
        module = self.modules.get(name) or cuda_modules()[name]
        kernels = " ".join(f"SIMT({kernel})" for kernel in module.kernels)
        shim = b"".join((HERE / file).read_bytes() for file in ("simt.h", "simt.cpp"))
        flags = (*FLAGS, *self.flags)
        content = "\0".join((module.source, kernels, *flags)).encode() + shim
        stem = self.folder / f"{name}-{hashlib.sha256(content).hexdigest()[:16]}"
        library = stem.with_suffix(".so")
        if not library.exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            source = stem.with_suffix(".cu")
            source.write_text(module.source)
            defines = (f'-DKERNEL_FILE="{source}"', f"-DSIMT_KERNELS={kernels}")
            command = ["g++", *flags, *defines, f"-I{HERE}", str(HERE / "simt.cpp"), "-o"]
            unfinished = stem.with_suffix(".part")
            subprocess.run([*command, str(unfinished)], check=True)
            unfinished.replace(library)
        return library


def _c_value(argument: int | float) -> tuple[str, ctypes._SimpleCData[int] | ctypes.c_float]:
    if isinstance(argument, Address):
        return "p", ctypes.c_uint64(argument)
    if isinstance(argument, int):
        return "i", ctypes.c_int32(argument)
    return "f", ctypes.c_float(argument)
