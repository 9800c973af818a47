"""Products on the device: which kernel, which grid, which arguments; callers see addresses only.

T tokens, D width, F hidden width of an expert, G experts in a launch, P (token, expert) pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType, block_geometry
from .cudasources import COLUMN_COUNTS, FLOAT_TYPES, WEIGHT_TYPES
from .device import ALIGNMENT, Address, DeviceBackend, Dimensions

SILU, CLAMPED_SWIGLU = 0, 1  # what joins gate and up
QUANTISED_BLOCK = 32  # activations per scale
_ROWS = 2  # as ROWS of experts.cu
_WARPS_WANTED = 4096  # in a launch, to keep the memory of a large GPU busy
_WARPS_PER_BLOCK = 4
_DEQUANTISE_THREADS = 128
_COMBINE_THREADS = 128
_Number = TypeVar("_Number", bound=np.generic)


def supports(type: GGMLType, columns: int) -> bool:
    """Whether matrices of a type with rows of this length can be multiplied on the device."""
    if type in FLOAT_TYPES:
        return columns % 4 == 0 and columns >= 8
    return type in WEIGHT_TYPES and columns % block_geometry(type)[0] == 0 and columns > 0


@dataclass(frozen=True, slots=True)
class Packed:
    """Activations as products take them: int8 with scales, or float32 where `scales` is 0.

    x [count, stride]; scales float32 [count, stride / 32, 2]: d, by which x is d * q, and
    d * sum(q).
    """

    x: Address
    scales: Address
    stride: int
    count: int

    @property
    def arguments(self) -> tuple[int, int, int]:
        return self.x, self.scales, self.stride


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a layer: gate and up [hidden, width], down [width, hidden]."""

    type: GGMLType
    down_type: GGMLType
    width: int
    hidden: int
    activation: int = SILU

    @property
    def supported(self) -> bool:
        return supports(self.type, self.width) and supports(self.down_type, self.hidden)


@dataclass(frozen=True, slots=True)
class ExpertTables:
    """What the kernels of one layer's experts read beside weights: addresses and who uses them.

    Pairs are sorted by expert, entries are the same pairs by token in router order.
    """

    addresses: NDArray[np.int64]  # [6, G]: gate, up, down, then their biases or 0
    entry_downs: NDArray[np.int64]  # [2, P]: down and its bias of each entry
    starts: NDArray[np.int32]  # [G + 1]: pairs of each expert
    tokens: NDArray[np.int32]  # [P]: token of each pair
    entry_starts: NDArray[np.int32]  # [T + 1]: entries of each token
    entry_pairs: NDArray[np.int32]  # [P]
    entry_weights: NDArray[np.float32]  # [P]

    @classmethod
    def of(
        cls,
        addresses: NDArray[np.int64],
        experts: NDArray[np.integer],
        tokens: NDArray[np.integer],
        weights: NDArray[np.float32],
        count: int,
    ) -> ExpertTables:
        """Tables for `count` tokens.

        `addresses` [6, G]: gate, up, down and their biases (0: none) of the experts in the launch;
        `experts` (positions in G), `tokens` and `weights` [P]: the choices, tokens ascending.
        """
        groups = addresses.shape[1]
        order = np.argsort(experts, kind="stable")
        pairs = np.empty(len(order), np.int32)
        pairs[order] = np.arange(len(order), dtype=np.int32)
        return cls(
            addresses=addresses,
            entry_downs=addresses[2::3, experts],
            starts=_starts(experts, groups),
            tokens=tokens[order].astype(np.int32),
            entry_starts=_starts(tokens, count),
            entry_pairs=pairs,
            entry_weights=weights,
        )

    @property
    def groups(self) -> int:
        return int(self.addresses.shape[1])

    @property
    def pairs(self) -> int:
        return len(self.tokens)

    @property
    def count(self) -> int:
        return len(self.entry_starts) - 1

    @property
    def most(self) -> int:
        """Pairs of the busiest expert."""
        return int(np.diff(self.starts).max(initial=0))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self._arrays)

    @staticmethod
    def bytes_for(*, groups: int, pairs: int, count: int) -> int:
        """What tables of that many experts, pairs and tokens take."""
        return 48 * groups + 16 * pairs + 4 * (groups + 1) + 12 * pairs + 4 * (count + 1)

    @property
    def _arrays(self) -> tuple[NDArray[np.generic], ...]:
        return (
            *(self.addresses, self.entry_downs, self.starts, self.tokens),
            *(self.entry_starts, self.entry_pairs, self.entry_weights),
        )

    def write(self, target: NDArray[np.uint8]) -> None:
        """Fill `target` [nbytes], whose copy on the device `DeviceKernels.experts` is given."""
        start = 0
        for array in self._arrays:
            target[start : start + array.nbytes] = (
                np.ascontiguousarray(array).view(np.uint8).ravel()
            )
            start += array.nbytes

    def places(self, address: int) -> tuple[Address, ...]:
        """Addresses on the device of six tables [G], two [P] and the five others."""
        places, at = [], address
        for array in self._arrays:
            rows = array if array.ndim == 2 else array[None]
            places += [Address(at + row * rows[0].nbytes) for row in range(len(rows))]
            at += array.nbytes
        return tuple(places)


def _starts(numbers: NDArray[np.integer], count: int) -> NDArray[np.int32]:
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(numbers, minlength=count), out=starts[1:])
    return starts


class DeviceKernels:
    """Launches products on the compute stream of a device; nothing waits.

    Scratch memory is the caller's, aligned to ALIGNMENT, and in use until the launches are done.
    """

    def __init__(self, device: DeviceBackend) -> None:
        self._device = device

    # -------------------------------------------------------------------------- activations
    @staticmethod
    def packed_bytes(count: int, width: int) -> int:
        """Scratch bytes that `pack` needs."""
        return _aligned(count * width) + _aligned(8 * count * width // QUANTISED_BLOCK)

    def pack(
        self, type: GGMLType, x: int, count: int, width: int, stride: int, scratch: int
    ) -> Packed:
        """x float32 [count, width], rows `stride` floats apart, as matrices of `type` take it.

        The rounding is that of the CPU's kernels: one scale per block of the weights.
        """
        if type in FLOAT_TYPES:
            return Packed(Address(x), Address(0), stride, count)
        packed = Packed(Address(scratch), Address(scratch + _aligned(count * width)), width, count)
        together = block_geometry(type)[0] // QUANTISED_BLOCK
        warps = together if together > 1 else _WARPS_PER_BLOCK
        grid, block = (_up(width // QUANTISED_BLOCK, warps), count, 1), (32, warps, 1)
        arguments = (Address(x), packed.x, packed.scales, stride, width, int(together > 1))
        self.launch("quantise_q8", grid, block, *arguments)
        return packed

    # -------------------------------------------------------------------------- one matrix
    def matvec(
        self,
        matrix: int,
        type: GGMLType,
        rows: int,
        columns: int,
        packed: Packed,
        out: int,
        out_stride: int,
    ) -> None:
        """out[t] = matrix [rows, columns] . x[t], rows of out `out_stride` floats apart."""
        n = _columns(packed.count)
        tiles = _up(packed.count, n)
        grid_x, block = _tiling(type, columns, _up(rows, _ROWS), tiles)
        self.launch(
            f"matvec_{type.name.lower()}_c{n}",
            *((grid_x, tiles, 1), block),
            *(Address(matrix), *packed.arguments, Address(out), out_stride),
            *(rows, columns, packed.count),
        )

    def dequantise(self, matrix: int, type: GGMLType, rows: int, columns: int, out: int) -> None:
        """out float32 [rows, columns] = matrix."""
        grid = (_up(rows * _units(type, columns), _DEQUANTISE_THREADS), 1, 1)
        arguments = (Address(matrix), Address(out), rows, columns)
        block = (_DEQUANTISE_THREADS, 1, 1)
        self.launch(f"dequantise_{type.name.lower()}", grid, block, *arguments)

    # -------------------------------------------------------------------------- experts
    @staticmethod
    def experts_bytes(shape: ExpertShape, pairs: int) -> int:
        """Scratch bytes that `experts` needs."""
        hidden = _aligned(4 * pairs * shape.hidden)
        packed = DeviceKernels.packed_bytes(pairs, shape.hidden)
        return hidden + packed + _aligned(4 * pairs * shape.width)

    def experts(
        self,
        shape: ExpertShape,
        tables: ExpertTables,
        address: int,
        packed: Packed,
        scratch: int,
        out: int,
        out_stride: int,
        add: bool = False,
    ) -> None:
        """out[t] = (out[t] +) the weighted sum of the outputs of token t's experts on x[t].

        `address`: the device's copy of `tables`; `packed`: x [T, width] for `shape.type`.
        """
        step = ExpertStep(self, shape, tables, address, packed, scratch, out, out_stride, add)
        if tables.pairs:
            step.gate_up()
            step.down()
        elif not add:
            step.nothing()

    def launch(
        self, kernel: str, grid: Dimensions, block: Dimensions, *arguments: int | float
    ) -> None:
        """Run a kernel on the compute stream."""
        self._device.launch(kernel, grid, block, arguments, self._device.compute)


@dataclass(frozen=True, slots=True)
class ExpertStep:
    """One call of `DeviceKernels.experts` in its two halves."""

    kernels: DeviceKernels
    shape: ExpertShape
    tables: ExpertTables
    address: int
    packed: Packed
    scratch: int
    out: int
    out_stride: int
    add: bool

    def gate_up(self) -> None:
        """The hidden rows float32 [P, F], at `scratch`."""
        shape, tables = self.shape, self.tables
        n = _columns(tables.most)
        tiles = _up(tables.most, n)
        grid_x, block = _tiling(shape.type, shape.width, shape.hidden, tables.groups * tiles)
        gates, ups, _, gate_biases, up_biases, *_, starts, tokens = self._places[:10]
        self.kernels.launch(
            f"gate_up_{shape.type.name.lower()}_c{n}",
            *((grid_x, tables.groups, tiles), block),
            *(gates, ups, gate_biases, up_biases, starts, tokens, *self.packed.arguments),
            *(Address(self.scratch), shape.hidden, shape.width, shape.activation),
        )

    def down(self) -> None:
        """The outputs from the hidden rows."""
        shape, pairs = self.shape, self.tables.pairs
        behind = self.scratch + _aligned(4 * pairs * shape.hidden)
        size = pairs, shape.hidden
        hidden = self.kernels.pack(shape.down_type, self.scratch, *size, shape.hidden, behind)
        if self.tables.most == 1:
            self._down_weighted(hidden)
        else:
            y = Address(behind + self.kernels.packed_bytes(*size))
            self._down(hidden, y)
            self._combine(y)

    def nothing(self) -> None:
        """The outputs of tokens that chose none of the experts: zeros."""
        self._combine(Address(self.scratch))

    @property
    def _places(self) -> tuple[Address, ...]:
        return self.tables.places(self.address)

    def _down_weighted(self, hidden: Packed) -> None:
        shape, tables = self.shape, self.tables
        columns = shape.hidden * _up(tables.pairs, tables.count)
        grid_x, block = _tiling(shape.down_type, columns, _up(shape.width, _ROWS), tables.count)
        downs, biases, _, _, starts, pairs, weights = self._places[6:]
        self.kernels.launch(
            f"down_weighted_{shape.down_type.name.lower()}",
            *((grid_x, tables.count, 1), block),
            *(downs, biases, starts, pairs, weights, *hidden.arguments),
            *(Address(self.out), self.out_stride, shape.width, shape.hidden),
            *(tables.pairs, int(self.add)),
        )

    def _down(self, hidden: Packed, y: Address) -> None:
        shape, tables, places = self.shape, self.tables, self._places
        n = _columns(tables.most)
        tiles, row_groups = _up(tables.most, n), _up(shape.width, _ROWS)
        others = tables.groups * tiles
        grid_x, block = _tiling(shape.down_type, shape.hidden, row_groups, others)
        self.kernels.launch(
            f"down_{shape.down_type.name.lower()}_c{n}",
            *((grid_x, tables.groups, tiles), block),
            *(places[2], places[5], places[8], *hidden.arguments, y, shape.width, shape.hidden),
        )

    def _combine(self, y: Address) -> None:
        width = self.shape.width
        starts, pairs, weights = self._places[10:]
        self.kernels.launch(
            "combine_pairs",
            *((_up(width, _COMBINE_THREADS), self.tables.count, 1), (_COMBINE_THREADS, 1, 1)),
            *(y, starts, pairs, weights),
            *(Address(self.out), self.out_stride, width, int(self.add)),
        )


def _aligned(nbytes: int) -> int:
    return _up(nbytes, ALIGNMENT) * ALIGNMENT


def _up(n: int, per: int) -> int:
    return -(-n // per)


def _columns(count: int) -> int:
    """The kernel's number of columns for `count` tokens that share a matrix."""
    return next((n for n in COLUMN_COUNTS if n >= count), COLUMN_COUNTS[-1])


def _units(type: GGMLType, columns: int) -> int:
    """What the lanes share among them of a row: units of operands.cuh."""
    return columns // (4 if type in FLOAT_TYPES else 16 if type is GGMLType.Q8_0 else 32)


def _tiling(type: GGMLType, columns: int, row_groups: int, others: int) -> tuple[int, Dimensions]:
    """Blocks along the rows and the threads of a block, for `row_groups` in `others` parts."""
    units = _units(type, columns)

    def turns(warps: int) -> int:
        """Units of the busiest lane."""
        return _up(units, 32 * warps)

    together = 1  # warps that share the units of a row group, unless many lanes would idle then
    while (
        together < _WARPS_PER_BLOCK
        and row_groups * others * together < _WARPS_WANTED
        and 8 * turns(2 * together) <= 5 * turns(together)
    ):
        together *= 2
    groups = _WARPS_PER_BLOCK // together
    return _up(row_groups, groups), (32, together, groups)
