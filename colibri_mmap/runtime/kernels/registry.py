"""Which kernels serve a matrix of a ggml type; nothing is compiled until an address is asked for.

`int8` rounds activations to 8 bit where the weights are quantised; `exact` keeps them float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...format.quants import GGMLType, block_geometry
from ..task import Task
from . import activations, dequantise, exact, matmul, matvec_32, matvec_256

Mode = Literal["int8", "exact"]

_COLUMNS_LIMIT = {"f32": 8, "q8_32": 4, "q8_256": 4}  # the measured cross-over
_INT8 = {32: ("q8_32", matvec_32), 256: ("q8_256", matvec_256)}  # by weights per block


@dataclass(frozen=True, slots=True)
class WeightKernels:
    """How to multiply by a matrix; `block` is the unit of its row length in weights."""

    activation: str
    matvec: Task
    matmul: Task
    block: int
    columns_limit: int


@dataclass(frozen=True, slots=True)
class Activation:
    """A form of activations; the byte counts are those of one record for row length K."""

    name: str
    pack_columns: Task
    pack_lanes: Task
    column_bytes: Callable[[int], int]
    lanes_bytes: Callable[[int], int]


def _activation(name: str) -> Activation:
    return Activation(
        name,
        getattr(activations, f"pack_columns_{name}"),
        getattr(activations, f"pack_lanes_{name}"),
        getattr(activations, f"{name}_column_bytes"),
        getattr(activations, f"{name}_lanes_bytes"),
    )


ACTIVATIONS = {name: _activation(name) for name in ("f32", "q8_32", "q8_256")}


def weight_kernels(type: GGMLType, mode: Mode) -> WeightKernels | None:
    """The kernels for matrices of a type, or None where there are none."""
    name = type.name.lower()
    block = block_geometry(type)[0]
    if not hasattr(exact, f"exact_matvec_{name}"):
        return None
    if mode == "int8" and block in _INT8:
        activation, columns = _INT8[block]
        pair = getattr(columns, f"matvec_{name}"), getattr(matmul, f"matmul_{name}")
    else:
        activation = "f32"
        pair = getattr(exact, f"exact_matvec_{name}"), getattr(exact, f"exact_matmul_{name}")
    return WeightKernels(activation, *pair, block, _COLUMNS_LIMIT[activation])


def dequantise_task(type: GGMLType) -> Task | None:
    """The task that makes rows of a type float32, or None."""
    return getattr(dequantise, f"dequantise_{type.name.lower()}", None)
