"""The CUDA sources as modules for a compiler: includes in place, one module per type of weights.

A kernel's name decides its module, so that only what a model uses is ever compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..format.quants import GGMLType

FOLDER = Path(__file__).parent / "cuda"
FLOAT_TYPES = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
WEIGHT_TYPES = FLOAT_TYPES + tuple(
    GGMLType[name]
    for name in (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"),
        *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
    )
)
COLUMN_COUNTS = (1, 2, 4, 8)

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)
_KERNEL = re.compile(r'^extern "C" __global__ void (\w+)\(', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CudaModule:
    """One translation unit and the kernels in it."""

    name: str
    source: str
    kernels: tuple[str, ...]


@cache
def cuda_modules() -> dict[str, CudaModule]:
    """Every module by its name."""
    return {module.name: module for module in _modules()}


@cache
def cuda_sources() -> dict[str, str]:
    """The text of every module by its name."""
    return {name: module.source for name, module in cuda_modules().items()}


@cache
def module_of(kernel: str) -> str:
    """The name of the module that has a kernel; KeyError."""
    return {name: m.name for m in cuda_modules().values() for name in m.kernels}[kernel]


def _modules() -> Iterator[CudaModule]:
    for path in sorted(FOLDER.glob("*.cu")):
        source = _expanded(path.name, set())
        if path.stem != "experts":
            yield CudaModule(path.stem, source, tuple(_KERNEL.findall(source)))
            continue
        for type in WEIGHT_TYPES:
            name = type.name.lower()
            yield CudaModule(f"experts_{name}", f"#define TYPE {name}\n{source}", _of_type(name))


def _of_type(name: str) -> tuple[str, ...]:
    """The kernels of experts.cu for a type, in the order of the file."""
    by_row = (f"{kernel}_{name}_c{n}" for n in COLUMN_COUNTS for kernel in ("matvec", "gate_up"))
    downs = (f"down_{name}_c{n}" for n in COLUMN_COUNTS[1:])
    return (*by_row, *downs, f"down_weighted_{name}", f"dequantise_{name}")


def _expanded(name: str, done: set[str]) -> str:
    """A file with its includes in place, each once."""
    done.add(name)
    text = (FOLDER / name).read_text().replace("#pragma once\n", "")
    return _INCLUDE.sub(lambda m: "" if m[1] in done else _expanded(m[1], done), text)
