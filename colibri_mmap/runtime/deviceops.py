"""The operations of blocks (operations.py) on a device.

Rows are addresses in device memory; everything is launched on the compute stream and nothing waits,
except a reading of rows. A step of few tokens finds the addresses of the step before, and its
launches with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType, block_geometry
from . import trunkkernels as kernels
from .arena import Rows
from .attend import ALL_KEYS, Sight
from .cudasources import FLOAT_TYPES
from .device import Address, DeviceBackend, DeviceError, Dimensions, KernelLaunch, Stream
from .devicearena import (
    DeviceArena,
    DeviceReading,
    DeviceTemporaries,
    Downloads,
    UploadRing,
    aligned,
)
from .devicekernels import DeviceKernels, Packed
from .devicekv import DeviceCache
from .kv import Batch, KVCache
from .operations import T
from .ops import Ops
from .rope import Rope, RopeFrequencies
from .trunkkernels import AttentionGrid, Slices
from .weights import Matrix, Vector

FEW = 16  # rows: their launches are kept, and no float32 copy of weights is made for them
_MOST_KEPT = 4096  # pieces of work, of which a block has two or three for every shape of batch
PANEL_BYTES = 64 << 20  # float32 weights that many tokens are multiplied with at a time


@dataclass(slots=True)
class _Kept:
    """Launches of some operations, the arena's top after them, and their result.

    `again` gives them to the device as one, once it was asked for.
    """

    launches: list[KernelLaunch]
    mark: tuple[int, int]
    result: object
    again: Callable[[], None] | None = None


class _Launcher:
    """A device as far as kernels are launched on it, which are noted while there is a `tape`."""

    def __init__(self, backend: DeviceBackend) -> None:
        self._backend, self.compute = backend, backend.compute
        self.tape: list[KernelLaunch] | None = None

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: Stream,
    ) -> None:
        self._backend.launch(kernel, grid, block, arguments, stream)
        if self.tape is not None:
            self.tape.append(KernelLaunch(kernel, grid, block, tuple(arguments)))


class DeviceOps:
    """Operations of the blocks whose numbers are `layers`, beside `cpu`, which has the others.

    `placed`: where on the device the vectors and matrices of these host addresses are.
    """

    def __init__(
        self,
        backend: DeviceBackend,
        cpu: Ops,
        placed: Mapping[int, Address],
        layers: Iterable[int],
        *,
        scratch: int = 0,
    ) -> None:
        """`scratch` bytes of device memory to compute with are taken now, more when needed."""
        self.backend, self.cpu = backend, cpu
        self.arena = DeviceArena(backend, scratch)
        self._placed = placed
        self._layers = {layer: index for index, layer in enumerate(layers)}
        self._uploads, self._downloads = UploadRing(backend), Downloads(backend, cpu.arena)
        self._launcher = _Launcher(backend)
        self._products = DeviceKernels(cast(DeviceBackend, self._launcher))  # they only launch
        self._kept: dict[object, _Kept] = {}  # the ones used last at the end
        self._uploaded = False  # since a tape began
        self._caches: WeakSet[KVCache] = WeakSet()  # that have had a mirror here
        self._slices, self._places = Slices(0, 0, 0, 0), 0
        self._shape: tuple[int, ...] = ()  # of the batch, as far as launches depend on it

    def close(self) -> None:
        """Give the memory back, that of caches too; nothing may be computed any more."""
        for cache in list(self._caches):
            for mirror in self._mirrors(cache):
                mirror.close()
        with suppress(DeviceError):  # it has been told already
            self.backend.synchronize(self.backend.record(self.backend.compute))
        self.arena.close()

    def retreat(self) -> None:
        """Bring what sequences have here to the host, and give its memory back."""
        for cache in list(self._caches):
            for mirror in self._mirrors(cache):
                mirror.to_host(cache.context)
                mirror.close()
                cache.mirrors.remove(mirror)

    @staticmethod
    def _mirrors(cache: KVCache) -> list[DeviceCache]:
        return [mirror for mirror in cache.mirrors if isinstance(mirror, DeviceCache)]

    # -------------------------------------------------------------------------- plumbing
    def temporaries(self) -> DeviceTemporaries:
        """Rows made inside are released at the end, those that were read to the host too."""
        return DeviceTemporaries(self.arena, self.cpu.arena)

    def run(self, *launches: KernelLaunch) -> None:
        """Launch kernels, in this order."""
        for kernel, grid, block, arguments in launches:
            self._launcher.launch(kernel, grid, block, arguments, self._launcher.compute)

    def kept(self, what: object, x: Rows, work: Callable[[], T]) -> T:
        """As Ops.kept, in steps of one token per sequence.

        Not if something was uploaded meanwhile, which differs from step to step.
        """
        launcher, kept = self._launcher, self._kept
        if self._slices.tokens != 1 or x.count > FEW or launcher.tape is not None:
            return work()
        key = (what, x, *self._shape, self.arena.mark())
        known = kept.pop(key, None)
        if known is not None:
            kept[key] = known
            if known.again is None:
                known.again = self.backend.joined(known.launches)
            known.again()
            self.arena.release(known.mark)
            return cast(T, known.result)
        launcher.tape, self._uploaded = [], False
        try:
            result = work()
            if not self._uploaded:
                kept[key] = _Kept(launcher.tape, self.arena.mark(), result)
        finally:
            launcher.tape = None
        if len(kept) > _MOST_KEPT:
            del kept[next(iter(kept))]
        return result

    def upload(self, values: NDArray[Any]) -> Address:
        """The address of a copy of an array, in the arena."""
        address = self.arena.take(values.nbytes)
        self._uploads.upload(address, values)
        self._uploaded = True
        return address

    def read(self, *rows: Rows) -> DeviceReading:
        """Start to bring rows to the host; to be waited for before the next reading starts."""
        return self._downloads.start(*rows)

    def to_host(self, rows: Rows) -> Rows:
        """The rows as rows of the CPU's operations, once they are computed."""
        if rows.count == 0:
            return self.cpu.arena.rows(0, rows.width)
        return self.read(rows).wait()[0]

    def from_host(self, rows: Rows) -> Rows:
        """Rows of the CPU's operations as rows of these."""
        return Rows(self.upload(self.cpu.arena.view(rows)), rows.count, rows.width)

    def zeros(self, count: int, width: int) -> Rows:
        """Rows of zeros."""
        rows = self.arena.rows(count, width)
        self.run(kernels.fill_rows(rows, 0.0))
        return rows

    def vector(self, values: NDArray[np.float32]) -> Vector:
        """A copy of float32 values in the arena."""
        return Vector(self.upload(values), len(values), values)

    def _address(self, weight: Matrix | Vector) -> Address:
        """Where a weight is on the device; a vector that was made here is there already."""
        return self._placed.get(weight.address) or cast(Address, weight.address)

    # -------------------------------------------------------------------------- a step
    @contextmanager
    def step(self, batch: Batch) -> Iterator[None]:
        """The span of a forward pass: caches are ready for a batch; rows end with it."""
        with self.arena.temporaries():
            self._begin(batch)
            yield

    def _begin(self, batch: Batch) -> None:
        caches = [self._cache(part.cache, part.position) for part in batch.sequences]
        slices = [(s.start, s.stop - s.start, s.position, 0) for s in batch.sequences]
        ends = [s.position + s.stop - s.start for s in batch.sequences]
        for cache, (_, _, position, _), end in zip(caches, slices, ends, strict=True):
            cache.reserve(end)
            cache.written(position)
        table = self.upload(np.array(slices, np.int32))
        self._slices = Slices(
            table, len(slices), max(tokens for _, tokens, _, _ in slices), max(ends)
        )
        self._places = self.upload(np.stack([cache.places for cache in caches], axis=1))
        size = AttentionGrid.size_class(self._slices)
        self._shape = (table, self._slices.number, size, self._places)

    def attach(self, cache: KVCache, length: int) -> None:
        """Take device memory for the first `length` tokens of a sequence; ResourceError."""
        self._cache(cache, 0).reserve(length)

    def _cache(self, cache: KVCache, position: int) -> DeviceCache:
        """The mirror of a cache, which is made when it is first seen, by what the host has."""
        for mirror in cache.mirrors:
            if isinstance(mirror, DeviceCache):
                return mirror
        mirror = DeviceCache(self.backend, cache, self._layers)
        if position:
            mirror.to_device(position)
        self._caches.add(cache)
        cache.mirrors.append(mirror)
        return mirror

    # -------------------------------------------------------------------------- rows to rows
    def rms_norm(self, x: Rows, weight: Vector, eps: float, *, in_place: bool = False) -> Rows:
        """As Ops.rms_norm."""
        assert x.width == weight.n
        out, at = x if in_place else self.arena.rows(x.count, x.width), self._address(weight)
        self.run(kernels.rms_norm(x, out, at, eps))
        return out

    def layer_norm(
        self, x: Rows, weight: Vector, bias: Vector | None, eps: float, *, in_place: bool = False
    ) -> Rows:
        """As Ops.layer_norm."""
        assert x.width == weight.n
        out, at = x if in_place else self.arena.rows(x.count, x.width), self._address(weight)
        shift = self._address(bias) if bias is not None else 0
        self.run(kernels.layer_norm(x, out, at, shift, eps))
        return out

    def scale(self, x: Rows, factors: Vector) -> None:
        """As Ops.scale."""
        assert factors.n in (1, x.count)
        at, stride = self._address(factors), 0 if factors.n == 1 else 1
        self.run(kernels.scale_rows(x, at, stride))

    def clamp(self, x: Rows, limit: float) -> None:
        """As Ops.clamp."""
        self.run(kernels.clamp_rows(x, limit))

    def add(self, x: Rows, y: Rows) -> None:
        """As Ops.add."""
        self.run(kernels.add_rows(x, y))

    def add_bias(self, x: Rows, bias: Vector) -> None:
        """As Ops.add_bias."""
        assert x.width == bias.n
        at = self._address(bias)
        self.run(kernels.add_bias(x, at))

    def add_gated(self, x: Rows, y: Rows, gate: Rows) -> None:
        """As Ops.add_gated."""
        self.run(kernels.add_gated(x, y, gate))

    def silu_mul(self, gate: Rows, up: Rows) -> Rows:
        """As Ops.silu_mul."""
        self.run(kernels.silu_mul(gate, up, gate))
        return gate

    def sigmoid_mul(self, gate: Rows, up: Rows) -> Rows:
        """As Ops.sigmoid_mul."""
        self.run(kernels.sigmoid_mul(gate, up, up))
        return up

    def select(self, x: Rows, rows: NDArray[np.int64]) -> Rows:
        """As Ops.select."""
        if len(rows) == 0 or rows[-1] - rows[0] + 1 == len(rows):
            return x.part(int(rows[0]) if len(rows) else 0, len(rows))
        index, out = self.upload(rows.astype(np.int32)), self.arena.rows(len(rows), x.width)
        self.run(kernels.copy_rows(x, out, index))
        return out

    # -------------------------------------------------------------------------- matrix products
    def linear(self, x: Rows, matrix: Matrix) -> Rows:
        """As Ops.linear."""
        return self.linears(x, matrix)[0]

    def linears(self, x: Rows, *matrices: Matrix) -> tuple[Rows, ...]:
        """As Ops.linears, which rounds activations for quantised weights alike.

        Many tokens times weights that are floats are a product of matrices.
        """
        outs = tuple(self.arena.rows(x.count, matrix.rows) for matrix in matrices)
        if not x.count:
            return outs
        if x.count > FEW and all(matrix.type in FLOAT_TYPES for matrix in matrices):
            for matrix, out in zip(matrices, outs, strict=True):
                self._multiply(x, matrix, out)
            return outs
        packed: dict[int, Packed] = {}
        with self.arena.temporaries():
            for matrix, out in zip(matrices, outs, strict=True):
                form = _form(matrix.type)
                if form not in packed:
                    packed[form] = self._pack(x, matrix.type)
                shape = (matrix.type, matrix.rows, matrix.columns)
                to = (out.address, out.stride // 4)
                self._products.matvec(self._address(matrix), *shape, packed[form], *to)
        return outs

    def _pack(self, x: Rows, type: GGMLType) -> Packed:
        scratch = self.arena.take(DeviceKernels.packed_bytes(x.count, x.width))
        where = (x.address, x.count, x.width, x.stride // 4)
        return self._products.pack(type, *where, scratch)

    @staticmethod
    def product_bytes(tokens: int, matrix: Matrix) -> int:
        """What `_multiply` takes of the arena, at most."""
        rows = min(matrix.rows, _panel_rows(matrix.columns))
        product = 0 if rows == matrix.rows else aligned(4 * tokens * rows)
        return product + (0 if matrix.type == GGMLType.F32 else aligned(4 * rows * matrix.columns))

    def _multiply(self, x: Rows, matrix: Matrix, out: Rows) -> None:
        """A panel of the matrix's rows at a time, where it is too large as float32."""
        assert x.gap == 0
        backend, columns = self.backend, matrix.columns
        panel = _panel_rows(columns)
        for first in range(0, matrix.rows, panel):
            part = matrix.part(first, min(panel, matrix.rows - first))
            weights = Address(self._address(matrix) + first * matrix.row_bytes)
            whole = part.rows == matrix.rows
            with self.arena.temporaries():
                product = out if whole else self.arena.rows(x.count, part.rows)
                if matrix.type != GGMLType.F32:
                    floats = self.arena.take(4 * part.rows * columns)
                    self._products.dequantise(weights, matrix.type, part.rows, columns, floats)
                    weights = floats
                sizes = (x.count, part.rows, columns)
                backend.matmul(product.address, x.address, weights, *sizes, backend.compute)
                if not whole:
                    self.run(kernels.copy_rows(product, out.columns(first, part.rows)))

    # -------------------------------------------------------------------------- attention
    def rope_table(self, rope: RopeFrequencies, batch: Batch) -> Rope:
        """As Ops.rope_table."""
        cosines, sines = rope.table(batch)
        count, pairs = cosines.shape
        return Rows(self.upload(cosines), count, pairs), Rows(self.upload(sines), count, pairs)

    def rope(self, x: Rows, heads: int, table: Rope, *, half_split: bool, first: int = 0) -> None:
        """As Ops.rope."""
        where = Rows(x.address + 4 * first, x.count, x.width, x.gap)
        self.run(kernels.rope(where, heads, x.width // heads, *table, half_split=half_split))

    def attend(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        batch: Batch,
        layer: int,
        scale: float,
        sight: Sight = ALL_KEYS,
        sinks: Vector | None = None,
    ) -> Rows:
        """As Ops.attend, in the caches that `step` made ready."""
        cache, slices = batch.sequences[0].cache, self._slices
        shape, kv_type = cache.layers[layer].shape, cache.kv_type
        heads = q.width // shape.key_size
        places = self._places + 8 * kernels.PLACE_WORDS * slices.number * self._layers[layer]
        grid = AttentionGrid.of(slices, shape, heads // shape.heads)
        out = self.arena.rows(q.count, heads * shape.value_size)
        extra = self._address(sinks) if sinks is not None else 0

        with self.arena.temporaries():
            partial = self.arena.take(grid.partial_bytes(q.count, heads, shape.value_size))
            where, views = (shape, kv_type, slices, places), (sight.window, sight.chunk)
            self.run(
                kernels.append_kv(k, v, *where),
                *kernels.attention(q, out, *where, grid, partial, scale, views, extra),
            )
        return out


def _panel_rows(columns: int) -> int:
    """Rows of a panel: of every type, these are a multiple of what matrices are aligned to."""
    return max(1, PANEL_BYTES // (4 * columns * 64)) * 64


@functools.cache
def _form(type: GGMLType) -> int:
    """Matrices of types with the same number take activations rounded alike."""
    return block_geometry(type)[0]
