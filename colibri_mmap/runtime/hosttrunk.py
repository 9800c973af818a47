"""The kernels of cuda/trunk.cu and attention.cu in numpy, for a device that is host memory.

Each function takes the grid and the kernel's arguments, as trunkkernels.py makes them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from .device import Dimensions
from .trunkkernels import PLACE_WORDS, SLICE_WORDS

Twin = Callable[..., None]


def array(
    address: int,
    shape: tuple[int, ...],
    dtype: DTypeLike = np.float32,
    stride: int | None = None,
) -> NDArray[Any]:
    """What lies at an address; `stride`: elements between rows that are not neighbours.

    A stride of 0 repeats the first row.
    """
    kind = np.dtype(dtype)
    strides = [kind.itemsize * int(np.prod(shape[axis + 1 :])) for axis in range(len(shape))]
    if stride is not None:
        strides[0] = stride * kind.itemsize
    span = kind.itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    memory = memoryview((ctypes.c_uint8 * span).from_address(address))
    return np.ndarray(shape, kind, memory, 0, strides)


def _rows(address: int, stride: int, count: int, width: int) -> NDArray[np.float32]:
    """float32 [count, width]; a stride of 0 repeats the first row."""
    return array(address, (count, width), stride=stride)


def _sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.asarray(1 / (1 + np.exp(-x)), np.float32)


# ------------------------------------------------------------------------------ norms, elementwise
def _rms_norm(
    grid: Dimensions, x: int, xs: int, out: int, outs: int, weight: int, n: int, eps: float
) -> None:
    source = _rows(x, xs, grid[0], n)
    squares = np.mean(np.square(source), axis=1, keepdims=True)
    factor = 1 / np.sqrt(squares + np.float32(eps))
    _rows(out, outs, grid[0], n)[:] = source * factor * array(weight, (n,))


def _layer_norm(
    grid: Dimensions,
    x: int,
    xs: int,
    out: int,
    outs: int,
    weight: int,
    bias: int,
    n: int,
    eps: float,
) -> None:
    source = _rows(x, xs, grid[0], n)
    apart = source - source.mean(axis=1, keepdims=True)
    factor = 1 / np.sqrt(np.mean(np.square(apart), axis=1, keepdims=True) + np.float32(eps))
    scaled = apart * factor * array(weight, (n,))
    _rows(out, outs, grid[0], n)[:] = scaled + array(bias, (n,)) if bias else scaled


def _silu_mul(
    grid: Dimensions, gate: int, gs: int, up: int, us: int, out: int, outs: int, n: int
) -> None:
    g, u = _rows(gate, gs, grid[1], n), _rows(up, us, grid[1], n)
    _rows(out, outs, grid[1], n)[:] = g * _sigmoid(g) * u


def _sigmoid_mul(
    grid: Dimensions, gate: int, gs: int, up: int, us: int, out: int, outs: int, n: int
) -> None:
    g, u = _rows(gate, gs, grid[1], n), _rows(up, us, grid[1], n)
    _rows(out, outs, grid[1], n)[:] = _sigmoid(g) * u


def _add_rows(grid: Dimensions, x: int, xs: int, y: int, ys: int, n: int) -> None:
    _rows(x, xs, grid[1], n)[:] += _rows(y, ys, grid[1], n)


def _add_gated(
    grid: Dimensions, x: int, xs: int, y: int, ys: int, gate: int, gs: int, n: int
) -> None:
    factor = _sigmoid(_rows(gate, gs, grid[1], 1))
    _rows(x, xs, grid[1], n)[:] += factor * _rows(y, ys, grid[1], n)


def _scale_rows(grid: Dimensions, x: int, xs: int, factors: int, fs: int, n: int) -> None:
    _rows(x, xs, grid[1], n)[:] *= _rows(factors, fs, grid[1], 1)


def _clamp_rows(grid: Dimensions, x: int, xs: int, n: int, limit: float) -> None:
    values = _rows(x, xs, grid[1], n)
    np.clip(values, -limit, limit, out=values)


def _fill_rows(grid: Dimensions, x: int, xs: int, n: int, value: float) -> None:
    _rows(x, xs, grid[1], n)[:] = value


def _copy_rows(grid: Dimensions, x: int, xs: int, index: int, out: int, outs: int, n: int) -> None:
    rows = array(index, (grid[1],), np.int32) if index else np.arange(grid[1])
    source = _rows(x, xs, int(rows.max()) + 1, n)
    _rows(out, outs, grid[1], n)[:] = source[rows]


def _rope(
    grid: Dimensions,
    x: int,
    xs: int,
    heads: int,
    size: int,
    cosines: int,
    sines: int,
    ts: int,
    pairs: int,
    half_split: int,
) -> None:
    count = grid[1]
    values = _rows(x, xs, count, heads * size)
    c, s = (_rows(table, ts, count, pairs)[:, None] for table in (cosines, sines))
    rotated = values.reshape(count, heads, size)[..., : 2 * pairs].copy()
    first = slice(0, pairs) if half_split else slice(0, None, 2)
    second = slice(pairs, None) if half_split else slice(1, None, 2)
    a, b = rotated[..., first].copy(), rotated[..., second].copy()
    rotated[..., first], rotated[..., second] = a * c - b * s, a * s + b * c
    for head in range(heads):
        values[:, head * size : head * size + 2 * pairs] = rotated[:, head]


# ------------------------------------------------------------------------------ attention
def _cache(
    place: NDArray[np.uint64], head: int, dk: int, dv: int, dtype: DTypeLike
) -> tuple[NDArray[Any], NDArray[Any]]:
    """K [ring / 16, dk, 16] and V [ring, padded dv] of a KV head."""
    keys, values, key_stride, value_stride, ring = (int(word) for word in place)
    padded = -(-dv // 16) * 16
    return (
        array(keys + head * key_stride, (ring // 16, dk, 16), dtype),
        array(values + head * value_stride, (ring, padded), dtype),
    )


def _positions(
    place: NDArray[np.uint64],
    head: int,
    dk: int,
    dv: int,
    dtype: DTypeLike,
    begin: int,
    end: int,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """K [n, dk] and V [n, dv] of a KV head from position `begin` to `end`."""
    keys, values = _cache(place, head, dk, dv, dtype)
    at = np.arange(begin, end) % len(values)
    groups = np.arange(begin // 16, -(-end // 16)) % len(keys)
    by_position = keys[groups].astype(np.float32).transpose(0, 2, 1).reshape(-1, dk)
    start = begin % 16
    return by_position[start : start + end - begin], values[at, :dv].astype(np.float32)


def _tables(slices: int, places: int, count: int) -> zip[tuple[Any, Any]]:
    return zip(
        array(slices, (count, SLICE_WORDS), np.int32).tolist(),
        array(places, (count, PLACE_WORDS), np.uint64),
        strict=True,
    )


def _append(
    dtype: DTypeLike,
    grid: Dimensions,
    k: int,
    ks: int,
    v: int,
    vs: int,
    heads: int,
    dk: int,
    dv: int,
    slices: int,
    places: int,
) -> None:
    for (first, tokens, position, _), place in _tables(slices, places, grid[2]):
        at = np.arange(position, position + tokens) % int(place[4])
        new_k = _rows(k + 4 * ks * first, ks, tokens, heads * dk)
        new_v = _rows(v + 4 * vs * first, vs, tokens, heads * dv)
        for head in range(heads):
            keys, values = _cache(place, head, dk, dv, dtype)
            keys[at // 16, :, at % 16] = new_k[:, head * dk : head * dk + dk]
            values[at, :dv] = new_v[:, head * dv : head * dv + dv]
            values[at, dv:] = 0


def _attention(
    dtype: DTypeLike,
    grid: Dimensions,
    q: int,
    qs: int,
    out: int,
    outs: int,
    slices: int,
    places: int,
    row_blocks: int,
    most: int,
    group: int,
    dk: int,
    dv: int,
    scale: float,
    window: int,
    chunk: int,
    sinks: int,
    partials: int,
) -> None:
    """The shares of the keys are not cut: the first one gets all of them, the others none."""
    kv_heads, shares = grid[0] // row_blocks, grid[1]
    heads = kv_heads * group
    for (first, tokens, position, _), place in _tables(slices, places, grid[2]):
        positions = np.arange(position, position + tokens)
        hidden = np.maximum(positions - window, positions // chunk * chunk - 1)
        begin = max(int(hidden[0]), -1) + 1
        key = np.arange(begin, position + tokens)
        seen = (key <= positions[:, None]) & (key > hidden[:, None])
        queries = _rows(q + 4 * qs * first, qs, tokens, heads * dk).reshape(tokens, heads, dk)
        for head in range(kv_heads):
            k, v = _positions(place, head, dk, dv, dtype, begin, position + tokens)
            some = slice(head * group, (head + 1) * group)
            scores = np.einsum("thd,kd->thk", queries[:, some] * np.float32(scale), k)
            scores = np.where(seen[:, None], scores, np.float32(-1e38))
            best = scores.max(axis=2)
            if sinks:
                sink = array(sinks, (heads,))[some]
                best = np.maximum(best, sink)
            weights = np.exp(scores - best[..., None])
            total = weights.sum(axis=2)
            if sinks:
                total += np.exp(sink - best)
            summed = np.einsum("thk,kd->thd", weights, v)  # no threads: they may cost more
            if shares == 1:
                target = _rows(out + 4 * (outs * first + some.start * dv), outs, tokens, group * dv)
                target[:] = (summed / total[..., None]).reshape(tokens, -1)
                continue
            row, stride = (
                (first * heads + some.start) * shares * (2 + dv),
                heads * shares * (2 + dv),
            )
            states = array(partials + 4 * row, (tokens, group, shares, 2 + dv), stride=stride)
            states[:], states[..., 0] = 0, -1e30
            states[:, :, 0, 0], states[:, :, 0, 1], states[:, :, 0, 2:] = best, total, summed


def _attention_reduce(
    grid: Dimensions, partials: int, out: int, outs: int, dv: int, shares: int
) -> None:
    heads, tokens = grid[:2]
    states = array(partials, (tokens, heads, shares, 2 + dv))
    weights = np.exp(states[..., 0] - states[..., 0].max(axis=2, keepdims=True))
    total = (weights * states[..., 1]).sum(axis=2)
    summed = (weights[..., None] * states[..., 2:]).sum(axis=2)
    _rows(out, outs, tokens, heads * dv)[:] = (summed / total[..., None]).reshape(tokens, -1)


TWINS: dict[str, Twin] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "silu_mul": _silu_mul,
    "sigmoid_mul": _sigmoid_mul,
    "add_rows": _add_rows,
    "add_gated": _add_gated,
    "scale_rows": _scale_rows,
    "clamp_rows": _clamp_rows,
    "fill_rows": _fill_rows,
    "copy_rows": _copy_rows,
    "rope": _rope,
    "attention_reduce": _attention_reduce,
}
for _kv_type, _dtype in (("f16", np.float16), ("f32", np.float32)):
    TWINS[f"append_kv_{_kv_type}"] = partial(_append, _dtype)
    for _number in (4, 8, 32):
        for _size in (128, 256):
            TWINS[f"attention_{_kv_type}_r{_number}_d{_size}"] = partial(_attention, _dtype)


def execute(
    kernel: str, grid: Dimensions, block: Dimensions, arguments: tuple[int | float, ...]
) -> None:
    """Run a kernel of the trunk: an Executor of hostdevice.py."""
    TWINS[kernel](grid, *arguments)
