"""Products on a device against float64 over gguf-py, for whatever device a test is given.

As a program it runs a set of cases through the shim, for builds that may end the process:

    python devicecases.py FOLDER [--fault NAME] [--types Q4_K,...] [--flags=-fsanitize=address]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from colibri_mmap.format.quants import GGMLType, block_geometry
from colibri_mmap.runtime.cudasources import FLOAT_TYPES, WEIGHT_TYPES
from colibri_mmap.runtime.device import ALIGNMENT, Address, DeviceBackend, DeviceMemory
from colibri_mmap.runtime.devicekernels import (
    CLAMPED_SWIGLU,
    SILU,
    DeviceKernels,
    ExpertShape,
    ExpertTables,
)
from colibri_mmap.runtime.hostdevice import HostBackend

TOLERANCE = 1e-6  # of the sum of the products' magnitudes
SCALES: dict[str, tuple[int, ...]] = {  # where the half-precision scales of a block are
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
WITH_MINIMUM = ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
_SUBNORMAL = 3e-7  # in half precision
_TINY = 1e-30  # products below it end where float32 does
_LEAST = np.float32(1e-45)  # above 0

Array = NDArray[Any]


def random_weights(
    type: GGMLType, rows: int, columns: int, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """uint8 [rows, row bytes]: any bytes; scales of mixed size, 0 and sub-normal among them."""
    if type in FLOAT_TYPES:
        w = rng.standard_normal((rows, columns)).astype(np.float32)
        if type is GGMLType.F16:
            w = w.astype(np.float16)
        elif type is GGMLType.BF16:
            return w.view(np.uint16)[:, 1::2].copy().view(np.uint8)
        return w.view(np.uint8)
    block, size = block_geometry(type)
    raw = rng.integers(0, 256, (rows * columns // block, size), np.uint8)
    if type is GGMLType.MXFP4:
        raw[:, 0] = rng.choice([0, 1, 2, 120, 121], len(raw), p=[0.05] * 3 + [0.425] * 2)
    for offset in SCALES.get(type.name, ()):
        scales = rng.uniform(0.2, 2, len(raw)) * rng.choice([1, -1], len(raw)) * 1e-3
        scales = scales.astype(np.float16)
        scales[rng.random(len(raw)) < 0.05] = 0
        scales[rng.random(len(raw)) < 0.05] = _SUBNORMAL
        raw[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def dequantised(type: GGMLType, raw: NDArray[np.uint8]) -> NDArray[np.float64]:
    """What gguf-py makes of the bytes."""
    from gguf import GGMLQuantizationType, quants

    return quants.dequantize(raw, GGMLQuantizationType(type)).astype(np.float64)


def random_activations(count: int, width: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """float32 [count, width]: blocks of mixed size, of zeros, of sub-normal numbers."""
    x = rng.standard_normal((count, width)).astype(np.float32)
    x *= np.float32(10) ** rng.integers(-3, 1, (count, width)).astype(np.float32)
    if width >= 64:
        x[0, 32:64] = 0
    if width >= 96:
        x[-1, 64:96] = rng.integers(-190, 190, 32) * _LEAST
    if width >= 128:
        x[-1, 96:128] = rng.integers(-40, 40, 32) * _LEAST  # of a scale that is 0
    return x


def rounded(type: GGMLType, x: NDArray[np.float32]) -> tuple[Array, Array]:
    """q int8 [count, width] and d float32 [count, width / 32], from the definition."""
    size = block_geometry(type)[0]
    blocks = x.reshape(len(x), -1, size)
    d = np.abs(blocks).max(axis=2) / np.float32(127)
    q = np.rint(blocks / np.where(d > 0, d, np.float32(1))[..., None]) * (d > 0)[..., None]
    q = np.clip(q, -127, 127).astype(np.int8).reshape(x.shape)
    return q, np.repeat(d, size // 32, axis=1)


def as_seen(type: GGMLType, x: NDArray[np.float32]) -> NDArray[np.float64]:
    """The activations as products with `type` see them."""
    if type in FLOAT_TYPES:
        return x.astype(np.float64)
    q, d = rounded(type, x)
    return q.astype(np.float64) * np.repeat(d.astype(np.float64), 32, axis=1)


def worst(found: Array, expected: Array, size: Array) -> float:
    """The largest error against the magnitude that an entry was summed from."""
    assert np.isfinite(found).all(), "an output is not a number"
    return float(np.max(np.abs(found - expected) / np.maximum(size, _TINY), initial=0.0))


# ------------------------------------------------------------------ a device
class Workbench:
    """A device with memory for arrays, which lives as long as the workbench."""

    def __init__(self, device: DeviceBackend) -> None:
        self.device, self.kernels = device, DeviceKernels(device)
        self._kept: list[DeviceMemory] = []

    def room(self, nbytes: int) -> Address:
        """Memory up to the aligned word of its last byte, filled with what is no number."""
        memory = self.device.allocate(max(4, -(-nbytes // 4) * 4))
        self._kept.append(memory)
        self._upload(memory.address, np.full(memory.nbytes, 0xFF, np.uint8))
        return memory.address

    def put(self, array: Array) -> Address:
        """A copy of an array on the device."""
        address = self.room(array.nbytes)
        self._upload(address, np.ascontiguousarray(array).view(np.uint8).ravel())
        return address

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        """An array as it is on the device when all work is done."""
        kind = np.dtype(dtype)
        target = self.device.allocate_staging(kind.itemsize * int(np.prod(shape)))
        self.device.download(target, address, self.device.compute)
        self.device.synchronize(self.device.record(self.device.compute))
        return target.view(kind).reshape(shape).copy()

    def free(self) -> None:
        for memory in self._kept:
            memory.free()
        self._kept.clear()

    def _upload(self, address: int, data: NDArray[np.uint8]) -> None:
        if not data.nbytes:
            return
        staging = self.device.allocate_staging(data.nbytes)
        staging[:] = data
        self.device.upload(address, staging, self.device.compute)
        self.device.synchronize(self.device.record(self.device.compute))

    # -------------------------------------------------------------------------- kernels
    def quantise(self, type: GGMLType, x: NDArray[np.float32]) -> tuple[Array, Array, Array]:
        """q, d and s of x for products with a type; the rows lie apart on the device."""
        count, width = x.shape
        apart = np.full((count, width + 8), np.nan, np.float32)
        apart[:, :width] = x
        scratch = self.room(self.kernels.packed_bytes(count, width))
        where = self.put(apart)
        packed = self.kernels.pack(type, where, count, width, width + 8, scratch)
        q = self.get(packed.x, x.shape, np.int8)
        scales = self.get(packed.scales, (count, width // 32, 2))
        return q, scales[:, :, 0], scales[:, :, 1]

    def packed(self, type: GGMLType, x: NDArray[np.float32]) -> Any:
        count, width = x.shape
        scratch = self.room(self.kernels.packed_bytes(count, width))
        return self.kernels.pack(type, self.put(x), count, width, width, scratch)

    def matvec(
        self, type: GGMLType, raw: NDArray[np.uint8], x: NDArray[np.float32]
    ) -> NDArray[np.float32]:
        """[count, rows + 3]: three columns beside the product stay as they were."""
        rows, (count, columns) = len(raw), x.shape
        out = self.room(4 * count * (rows + 3))
        packed = self.packed(type, x)
        self.kernels.matvec(self.put(raw), type, rows, columns, packed, out, rows + 3)
        return self.get(out, (count, rows + 3))

    def dequantise(
        self, type: GGMLType, raw: NDArray[np.uint8], columns: int
    ) -> NDArray[np.float32]:
        out = self.room(4 * len(raw) * columns + 4)
        self.kernels.dequantise(self.put(raw), type, len(raw), columns, out)
        assert np.isnan(self.get(out + 4 * len(raw) * columns, (1,)))
        return self.get(out, (len(raw), columns))

    def experts(
        self, experts: Experts, x: NDArray[np.float32], add: bool
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """The hidden rows by pair, and out [T, width + 2], which holds 1 before if `add`."""
        shape, count = experts.shape, len(x)
        parts = np.zeros((6, len(experts.parts)), np.int64)
        for i, bytes_of in enumerate(experts.parts):
            parts[: len(bytes_of), i] = [self.put(part) for part in bytes_of]
        tables = ExpertTables.of(parts, experts.chosen, experts.tokens, experts.weights, count)
        content = np.zeros(tables.nbytes, np.uint8)
        tables.write(content)
        hidden = self.room(self.kernels.experts_bytes(shape, tables.pairs))
        before = np.full((count, shape.width + 2), 1 if add else np.nan, np.float32)
        out = self.put(before)
        packed = self.packed(shape.type, x)
        self.kernels.experts(
            *(shape, tables, self.put(content), packed, hidden),
            *(out, shape.width + 2, add),
        )
        rows = self.get(hidden, (tables.pairs, shape.hidden))
        return rows, self.get(out, before.shape)


# ------------------------------------------------------------------ experts
@dataclass(frozen=True, slots=True)
class Experts:
    """Experts of a layer, and which tokens chose them: parts are gate, up, down, then biases."""

    shape: ExpertShape
    parts: list[list[NDArray[Any]]]
    chosen: NDArray[np.int64]
    tokens: NDArray[np.int64]
    weights: NDArray[np.float32]

    def check(self, bench: Workbench, x: NDArray[np.float32], add: bool = False) -> float:
        """The worst error of hidden rows and outputs on a device."""
        hidden, out = bench.experts(self, x, add)
        assert (np.isnan(out[:, -2:]) | (out[:, -2:] == add)).all(), "written beside the output"
        error = self._check_hidden(x, hidden)
        return max(error, self._check_out(hidden, out[:, :-2], len(x), add))

    def _check_hidden(self, x: NDArray[np.float32], hidden: Array) -> float:
        shape, order = self.shape, np.argsort(self.chosen, kind="stable")
        seen, error = as_seen(shape.type, x), 0.0
        for pair, choice in enumerate(order):
            raw = self.parts[self.chosen[choice]]
            row, biases = seen[self.tokens[choice]], raw[3:5] or (0.0, 0.0)
            sums, sizes = [], []
            for part, bias in zip(raw[:2], biases, strict=True):
                w = dequantised(shape.type, part)
                sums.append(w @ row + bias)
                sizes.append(np.abs(w) @ np.abs(row) + np.abs(bias))
            expected, size = activated(shape.activation, sums, sizes)
            error = max(error, worst(hidden[pair], expected, size))
        return error

    def _check_out(self, hidden: Array, out: Array, count: int, add: bool) -> float:
        expected = np.full(out.shape, float(add))
        size = np.full(out.shape, float(add))
        seen, order = as_seen(self.shape.down_type, hidden), np.argsort(self.chosen, kind="stable")
        for pair, choice in enumerate(order):
            raw, weight = self.parts[self.chosen[choice]], float(self.weights[choice])
            w, bias = dequantised(self.shape.down_type, raw[2]), raw[5] if raw[3:] else 0.0
            token = self.tokens[choice]
            expected[token] += weight * (w @ seen[pair] + bias)
            size[token] += abs(weight) * (np.abs(w) @ np.abs(seen[pair]) + np.abs(bias))
        return worst(out, expected, size)


def activated(kind: int, sums: list[Array], sizes: list[Array]) -> tuple[Array, Array]:
    """The activation of gate and up, and the magnitude that its error may have."""
    gate, up = sums
    with np.errstate(over="ignore"):
        if kind == SILU:
            factor = 1 / (1 + np.exp(-gate))
            value = gate * factor * up
        else:
            gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
            factor = 1 / (1 + np.exp(-1.702 * gate))
            up = up + 1
            value = gate * factor * up
    slope = factor + np.abs(1.702 * gate) * factor * (1 - factor)
    return value, np.abs(value) + slope * np.abs(up) * sizes[0] + np.abs(gate * factor) * sizes[1]


def random_experts(
    shape: ExpertShape,
    choices: list[list[int]],
    rng: np.random.Generator,
    *,
    count: int = 0,
    biases: bool = False,
) -> Experts:
    """Experts 0 to `count` - 1 (at least those chosen); choices[t]: the experts of token t."""
    chosen = np.array(list(itertools.chain(*choices)), np.int64)
    parts: list[list[Array]] = []
    for _ in range(max(count, int(chosen.max()) + 1)):
        raw = [random_weights(shape.type, shape.hidden, shape.width, rng) for _ in range(2)]
        raw.append(random_weights(shape.down_type, shape.width, shape.hidden, rng))
        if biases:
            sizes = (shape.hidden, shape.hidden, shape.width)
            raw += [rng.standard_normal(n).astype(np.float32) for n in sizes]
        parts.append(raw)
    tokens = np.repeat(np.arange(len(choices)), [len(c) for c in choices])
    weights = rng.uniform(0.1, 1, len(chosen)).astype(np.float32)
    return Experts(shape, parts, chosen, tokens, weights)


def check_matvec(
    bench: Workbench, type: GGMLType, rows: int, columns: int, count: int, rng: np.random.Generator
) -> float:
    """The worst error of a product with a random matrix."""
    raw, x = random_weights(type, rows, columns, rng), random_activations(count, columns, rng)
    found = bench.matvec(type, raw, x)
    assert np.isnan(found[:, rows:]).all(), "written beside the output"
    w, seen = dequantised(type, raw), as_seen(type, x)
    return worst(found[:, :rows], seen @ w.T, np.abs(seen) @ np.abs(w).T)


def check_quantise(
    bench: Workbench, type: GGMLType, count: int, width: int, rng: np.random.Generator
) -> None:
    x = random_activations(count, width, rng)
    (q, d, s), (expected_q, expected_d) = bench.quantise(type, x), rounded(type, x)
    assert np.array_equal(q, expected_q)
    assert np.array_equal(d, expected_d)
    sums = q.reshape(count, -1, 32).sum(axis=2).astype(np.float32)
    assert np.array_equal(s, d * sums)


def check_not_finite(bench: Workbench) -> None:
    """A row with a number that is not finite gives none that is; other rows are as without it."""
    rng = np.random.default_rng(4)
    for type in (GGMLType.Q8_0, GGMLType.Q4_K):
        raw, x = random_weights(type, 3, 256, rng), random_activations(2, 256, rng)
        clean = bench.matvec(type, raw, x)
        for wrong in (np.nan, np.inf, -np.inf):
            x[1, 40] = wrong
            found = bench.matvec(type, raw, x)
            assert np.array_equal(found[0], clean[0], equal_nan=True)
            assert not np.isfinite(found[1, :3]).any()


def shapes(type: GGMLType) -> list[tuple[int, int, int]]:
    """rows, columns, tokens: ragged rows, short rows, every number of columns of the kernels."""
    step = max(4, block_geometry(type)[0])
    short, long = (8 if type in FLOAT_TYPES else step), max(1024, 8 * step)
    few = [(13, short, 1), (5, 3 * step, 2), (1, 4 * step, 3), (6, 2 * step, 7), (3, step * 2, 11)]
    return [*few, (3, long, 2)]  # of the last one, several warps share a row


def expert_shape(
    type: GGMLType, down: GGMLType | None = None, activation: int = SILU, hidden: int = 256
) -> ExpertShape:
    """Small experts of a type: gate's rows are one block of 256 or three of 32."""
    width = 256 if block_geometry(type)[0] == 256 else 96
    return ExpertShape(type, down or type, width, hidden, activation)


SINGLE = [[2, 0, 3, 4, 1]]  # one token
SPREAD = [[0, 1], [2, 3]]  # every expert once
MANY = [[1]] * 11  # all the same
SHARED = [[0, 2], [2, 0], [2, 4], [2, 4], [4, 2], [2, 0]]  # experts 1 and 3 are there unused


def check_type(bench: Workbench, type: GGMLType) -> float:
    """The worst error of all kernels of a type on small shapes."""
    rng = np.random.default_rng(int(type))
    error = 0.0
    for rows, columns, count in shapes(type):
        error = max(error, check_matvec(bench, type, rows, columns, count, rng))
        bench.free()
    raw = random_weights(type, 5, 768, rng)
    expected = dequantised(type, raw)
    found = bench.dequantise(type, raw, expected.shape[1])
    if type.name in WITH_MINIMUM:  # a GPU may round once where ggml rounds twice
        error = max(error, worst(found, expected, np.abs(expected).max()))
    else:
        assert np.array_equal(found, expected), "other floats than ggml's"
    for choices, activation, add in (
        (SINGLE, SILU, True),
        (SPREAD, SILU, False),
        (MANY, SILU, True),
        (SHARED, CLAMPED_SWIGLU, False),
    ):
        hidden = 256 if choices is SINGLE or block_geometry(type)[0] == 256 else 32
        shape = expert_shape(type, activation=activation, hidden=hidden)
        experts = random_experts(shape, choices, rng, biases=choices in (SINGLE, SHARED))
        x = random_activations(len(choices), shape.width, rng)
        error = max(error, experts.check(bench, x, add))
        bench.free()
    return error


# ------------------------------------------------------------------ as a program
class ExactMemory:
    """Memory that ends where it was asked to: a sanitizer sees the byte behind it."""

    def __init__(self, nbytes: int) -> None:
        self._libc, place = ctypes.CDLL(None), ctypes.c_void_p()
        self._libc.free.argtypes = [ctypes.c_void_p]
        failed = self._libc.posix_memalign(ctypes.byref(place), ALIGNMENT, ctypes.c_size_t(nbytes))
        assert not failed
        self.address, self.nbytes = Address(place.value or 0), nbytes

    def free(self) -> None:
        if self.address:
            self._libc.free(self.address)
            self.address = Address(0)


class ExactBackend(HostBackend):
    """Host memory without room behind an allocation."""

    def allocate(self, nbytes: int) -> Any:
        return ExactMemory(nbytes)


def main() -> None:
    from kernelfaults import FAULTS, with_fault
    from shim import Shim

    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", choices=sorted(FAULTS))
    parser.add_argument("--types", default=",".join(type.name for type in WEIGHT_TYPES))
    parser.add_argument("--flags", default="", help="of the compiler")
    options = parser.parse_args()
    modules = with_fault(options.fault) if options.fault else {}
    first: dict[GGMLType, list[bytes]] = {}
    for seed in (0, 1, 12345):
        shim = Shim(options.folder, seed, tuple(options.flags.split()), modules)
        plain = Workbench(ExactBackend(shim))
        for type, width in ((GGMLType.Q8_0, 160), (GGMLType.Q4_K, 768)):
            check_quantise(plain, type, 3, width, np.random.default_rng(1))
        if not options.fault or FAULTS[options.fault].file == "rows":
            check_not_finite(plain)
        for name in options.types.split(","):
            type, bench = GGMLType[name], Recording(ExactBackend(shim))
            error = check_type(bench, type)
            assert error <= TOLERANCE, f"{name}: error {error:.1e}"
            assert bench.read == first.setdefault(type, bench.read), f"{name}: by schedule"
    print("ok")


class Recording(Workbench):
    """Keeps the bytes of everything that was read back."""

    def __init__(self, device: DeviceBackend) -> None:
        super().__init__(device)
        self.read: list[bytes] = []

    def get(self, address: int, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> Array:
        array = super().get(address, shape, dtype)
        self.read.append(array.tobytes())
        return array


if __name__ == "__main__":
    main()
