"""The kernels of cuda/trunk.cu, run by the shim, and their numpy twins, against float64.

Every case runs under three schedules, whose results must be the same to the bit.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from shim import Shim

from colibri_mmap.runtime import hosttrunk
from colibri_mmap.runtime import trunkkernels as kernels
from colibri_mmap.runtime.arena import Rows
from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules
from colibri_mmap.runtime.device import Dimensions
from colibri_mmap.runtime.kernels import attention as cpu_attention
from colibri_mmap.runtime.kv import KVShape
from colibri_mmap.runtime.trunkkernels import AttentionGrid, KernelLaunch, Slices

Floats = NDArray[np.float32]
Executor = Callable[[str, Dimensions, Dimensions, Sequence[int | float]], None]
SEEDS = (0, 1, 5)
TOLERANCE = 2e-6  # of the largest value


def run_all(shim: Shim, case: Callable[[Executor], Floats]) -> Floats:
    """The result of a case, the same under all schedules; its twin's must be close to it."""
    results = [case(replace(shim, seed=seed)) for seed in SEEDS]
    for result in results[1:]:
        assert result.tobytes() == results[0].tobytes(), "results depend on the schedule"
    check(case(hosttrunk.execute), results[0])
    return results[0]


def check(found: Floats, expected: NDArray[np.floating], tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max()
    assert error <= tolerance * max(1.0, float(np.abs(expected).max())), f"off by {error}"


def execute(executor: Executor, *launches: KernelLaunch) -> None:
    for launch in launches:
        executor(*launch)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def rows_of(array: Floats, width: int | None = None) -> Rows:
    """The first `width` numbers of every row of an array as Rows."""
    count, whole = array.shape
    width = width or whole
    return Rows(array.ctypes.data, count, width, 4 * (whole - width))


def sigmoid(x: NDArray[np.floating]) -> NDArray[np.float64]:
    return 1 / (1 + np.exp(-x.astype(np.float64)))


# ------------------------------------------------------------------------------ norms
@pytest.mark.parametrize(("count", "width"), [(3, 64), (1, 130), (2, 4096), (5, 7)])
def test_rms_norm(shim: Shim, count: int, width: int) -> None:
    x, weight = numbers(1, count, width + 3, scale=3), numbers(2, width)

    def case(executor: Executor) -> Floats:
        out = np.full((count, width), np.nan, np.float32)
        source = rows_of(x, width)
        execute(executor, kernels.rms_norm(source, rows_of(out), weight.ctypes.data, 0.5))
        return out

    exact = x[:, :width].astype(np.float64)
    root = np.sqrt((exact**2).mean(axis=1, keepdims=True) + 0.5)
    check(run_all(shim, case), exact / root * weight)


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("count", "width"), [(3, 64), (2, 2050)])
def test_layer_norm(shim: Shim, count: int, width: int, biased: bool) -> None:
    x, weight, bias = numbers(1, count, width) * 3 + 5, numbers(2, width), numbers(3, width)

    def case(executor: Executor) -> Floats:
        out = np.full((count, width), np.nan, np.float32)
        shift = bias.ctypes.data if biased else 0
        where = (rows_of(x), rows_of(out), weight.ctypes.data, shift, 1e-5)
        execute(executor, kernels.layer_norm(*where))
        return out

    exact = x.astype(np.float64)
    apart = exact - exact.mean(axis=1, keepdims=True)
    expected = apart / np.sqrt((apart**2).mean(axis=1, keepdims=True) + 1e-5) * weight
    check(run_all(shim, case), expected + bias if biased else expected, 5e-6)


# ------------------------------------------------------------------------------ elementwise
def elementwise(name: str, x: Floats, y: Floats, gate: Floats, width: int) -> KernelLaunch:
    a, b, g = rows_of(x, width), rows_of(y, width), rows_of(gate)
    return {
        "silu_mul": lambda: kernels.silu_mul(a, b, a),
        "sigmoid_mul": lambda: kernels.sigmoid_mul(a, b, a),
        "add_rows": lambda: kernels.add_rows(a, b),
        "add_bias": lambda: kernels.add_bias(a, y.ctypes.data),
        "add_gated": lambda: kernels.add_gated(a, b, g),
        "scale_rows": lambda: kernels.scale_rows(a, gate.ctypes.data, 1),
        "scale_by_one": lambda: kernels.scale_rows(a, gate.ctypes.data, 0),
        "clamp_rows": lambda: kernels.clamp_rows(a, 0.5),
        "fill_rows": lambda: kernels.fill_rows(a, 2.5),
        "copy_rows": lambda: kernels.copy_rows(b, a),
    }[name]()


ELEMENTWISE = {
    "silu_mul": lambda x, y, g: x * sigmoid(x) * y,
    "sigmoid_mul": lambda x, y, g: sigmoid(x) * y,
    "add_rows": lambda x, y, g: x + y,
    "add_bias": lambda x, y, g: x + y[0],
    "add_gated": lambda x, y, g: x + sigmoid(g) * y,
    "scale_rows": lambda x, y, g: x * g,
    "scale_by_one": lambda x, y, g: x * g[0],
    "clamp_rows": lambda x, y, g: np.clip(x, -0.5, 0.5),
    "fill_rows": lambda x, y, g: np.full(x.shape, 2.5),
    "copy_rows": lambda x, y, g: y,
}


@pytest.mark.parametrize(("count", "width"), [(3, 70), (1, 600)])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(shim: Shim, name: str, count: int, width: int) -> None:
    """What lies between the rows stays as it is."""
    before, y, gate = (
        numbers(1, count, width + 5),
        numbers(2, count, width + 2),
        numbers(3, count, 1),
    )
    before[0, :2] = -95, 95  # beyond the range of exp

    def case(executor: Executor) -> Floats:
        x = before.copy()
        execute(executor, elementwise(name, x, y, gate, width))
        return x

    expected = before.astype(np.float64)
    with np.errstate(over="ignore"):
        exact = (part.astype(np.float64) for part in (before[:, :width], y[:, :width], gate))
        expected[:, :width] = ELEMENTWISE[name](*exact)
    check(run_all(shim, case), expected)


def test_copy_of_chosen_rows(shim: Shim) -> None:
    x, index = numbers(1, 6, 300), np.array([5, 0, 3], np.int32)

    def case(executor: Executor) -> Floats:
        out = np.full((3, 300), np.nan, np.float32)
        execute(executor, kernels.copy_rows(rows_of(x), rows_of(out), index.ctypes.data))
        return out

    assert np.array_equal(run_all(shim, case), x[index])


@pytest.mark.parametrize("half_split", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "size", "pairs"), [(3, 5, 64, 32), (1, 3, 24, 5)])
def test_rope(shim: Shim, tokens: int, heads: int, size: int, pairs: int, half_split: bool) -> None:
    before, angles = numbers(1, tokens, heads * size), numbers(2, tokens, pairs) * 50
    cosines, sines = np.cos(angles), np.sin(angles)

    def case(executor: Executor) -> Floats:
        x, tables = before.copy(), (rows_of(cosines), rows_of(sines))
        launch = kernels.rope(rows_of(x), heads, size, *tables, half_split=half_split)
        execute(executor, launch)
        return x

    expected = before.reshape(tokens, heads, size).astype(np.float64)
    first = np.arange(pairs) if half_split else 2 * np.arange(pairs)
    second = first + (pairs if half_split else 1)
    turned = (expected[..., first] + 1j * expected[..., second]) * np.exp(1j * angles)[:, None]
    expected[..., first], expected[..., second] = turned.real, turned.imag
    check(run_all(shim, case), expected.reshape(tokens, -1), 1e-5)


# ------------------------------------------------------------------------------ attention
@dataclass(frozen=True)
class Attention:
    """Sequences (tokens before the step, tokens of it), and how they attend."""

    sequences: tuple[tuple[int, int], ...] = ((0, 3),)
    kv_type: str = "f16"
    heads: int = 2
    group: int = 3
    key_size: int = 32
    value_size: int = 32
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    positions: int = 256
    most: int = 0  # shares, where it is not to be chosen

    @property
    def shape(self) -> KVShape:
        return KVShape(self.heads, self.key_size, self.value_size, self.window)

    @property
    def dtype(self) -> type[np.floating]:
        return np.float16 if self.kv_type == "f16" else np.float32

    def values(self) -> Iterator[tuple[Floats, Floats]]:
        """K and V of every position of each sequence: [n, heads * size]."""
        for number, (before, tokens) in enumerate(self.sequences):
            n = before + tokens
            yield (
                numbers(10 + number, n, self.heads * self.key_size),
                numbers(20 + number, n, self.heads * self.value_size),
            )

    def sink_values(self) -> Floats:
        return numbers(30, self.heads * self.group)

    def run(self, executor: Executor) -> tuple[Floats, list[NDArray[np.uint8]]]:
        """The output, and the caches of the sequences: K, then V."""
        size, padded = np.dtype(self.dtype).itemsize, self.shape.padded_value_size
        key_stride, value_stride = (self.positions * n * size for n in (self.key_size, padded))
        caches, places = [], []
        for _ in self.sequences:
            memory = np.full(self.heads * (key_stride + value_stride), 0xFF, np.uint8)  # no number
            keys = memory.ctypes.data
            values = keys + self.heads * key_stride
            caches.append(memory)
            places.append((keys, values, key_stride, value_stride, self.positions))
        table = np.array(places, np.uint64)
        for start in range(0, max(before for before, _ in self.sequences), self.positions // 2):
            parts = [
                (min(start, before), min(start + self.positions // 2, before))
                for before, _ in self.sequences
            ]
            self._append(executor, parts, table)
        parts = [(before, before + tokens) for before, tokens in self.sequences]
        slices = self._append(executor, parts, table)
        return self._attend(executor, slices, table), caches

    def _append(
        self, executor: Executor, parts: list[tuple[int, int]], places: NDArray[np.uint64]
    ) -> tuple[Slices, NDArray[np.int32]]:
        k, v = (
            np.concatenate([values[a:b] for values, (a, b) in zip(every, parts, strict=True)])
            for every in zip(*self.values(), strict=True)
        )
        lengths = [stop - start for start, stop in parts]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows = [(f, n, start, 0) for f, n, (start, _) in zip(firsts, lengths, parts, strict=True)]
        table = np.array(rows, np.int32)
        longest = max(stop for _, stop in parts)
        slices = Slices(table.ctypes.data, len(parts), max(lengths), longest)
        execute(
            executor,
            kernels.append_kv(
                rows_of(k), rows_of(v), self.shape, self.kv_type, slices, places.ctypes.data
            ),
        )
        return slices, table

    def _attend(
        self,
        executor: Executor,
        sliced: tuple[Slices, NDArray[np.int32]],
        places: NDArray[np.uint64],
    ) -> Floats:
        slices, _ = sliced
        q = self.queries()
        grid = AttentionGrid.of(slices, self.shape, self.group)
        if self.most:
            grid = grid._replace(most=self.most, shares=min(self.most, grid.shares))
        heads = self.heads * self.group
        out = np.full((len(q), heads * self.value_size), np.nan, np.float32)
        partial = np.full(grid.partial_bytes(len(q), heads, self.value_size), 0xFF, np.uint8)
        sight = (self.window or 1 << 30, self.chunk or 1 << 30)
        sinks = self.sink_values()
        execute(
            executor,
            *kernels.attention(
                *(rows_of(q), rows_of(out), self.shape, self.kv_type, slices, places.ctypes.data),
                *(grid, partial.ctypes.data, self.key_size**-0.5, sight),
                sinks.ctypes.data if self.sinks else 0,
            ),
        )
        return out

    def queries(self) -> Floats:
        tokens = sum(tokens for _, tokens in self.sequences)
        return numbers(1, tokens, self.heads * self.group * self.key_size, scale=2)

    def expected(self) -> NDArray[np.float64]:
        rows, row, q = [], 0, self.queries().astype(np.float64)
        for (before, tokens), (keys, values) in zip(self.sequences, self.values(), strict=True):
            k, v = (x.astype(self.dtype).astype(np.float64) for x in (keys, values))
            for position in range(before, before + tokens):
                first = max(0, position + 1 - self.window) if self.window else 0
                if self.chunk:
                    first = max(first, position // self.chunk * self.chunk)
                rows.append(self._one(q[row], k[first : position + 1], v[first : position + 1]))
                row += 1
        return np.stack(rows)

    def _one(
        self, q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        outputs = []
        for head in range(self.heads * self.group):
            kv = head // self.group
            keys = k[:, kv * self.key_size : (kv + 1) * self.key_size]
            values = v[:, kv * self.value_size : (kv + 1) * self.value_size]
            scores = keys @ q[head * self.key_size : (head + 1) * self.key_size]
            weights = np.exp(scores * self.key_size**-0.5)
            sink = np.exp(self.sink_values()[head].astype(np.float64)) if self.sinks else 0.0
            outputs.append(weights @ values / (weights.sum() + sink))
        return np.concatenate(outputs)


CASES = {
    "prompt": Attention(((0, 9),)),
    "prompt goes on": Attention(((130, 12),)),
    "one token": Attention(((100, 1),)),
    "many keys, shared out": Attention(((900, 1),), positions=1024),
    "many keys in one share": Attention(((600, 2),), positions=640, most=1),
    "several tiles a share": Attention(((900, 1), (300, 1)), positions=1024, most=3),
    "a prompt's tiles": Attention(((380, 9),), group=1, kv_type="f32", positions=448, most=2),
    "wide heads, several tiles": Attention(
        ((300, 1),), heads=1, key_size=64, value_size=256, positions=320, most=1
    ),
    "the first token": Attention(((0, 1),)),
    "several sequences": Attention(((0, 1), (70, 1), (600, 1)), positions=640),
    "prompts and tokens": Attention(((0, 5), (70, 1), (40, 17))),
    "float32": Attention(((300, 2),), kv_type="f32", positions=320),
    "one head a group": Attention(((260, 1),), group=1, positions=320),
    "groups of eight": Attention(((40, 1),), heads=1, group=8),
    "groups of twelve": Attention(((40, 1),), heads=1, group=12),
    "window": Attention(((200, 6),), window=33),
    "window of one token": Attention(((150, 3),), window=1),
    "window in a ring": Attention(((500, 5),), window=100, positions=128),
    "window in a ring, one token": Attention(((500, 1),), window=100, positions=128),
    "chunk": Attention(((94, 5),), chunk=32),
    "sinks": Attention(((0, 3),), sinks=True),
    "sinks, shared out": Attention(((500, 1),), sinks=True, positions=512),
    "sinks, window": Attention(((300, 2),), sinks=True, window=20, positions=320),
    "odd sizes": Attention(((64, 3),), key_size=24, value_size=20),
    "wide heads": Attention(((140, 2),), heads=1, group=2, key_size=192, value_size=128),
    "widest heads": Attention(((30, 1),), heads=1, group=2, key_size=256, value_size=256),
}


@pytest.mark.parametrize("name", CASES)
def test_attention(shim: Shim, name: str) -> None:
    case = CASES[name]
    found = run_all(shim, lambda executor: case.run(executor)[0])
    check(found, case.expected(), 3e-6)


@pytest.mark.parametrize("name", ["prompt goes on", "float32", "window in a ring", "odd sizes"])
def test_the_cache_is_that_of_the_cpu(shim: Shim, run: Callable[..., None], name: str) -> None:
    case = CASES[name]
    (k, v), shape = next(case.values()), case.shape
    size, padded = np.dtype(case.dtype).itemsize, shape.padded_value_size
    key_stride, value_stride = (case.positions * n * size for n in (case.key_size, padded))
    memory = np.full(case.heads * (key_stride + value_stride), 0xFF, np.uint8)
    keys = memory.ctypes.data
    values = keys + case.heads * key_stride
    k, v = (np.pad(x, ((0, 1), (0, 0))) for x in (k, v))  # read past the end
    run(
        getattr(cpu_attention, f"append_kv_{case.kv_type}"),
        len(k) - 1,
        *(k.ctypes.data, k.strides[0], v.ctypes.data, v.strides[0]),
        *(case.heads, case.key_size, case.value_size, 0),
        *(keys, values, key_stride, value_stride, case.positions),
    )
    _, (found,) = case.run(shim)
    split = case.heads * key_stride
    assert np.array_equal(found[:split], memory[:split])
    shape_of_values = (case.heads * case.positions, padded * size)
    held = case.value_size * size  # what pads a row is of no use to anyone
    assert np.array_equal(
        found[split:].reshape(shape_of_values)[:, :held],
        memory[split:].reshape(shape_of_values)[:, :held],
    )


def test_a_token_is_computed_alike_whatever_is_beside_it(shim: Shim) -> None:
    alone = Attention(((70, 1),), positions=640)
    (k, v), q = next(alone.values()), alone.queries()

    class Beside(Attention):
        def values(self) -> Iterator[tuple[Floats, Floats]]:
            yield k, v
            yield from list(super().values())[1:]

        def queries(self) -> Floats:
            return np.concatenate([q, numbers(2, 2, q.shape[1])])

    together = Beside(((70, 1), (600, 1), (3, 1)), positions=640)
    assert np.array_equal(together.run(shim)[0][:1], alone.run(shim)[0])


# ------------------------------------------------------------------------------ planted faults
FAULTS = {
    "no barrier after the sum of a block": (
        "    __syncthreads(); // parts may be written again\n",
        "",
    ),
    "no barrier before the sum": (
        "parts[threadIdx.x / WARP] = value;\n    __syncthreads();",
        "parts[threadIdx.x / WARP] = value;",
    ),
    "eps left out": ("block_sum(squares) / n + eps", "block_sum(squares) / n"),
    "gate and up changed": ("silu(AT(gate, gate_stride)) * AT(up, up_stride)",
                            "silu(AT(up, up_stride)) * AT(gate, gate_stride)"),
    "rope turns backwards": ("first[0] = a * c - b * s;", "first[0] = a * c + b * s;"),
    "keys by another layout": ("(at / 16 * dk + d) * 16 + at % 16", "at * dk + d"),
    "the ring does not close": ("u64 at = (slice.position + blockIdx.y) % (int)place.ring",
                                "u64 at = (slice.position + blockIdx.y)"),
    "a key of the future": ("key <= position && key >", "key <= position + 1 && key >"),
    "a window too wide": ("int by_window = position - window,",
                          "int by_window = position - window - 1,"),
    "the chunk is not seen": ("position / chunk * chunk - 1;", "-1;"),
    "a sink in every share": ("sinks && blockIdx.y == 0 &&", "sinks &&"),
    "the past is not scaled": ("sum0[r] *= past[r], sum1[r] *= past[r];", ";"),
    "the second half of wide heads": ("thread, d1 = thread + TILE;", "thread, d1 = thread;"),
    "weights are written while they are read": (
        "        __syncthreads(); // queries are there; weights are not read any more\n",
        "        if (tile == start) __syncthreads();\n",
    ),
    "no barrier between scores and softmax": (
        "        __syncthreads();\n        for (int r = thread / WARP;",
        "        for (int r = thread / WARP;",
    ),
    "shares are joined without their maxima": ("float weight = expf(state[0] - best);",
                                               "float weight = 1.0f;"),
    "rows of another token": ("(u64)(slice.first + row / group) * q_stride",
                              "(u64)(row / group) * q_stride"),
}  # fmt: skip


def everything(shim: Shim) -> None:
    """A battery of checks that a sound kernel file passes."""
    test_rms_norm(shim, 2, 4096)
    test_rms_norm(shim, 5, 7)
    test_layer_norm(shim, 2, 2050, True)
    test_elementwise(shim, "silu_mul", 3, 70)
    test_rope(shim, 1, 3, 24, 5, True)
    for name in CASES:
        test_attention(shim, name)


FOUND = 3  # exit status


def with_fault(folder: Path, fault: str) -> Shim:
    """A shim whose trunk.cu has a fault."""
    sound, (old, new) = cuda_modules()["trunk"], FAULTS[fault]
    assert old in sound.source
    broken = CudaModule("trunk", sound.source.replace(old, new), sound.kernels)
    return Shim(folder, modules={"trunk": broken})


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(shim: Shim, fault: str) -> None:
    """In a process of its own: it may crash, which counts."""
    command = [sys.executable, __file__, str(shim.folder), fault]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == FOUND or ended.returncode < 0, ended.stderr


if __name__ == "__main__":
    try:
        everything(with_fault(Path(sys.argv[1]), sys.argv[2]))
    except AssertionError:
        sys.exit(FOUND)
