"""The kernels of cuda/experts.cu and cuda/rows.cu in numpy, for a device that is host memory.

Each twin takes the grid and the kernel's arguments, as devicekernels.py makes them. Weights are
made float32 by the engine's own kernels, products are numpy's.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType, row_bytes
from .cudasources import COLUMN_COUNTS, FLOAT_TYPES, WEIGHT_TYPES
from .device import Dimensions
from .hosttrunk import TWINS as TRUNK_TWINS
from .hosttrunk import Twin, array
from .kernels.registry import dequantise_task
from .task import SCRATCH_BYTES

Floats: TypeAlias = NDArray[np.float32]

_BLOCK = 32  # activations per scale


def execute(
    kernel: str, grid: Dimensions, block: Dimensions, arguments: Sequence[int | float]
) -> None:
    """Run any kernel of the device: an Executor of hostdevice.py."""
    twin = _TWINS.get(kernel) or TRUNK_TWINS[kernel]
    with np.errstate(invalid="ignore", over="ignore"):  # what is not finite passes through
        twin(grid, *arguments)


# ------------------------------------------------------------------ operands
def _weights(type: GGMLType, address: int, rows: int, columns: int) -> Floats:
    """A matrix as float32 [rows, columns]."""
    nbytes, out = row_bytes(type, columns), np.empty((rows, columns), np.float32)
    if dequantise_task(type) is None:
        from gguf import GGMLQuantizationType, quants

        raw = array(address, (rows, nbytes), np.uint8)
        out[:] = quants.dequantize(raw, GGMLQuantizationType(type))
        return out
    call, scratch = _dequantiser(type)
    words = np.array((address, nbytes, columns, out.ctypes.data, 4 * columns, 0), np.int64)
    call(words.ctypes.data, 0, rows, scratch.ctypes.data)
    return out


@cache
def _dequantiser(type: GGMLType) -> tuple[Any, NDArray[np.uint8]]:
    task = dequantise_task(type)
    assert task is not None
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(task.address), np.empty(
        SCRATCH_BYTES, np.uint8
    )


def _activations(type: GGMLType, packed: Sequence[int], columns: int, count: int) -> Floats:
    """What products see of activations (x, scales, stride): float32 [count, columns]."""
    x, scales, stride = packed
    if type in FLOAT_TYPES:
        return array(x, (count, columns), np.float32, stride)
    blocks = (count, columns // _BLOCK, _BLOCK)
    q, d = array(x, blocks, np.int8), array(scales, (*blocks[:2], 2))[:, :, :1]
    return np.asarray(q * d, np.float32).reshape(count, columns)


def _activate(gate: Floats, up: Floats, activation: int) -> Floats:
    if activation == 0:
        return np.asarray(gate / (1 + np.exp(-gate)) * up, np.float32)
    gate, up = np.minimum(gate, np.float32(7)), np.clip(up, np.float32(-7), np.float32(7))
    return np.asarray((up + 1) * (gate / (1 + np.exp(np.float32(-1.702) * gate))), np.float32)


def _bias(table: int, group: int, rows: int) -> Floats | np.float32:
    address = int(array(table + 8 * group, (1,), np.uint64)[0])
    return array(address, (rows,)) if address else np.float32(0)


def _pointer(table: int, group: int) -> int:
    return int(array(table + 8 * group, (1,), np.uint64)[0])


# ------------------------------------------------------------------ rows.cu
def _quantise_q8(
    grid: Dimensions, x: int, q: int, scales: int, stride: int, width: int, shared: int
) -> None:
    count, blocks = grid[1], width // _BLOCK
    values = array(x, (count, width), np.float32, stride).reshape(count, blocks, _BLOCK)
    largest = np.abs(values).max(axis=2)
    if shared:
        together = blocks // grid[0]
        largest = np.repeat(largest.reshape(count, -1, together).max(axis=2), together, axis=1)
    d = largest / np.float32(127)
    some = d != 0
    divided = values / np.where(some, d, np.float32(1))[:, :, None]
    rounded = np.clip(np.rint(np.nan_to_num(divided, nan=0.0)), -127, 127)
    rounded *= some[:, :, None]
    array(q, (count, blocks, _BLOCK), np.int8)[:] = rounded
    array(scales, (count, blocks, 2))[:] = np.stack([d, d * rounded.sum(axis=2)], axis=2)


def _combine_pairs(
    grid: Dimensions,
    y: int,
    off: int,
    row: int,
    weights: int,
    out: int,
    out_stride: int,
    width: int,
    add: int,
) -> None:
    starts = array(off, (grid[1] + 1,), np.int32)
    pairs, factors = array(row, (starts[-1],), np.int32), array(weights, (starts[-1],))
    for token in range(grid[1]):
        target = array(out + 4 * token * out_stride, (width,))
        total = target.copy() if add else np.zeros(width, np.float32)
        for entry in range(starts[token], starts[token + 1]):
            total += factors[entry] * array(y + 4 * width * int(pairs[entry]), (width,))
        target[:] = total


# ------------------------------------------------------------------ experts.cu
def _matvec(type: GGMLType, grid: Dimensions, w: int, *rest: int) -> None:
    *packed, out, out_stride, rows, columns, count = rest
    x = _activations(type, packed, columns, count)
    target = array(out, (count, rows), np.float32, out_stride)
    target[:] = x @ _weights(type, w, rows, columns).T


def _gate_up(type: GGMLType, grid: Dimensions, *arguments: int) -> None:
    gates, ups, gate_biases, up_biases, off, col, *packed, out, rows, columns, kind = arguments
    starts = array(off, (grid[1] + 1,), np.int32)
    tokens = array(col, (starts[-1],), np.int32)
    if not len(tokens):
        return
    x = _activations(type, packed, columns, int(tokens.max()) + 1)
    target = array(out, (len(tokens), rows))
    for group in range(grid[1]):
        pairs = slice(starts[group], starts[group + 1])
        if pairs.start == pairs.stop:
            continue
        chosen = x[tokens[pairs]]
        gate = chosen @ _weights(type, _pointer(gates, group), rows, columns).T
        up = chosen @ _weights(type, _pointer(ups, group), rows, columns).T
        gate += _bias(gate_biases, group, rows)
        up += _bias(up_biases, group, rows)
        target[pairs] = _activate(gate, up, kind)


def _down(type: GGMLType, grid: Dimensions, *arguments: int) -> None:
    downs, biases, off, *packed, out, rows, columns = arguments
    starts = array(off, (grid[1] + 1,), np.int32)
    x = _activations(type, packed, columns, starts[-1])
    target = array(out, (starts[-1], rows))
    for group in range(grid[1]):
        pairs = slice(starts[group], starts[group + 1])
        if pairs.start != pairs.stop:
            w = _weights(type, _pointer(downs, group), rows, columns)
            target[pairs] = x[pairs] @ w.T + _bias(biases, group, rows)


def _down_weighted(type: GGMLType, grid: Dimensions, *arguments: int) -> None:
    downs, biases, off, row, weights, *packed, out, out_stride, rows, columns, entries, add = (
        arguments
    )
    starts = array(off, (grid[1] + 1,), np.int32)
    pairs, factors = array(row, (entries,), np.int32), array(weights, (entries,))
    x = _activations(type, packed, columns, int(pairs.max(initial=-1)) + 1)
    for token in range(grid[1]):
        total = np.zeros(rows, np.float32)
        for entry in range(starts[token], starts[token + 1]):
            w = _weights(type, _pointer(downs, entry), rows, columns)
            total += factors[entry] * (w @ x[pairs[entry]] + _bias(biases, entry, rows))
        target = array(out + 4 * token * out_stride, (rows,))
        target[:] = target + total if add else total


def _dequantise(
    type: GGMLType, grid: Dimensions, w: int, out: int, rows: int, columns: int
) -> None:
    array(out, (rows, columns))[:] = _weights(type, w, rows, columns)


_TWINS: dict[str, Twin] = {"quantise_q8": _quantise_q8, "combine_pairs": _combine_pairs}
for _type in WEIGHT_TYPES:
    _name = _type.name.lower()
    for _n in COLUMN_COUNTS:
        _TWINS[f"matvec_{_name}_c{_n}"] = partial(_matvec, _type)
        _TWINS[f"gate_up_{_name}_c{_n}"] = partial(_gate_up, _type)
    for _n in COLUMN_COUNTS[1:]:
        _TWINS[f"down_{_name}_c{_n}"] = partial(_down, _type)
    _TWINS[f"down_weighted_{_name}"] = partial(_down_weighted, _type)
    _TWINS[f"dequantise_{_name}"] = partial(_dequantise, _type)
