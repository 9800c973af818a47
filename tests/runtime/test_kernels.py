"""Weight kernels against gguf-py in float64, against ggml's bytes, and against themselves."""

from __future__ import annotations

import ctypes
from pathlib import Path

import gguf
import numpy as np
import pytest

from colibri_mmap.format.quants import GGMLType, block_geometry
from colibri_mmap.runtime.kernels.registry import ACTIVATIONS, weight_kernels
from colibri_mmap.runtime.task import SCRATCH_BYTES, Task

QUANTISED = tuple(
    GGMLType[name] for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
CASES = [(type, "exact") for type in FLOATS + QUANTISED] + [(type, "int8") for type in QUANTISED]
DATA = Path(__file__).parents[1] / "data" / "types"


def aligned(nbytes: int) -> np.ndarray:
    buffer = np.full(nbytes + 64, 0xA5, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes]


SCRATCH = aligned(SCRATCH_BYTES)


def run(task: Task, units: int, *arguments: int, chunk: int | None = None) -> None:
    """What the pool does, on this thread."""
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(task.address)
    words = np.array(arguments, np.int64)
    for lo in range(0, units, chunk or units):
        call(words.ctypes.data, lo, min(units, lo + (chunk or units)), SCRATCH.ctypes.data)


def random_weights(type: GGMLType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row bytes]: random block bytes with scales of mixed size, zero and denormal among them."""
    if type in FLOATS:
        w = rng.standard_normal((rows, columns)).astype(np.float32)
        if type is GGMLType.F16:
            return w.astype(np.float16).view(np.uint8)
        return w.view(np.uint16)[:, 1::2].copy().view(np.uint8) if type == 30 else w.view(np.uint8)
    block, size = block_geometry(type)
    raw = rng.integers(0, 256, (rows * columns // block, size), np.uint8)
    for offset in {
        "Q4_K": (0, 2),
        "Q5_K": (0, 2),
        "Q6_K": (208,),
        "Q4_1": (0, 2),
        "Q5_1": (0, 2),
    }.get(type.name, (0,)):
        scales = rng.uniform(0.2, 2, len(raw)) * rng.choice([1, -1], len(raw)) * 1e-3
        scales = scales.astype(np.float16)
        scales[rng.random(len(raw)) < 0.02] = 0
        scales[rng.random(len(raw)) < 0.02] = 3e-7
        raw[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def dequantised(type: GGMLType, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type)).astype(np.float64)


def rounded(name: str, x: np.ndarray) -> np.ndarray:
    """The activations as the kernels round them, float64."""
    if name == "f32":
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, int(name.split("_")[1]))
    d = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    q = np.rint(blocks / np.where(d > 0, d, np.float32(1)))
    return (q.astype(np.float64) * d).reshape(x.shape)


def pack(name: str, x: np.ndarray, lanes: bool, picked: np.ndarray | None = None) -> np.ndarray:
    """Records uint8 [n, record bytes] of x f32 [tokens, K]."""
    form, (tokens, columns) = ACTIVATIONS[name], x.shape
    tokens = tokens if picked is None else len(picked)
    units = -(-tokens // 16) if lanes else tokens
    nbytes = (form.lanes_bytes if lanes else form.column_bytes)(columns)
    out = aligned(units * nbytes).reshape(units, nbytes)
    source = (x.ctypes.data, x.strides[0], 0 if picked is None else picked.ctypes.data)
    if lanes:
        run(form.pack_lanes, units, *source, tokens, columns, out.ctypes.data, nbytes)
    else:
        run(form.pack_columns, units, *source, columns, out.ctypes.data, nbytes)
    return out


def multiply(
    type: GGMLType, mode: str, raw: np.ndarray, x: np.ndarray, lanes: bool, chunk: int | None = None
) -> np.ndarray:
    """y f32 [tokens, rows]."""
    kernels = weight_kernels(type, mode)
    assert kernels is not None
    rows, (tokens, columns) = len(raw), x.shape
    records = pack(kernels.activation, x, lanes)
    y = np.full((tokens + 1, rows + 5), np.nan, np.float32)
    run(
        kernels.matmul if lanes else kernels.matvec,
        rows,
        raw.ctypes.data,
        raw.strides[0],
        columns,
        records.ctypes.data,
        records.strides[0],
        tokens,
        y.ctypes.data,
        y.strides[0],
        chunk=chunk,
    )
    assert np.isnan(y[tokens]).all(), "a token too many was written"
    assert np.isnan(y[:, rows:]).all(), "a row too many was written"
    return y[:tokens, :rows]


def assert_close(type: GGMLType, mode: str, raw: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    kernels = weight_kernels(type, mode)
    assert kernels is not None
    w, v = dequantised(type, raw), rounded(kernels.activation, x)
    reference, size = v @ w.T, np.abs(v) @ np.abs(w.T)
    # Short rows are few terms: the rounding of the largest does not average out.
    allowed = (4e-8 if x.shape[1] >= 1024 else 2**-23) * size
    worst = np.max(np.abs(y - reference) / np.maximum(allowed, 1e-30))
    assert worst <= 1, f"{worst:.2f} times the allowed error"


def shapes(type: GGMLType) -> list[tuple[int, int]]:
    """(rows, columns), tails included."""
    block = block_geometry(type)[0]
    return {1: [(7, 77), (35, 1040)], 32: [(7, 96), (35, 1056)], 256: [(7, 256), (35, 1280)]}[block]


@pytest.mark.parametrize(("type", "mode"), CASES, ids=lambda value: getattr(value, "name", value))
def test_products(type: GGMLType, mode: str) -> None:
    rng = np.random.default_rng(type)
    for rows, columns in shapes(type):
        raw = random_weights(type, rows, columns, rng)
        for tokens in (1, 2, 3, 5, 16, 17, 33, 64):
            x = rng.standard_normal((tokens, columns)).astype(np.float32)
            for lanes in (False, True):
                y = multiply(type, mode, raw, x, lanes)
                assert_close(type, mode, raw, x, y)
