"""The kernels of cuda/trunk.cu and attention.cu with float64 results, for any device.

As a program it runs them through the shim with a planted fault, which may end the process:

    python trunkcases.py FOLDER FAULT
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from devicecases import Workbench
from numpy.typing import NDArray
from shim import Shim

from colibri_mmap.runtime import trunkkernels as kernels
from colibri_mmap.runtime.arena import Rows
from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules
from colibri_mmap.runtime.device import KernelLaunch
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.kv import KVShape
from colibri_mmap.runtime.trunkkernels import AttentionGrid, Slices

Floats = NDArray[np.float32]
Exact = NDArray[np.float64]
TOLERANCE = 2e-6  # of the largest value
FOUND = 3  # exit status


@dataclass(frozen=True)
class Case:
    """`run` gives what a device computes, to be `expected` within a tolerance of the largest."""

    run: Callable[[Workbench], Floats]
    expected: Exact
    tolerance: float = TOLERANCE

    def check(self, bench: Workbench) -> Floats:
        found = self.run(bench)
        check(found, self.expected, self.tolerance)
        return found


def check(found: Floats, expected: NDArray[np.floating], tolerance: float) -> None:
    assert found.shape == expected.shape
    error = np.abs(found - expected).max()
    assert error <= tolerance * max(1.0, float(np.abs(expected).max())), f"off by {error}"


def launch(bench: Workbench, *launches: KernelLaunch) -> None:
    for kernel in launches:
        bench.device.launch(*kernel, bench.device.compute)


def numbers(seed: int, *shape: int, scale: float = 1.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def put(bench: Workbench, array: Floats, width: int | None = None) -> Rows:
    """A copy of an array on the device: of every row the first `width` numbers."""
    count, whole = array.shape
    width = width or whole
    return Rows(bench.put(array), count, width, 4 * (whole - width))


def room(bench: Workbench, count: int, width: int) -> Rows:
    return Rows(bench.room(4 * count * width), count, width)


def get(bench: Workbench, rows: Rows) -> Floats:
    """The rows as they are on the device, and what lies between them."""
    return bench.get(rows.address, (rows.count, rows.stride // 4))


def sigmoid(x: NDArray[np.floating]) -> Exact:
    with np.errstate(over="ignore"):
        return 1 / (1 + np.exp(-x.astype(np.float64)))


# ------------------------------------------------------------------------------ norms
def rms_norm(count: int, width: int) -> Case:
    x, weight = numbers(1, count, width + 3, scale=3), numbers(2, width)

    def run(bench: Workbench) -> Floats:
        out = room(bench, count, width)
        launch(bench, kernels.rms_norm(put(bench, x, width), out, bench.put(weight), 0.5))
        return get(bench, out)

    exact = x[:, :width].astype(np.float64)
    root = np.sqrt((exact**2).mean(axis=1, keepdims=True) + 0.5)
    return Case(run, exact / root * weight)


def layer_norm(count: int, width: int, *, biased: bool) -> Case:
    x, weight, bias = numbers(1, count, width) * 3 + 5, numbers(2, width), numbers(3, width)

    def run(bench: Workbench) -> Floats:
        out, shift = room(bench, count, width), bench.put(bias) if biased else 0
        launch(bench, kernels.layer_norm(put(bench, x), out, bench.put(weight), shift, 0.5))
        return get(bench, out)

    exact = x.astype(np.float64)
    apart = exact - exact.mean(axis=1, keepdims=True)
    expected = apart / np.sqrt((apart**2).mean(axis=1, keepdims=True) + 0.5) * weight
    return Case(run, expected + bias if biased else expected, 5e-6)


# ------------------------------------------------------------------------------ elementwise
Elementwise = tuple[
    Callable[[Rows, Rows, Rows], KernelLaunch], Callable[[Exact, Exact, Exact], Exact]
]
ELEMENTWISE: dict[str, Elementwise] = {
    "silu_mul": (lambda x, y, g: kernels.silu_mul(x, y, x), lambda x, y, g: x * sigmoid(x) * y),
    "sigmoid_mul": (lambda x, y, g: kernels.sigmoid_mul(x, y, x), lambda x, y, g: sigmoid(x) * y),
    "add_rows": (lambda x, y, g: kernels.add_rows(x, y), lambda x, y, g: x + y),
    "add_bias": (lambda x, y, g: kernels.add_bias(x, y.address), lambda x, y, g: x + y[0]),
    "add_gated": (kernels.add_gated, lambda x, y, g: x + sigmoid(g) * y),
    "scale_rows": (lambda x, y, g: kernels.scale_rows(x, g.address, 1), lambda x, y, g: x * g),
    "scale_all": (lambda x, y, g: kernels.scale_rows(x, g.address, 0), lambda x, y, g: x * g[0]),
    "clamp_rows": (lambda x, y, g: kernels.clamp_rows(x, 0.5), lambda x, y, g: x.clip(-0.5, 0.5)),
    "fill_rows": (lambda x, y, g: kernels.fill_rows(x, 2.5), lambda x, y, g: x * 0 + 2.5),
    "copy_rows": (lambda x, y, g: kernels.copy_rows(y, x), lambda x, y, g: y),
}


def elementwise(name: str, count: int, width: int) -> Case:
    """What lies between the rows stays as it is."""
    before, y, gate = (numbers(n, count, w) for n, w in ((1, width + 5), (2, width + 2), (3, 1)))
    before[0, :2] = -95, 95  # beyond the range of exp
    make, exact = ELEMENTWISE[name]

    def run(bench: Workbench) -> Floats:
        x = put(bench, before, width)
        launch(bench, make(x, put(bench, y, width), put(bench, gate)))
        return get(bench, x)

    expected = before.astype(np.float64)
    expected[:, :width] = exact(
        *(part.astype(np.float64) for part in (before[:, :width], y[:, :width], gate))
    )
    return Case(run, expected)


def copy_chosen_rows() -> Case:
    x, index = numbers(1, 6, 300), np.array([5, 0, 3], np.int32)

    def run(bench: Workbench) -> Floats:
        out = room(bench, 3, 300)
        launch(bench, kernels.copy_rows(put(bench, x), out, bench.put(index)))
        return get(bench, out)

    return Case(run, x[index].astype(np.float64), 0.0)


def rope(tokens: int, heads: int, size: int, pairs: int, *, half_split: bool) -> Case:
    before, angles = numbers(1, tokens, heads * size), numbers(2, tokens, pairs) * 50

    def run(bench: Workbench) -> Floats:
        x, tables = put(bench, before), [put(bench, f(angles)) for f in (np.cos, np.sin)]
        launch(bench, kernels.rope(x, heads, size, *tables, half_split=half_split))
        return get(bench, x)

    expected = before.reshape(tokens, heads, size).astype(np.float64)
    first = np.arange(pairs) if half_split else 2 * np.arange(pairs)
    second = first + (pairs if half_split else 1)
    turned = (expected[..., first] + 1j * expected[..., second]) * np.exp(1j * angles)[:, None]
    expected[..., first], expected[..., second] = turned.real, turned.imag
    return Case(run, expected.reshape(tokens, -1), 1e-5)


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

    def queries(self) -> Floats:
        tokens = sum(tokens for _, tokens in self.sequences)
        return numbers(1, tokens, self.heads * self.group * self.key_size, scale=2)

    @property
    def strides(self) -> tuple[int, int]:
        """Bytes of a head's K, and V."""
        size = np.dtype(self.dtype).itemsize
        widths = self.key_size, self.shape.padded_value_size
        return tuple(self.positions * width * size for width in widths)

    def caches(self, bench: Workbench) -> NDArray[np.uint64]:
        """Memory for K, and V behind it, of each sequence; the table of Place."""
        key_stride, value_stride = self.strides
        places = []
        for _ in self.sequences:
            keys = bench.room(self.heads * (key_stride + value_stride))
            values = keys + self.heads * key_stride
            places.append((keys, values, key_stride, value_stride, self.positions))
        return np.array(places, np.uint64)

    def fill(self, bench: Workbench, places: NDArray[np.uint64]) -> Slices:
        """Append all positions, the last step's at last, whose slices these are."""
        step = self.positions // 2
        for start in range(0, max(before for before, _ in self.sequences), step):
            limits = [(min(start, n), min(start + step, n)) for n, _ in self.sequences]
            self._append(bench, limits, places)
        return self._append(bench, [(n, n + tokens) for n, tokens in self.sequences], places)

    def _append(
        self, bench: Workbench, parts: list[tuple[int, int]], places: NDArray[np.uint64]
    ) -> Slices:
        k, v = (
            np.concatenate([values[a:b] for values, (a, b) in zip(every, parts, strict=True)])
            for every in zip(*self.values(), strict=True)
        )
        lengths = [stop - start for start, stop in parts]
        firsts = np.cumsum([0, *lengths[:-1]])
        rows = [(f, n, start, 0) for f, n, (start, _) in zip(firsts, lengths, parts, strict=True)]
        table = bench.put(np.array(rows, np.int32))
        slices = Slices(table, len(parts), max(lengths), max(stop for _, stop in parts))
        new = put(bench, k), put(bench, v)
        launch(bench, kernels.append_kv(*new, self.shape, self.kv_type, slices, bench.put(places)))
        return slices

    def run(self, bench: Workbench) -> Floats:
        places = self.caches(bench)
        slices, q = self.fill(bench, places), put(bench, self.queries())
        heads, group = self.heads * self.group, AttentionGrid.of(slices, self.shape, self.group)
        if self.most:
            group = group._replace(most=self.most, shares=min(self.most, group.shares))
        out = room(bench, q.count, heads * self.value_size)
        partial = bench.room(group.partial_bytes(q.count, heads, self.value_size))
        sight = (self.window or 1 << 30, self.chunk or 1 << 30)
        sinks = bench.put(self.sink_values()) if self.sinks else 0
        where = (self.shape, self.kv_type, slices, bench.put(places))
        how = (group, partial, self.key_size**-0.5, sight, sinks)
        launch(bench, *kernels.attention(q, out, *where, *how))
        return get(bench, out)

    def expected(self) -> Exact:
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

    def _one(self, q: Exact, k: Exact, v: Exact) -> Exact:
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


ATTENTION = {
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
    "odder sizes": Attention(((150, 1),), group=2, key_size=13, value_size=7),
    "odder sizes, a prompt": Attention(((150, 7),), key_size=21, value_size=50),
    "heads of 80 in a ring": Attention(
        ((790, 1),), group=8, key_size=80, value_size=80, window=230, positions=256, most=1
    ),
    "heads of 80, float32": Attention(((90, 6),), kv_type="f32", key_size=80, value_size=80),
    "heads of 128, float32": Attention(
        ((130, 1),), kv_type="f32", heads=1, group=8, key_size=128, value_size=128
    ),
    "a prompt's wide heads": Attention(((70, 10),), heads=1, key_size=192, value_size=128),
    "a prompt's wide heads, float32": Attention(
        ((70, 10),), kv_type="f32", heads=1, key_size=136, value_size=160
    ),
    "wide heads, float32": Attention(
        ((130, 1),), kv_type="f32", heads=1, key_size=160, value_size=200
    ),
    "wide heads": Attention(((140, 2),), heads=1, group=2, key_size=192, value_size=128),
    "widest heads": Attention(((30, 1),), heads=1, group=2, key_size=256, value_size=256),
}


CASES: dict[str, Callable[[], Case]] = {
    **{f"rms_norm {c} {w}": partial(rms_norm, c, w) for c, w in ((3, 64), (1, 130), (5, 7))},
    "rms_norm 2 4096": partial(rms_norm, 2, 4096),
    "layer_norm 3 64": partial(layer_norm, 3, 64, biased=False),
    "layer_norm 2 2050": partial(layer_norm, 2, 2050, biased=True),
    **{
        f"{name} {c} {w}": partial(elementwise, name, c, w)
        for name in ELEMENTWISE
        for c, w in ((3, 70), (1, 600))
    },
    "copy of chosen rows": copy_chosen_rows,
    **{
        f"rope {size} {split}": partial(rope, tokens, heads, size, pairs, half_split=split)
        for tokens, heads, size, pairs in ((3, 5, 64, 32), (1, 3, 24, 5))
        for split in (True, False)
    },
    **{
        f"attention: {name}": lambda case=case: Case(case.run, case.expected(), 3e-6)  # type: ignore[misc]
        for name, case in ATTENTION.items()
    },
}

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
    "a key of the future": ("|| key > newest) own.x", "|| key > newest + 1) own.x"),
    "the second key of the future": ("|| key + 1 > newest) own.y", "|| key > newest) own.y"),
    "no key is hidden": ("if (!all_seen) {", "if (false) {"),
    "a window too wide": ("int by_window = position - window,",
                          "int by_window = position - window - 1,"),
    "the chunk is not seen": ("position / chunk * chunk - 1;", "-1;"),
    "a sink in every share": ("sinks && blockIdx.y == 0", "sinks"),
    "a sink in every lane": ("sink && lane == 0 ? 1.0f", "sink ? 1.0f"),
    "the past is not scaled": ("const float past = all_pasts[unit][r];", "const float past = 1;"),
    "the total of the past is not scaled": ("total * past + (", "total + ("),
    "the second half of wide heads": ("(j * padded + c * COLUMN) / 4", "(j * padded) / 4"),
    "no barrier between products and softmax": (
        "2 * lane) = score[r];\n            __syncthreads();",
        "2 * lane) = score[r];",
    ),
    "no barrier between softmax and values": ("meet(); // weights are there", "// weights"),
    "keys of the tile before": ("load(keys_of_lane(tile + TILE), from", "load(source, from"),
    "the last dimensions are left out": ("d = eights * 8; d < dk", "d = dk; d < dk"),
    "the last dimensions count for every warp": ("if (!TOGETHER || warp == WARPS - 1)\n", ""),
    "values of another group of lanes": ("key + j < limit &&", ""),
    "sums of one group of lanes": ("int g = 0; g < groups; g++", "int g = 0; g < 1; g++"),
    "values do not go around the ring": ("place < ring ? place : place - ring", "place"),
    "shares are joined without their maxima": ("const float weight = expf(largest[i] - best);",
                                               "const float weight = 1.0f;"),
    "some shares are left out": ("other < PARTS; other++", "other < PARTS - 1; other++"),
    "rows of another token": ("tokens[member] = slice.first + row / group",
                              "tokens[member] = row / group"),
}  # fmt: skip


def with_fault(folder: Path, fault: str) -> Shim:
    """A shim whose trunk.cu or attention.cu has a fault."""
    old, new = FAULTS[fault]
    modules = {}
    for name in ("trunk", "attention"):
        sound = cuda_modules()[name]
        if old in sound.source:
            modules[name] = CudaModule(name, sound.source.replace(old, new), sound.kernels)
    assert modules
    return Shim(folder, modules=modules)


def main() -> None:
    shim = with_fault(Path(sys.argv[1]), sys.argv[2])
    for make in CASES.values():
        case = make()
        try:
            for seed in (0, 1):
                case.check(Workbench(HostBackend(replace(shim, seed=seed))))
        except AssertionError:
            sys.exit(FOUND)


if __name__ == "__main__":
    main()
