"""The operations of blocks (operations.py) on a device.

Rows are addresses in device memory; everything is launched on the compute stream and nothing waits,
except a reading of rows. A step of few tokens finds the addresses of the step before, and its
launches with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from .device import Address, DeviceBackend, Dimensions, KernelLaunch, Stream
from .devicearena import (
    DeviceArena,
    DeviceReading,
    DeviceTemporaries,
    Downloads,
    UploadRing,
)
from .devicekernels import DeviceKernels, Packed
from .devicekv import DeviceCache
from .kv import Batch, KVCache
from .operations import T
from .ops import Ops
from .rope import Rope, RopeFrequencies
from .trunkkernels import AttentionGrid, Slices
from .weights import Matrix, Vector

FEW = 16  # tokens, whose launches are kept
_FORMS = (1, 32, 256)  # of activations, by the weights in a block
PANEL_BYTES = 64 << 20  # float32 weights that many tokens are multiplied with at a time

Launches = Sequence[KernelLaunch]


@dataclass(slots=True)
class _Kept:
    """Launches of some operations, the arena's top after them, and their result.

    `again` gives them to the device as one, once it was asked for.
    """

    launches: Launches
    mark: tuple[int, int]
    result: object
    again: Callable[[], None] | None = None


class Recorder:
    """In place of a device, for launches that are kept."""

    compute: Stream = None

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: Stream,
    ) -> None:
        self.launches.append(KernelLaunch(kernel, grid, block, tuple(arguments)))

    def take(self) -> Launches:
        """What was recorded since this was last asked."""
        taken, self.launches = self.launches, []
        return taken


class DeviceOps:
    """Operations of the blocks whose numbers are `layers`, beside `cpu`, which has the others.

    `placed`: where on the device the vectors and matrices of these host addresses are.
    """

    def __init__(
        self, backend: DeviceBackend, cpu: Ops, placed: Mapping[int, Address], layers: Iterable[int]
    ) -> None:
        self.backend, self.cpu = backend, cpu
        self.arena = DeviceArena(backend)
        self._placed = placed
        self._layers = {layer: index for index, layer in enumerate(layers)}
        self._uploads, self._downloads = UploadRing(backend), Downloads(backend, cpu.arena)
        self._recorder = Recorder()
        self._recorded = DeviceKernels(cast(DeviceBackend, self._recorder))  # it only launches
        self._products = DeviceKernels(backend)
        self._launches: dict[object, Launches] = {}
        self._kept: dict[object, _Kept] = {}
        self._tape: list[KernelLaunch] | None = None  # of what is being kept
        self._uploaded = False  # since the tape began
        self._caches: WeakSet[DeviceCache] = WeakSet()
        self._slices, self._places = Slices(0, 0, 0, 0), 0
        self._shape: tuple[int, ...] = ()  # of the batch, as far as launches depend on it

    def close(self) -> None:
        """Give the memory back, that of caches too; nothing may be computed any more."""
        for cache in list(self._caches):
            cache.close()
        self.backend.synchronize(self.backend.record(self.backend.compute))
        self.arena.close()

    # -------------------------------------------------------------------------- plumbing
    def temporaries(self) -> DeviceTemporaries:
        """Rows made inside are released at the end, those that were read to the host too."""
        return DeviceTemporaries(self.arena, self.cpu.arena)

    def run(self, key: object | None, launches: Callable[[], Launches]) -> None:
        """Launch kernels; with a key, which must fix every word, the launches are made once."""
        found = self._launches.get(key) if key is not None else None
        if found is None:
            found = launches()
            if key is not None:
                self._launches[key] = found
        if self._tape is not None:
            self._tape += found
        self._launch(found)

    def _launch(self, launches: Launches) -> None:
        backend = self.backend
        for kernel, grid, block, arguments in launches:
            backend.launch(kernel, grid, block, arguments, backend.compute)

    def kept(self, what: object, x: Rows, work: Callable[[], T]) -> T:
        """As Ops.kept: launches of few rows are made anew only for other rows or another batch.

        Not if something was uploaded meanwhile, which differs from step to step.
        """
        if x.count > FEW or self._tape is not None:
            return work()
        key = (what, x, self._slices.table, *self._shape, self.arena.mark())
        known = self._kept.get(key)
        if known is not None:
            if known.again is None:
                known.again = self.backend.joined(known.launches)
            known.again()
            self.arena.release(known.mark)
            return cast(T, known.result)
        self._tape, self._uploaded = [], False
        try:
            result = work()
            if not self._uploaded:
                self._kept[key] = _Kept(self._tape, self.arena.mark(), result)
        finally:
            self._tape = None
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
        self.run(_key("zeros", rows), lambda: [kernels.fill_rows(rows, 0.0)])
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
        self._shape = (self._slices.number, self._slices.tokens, size, self._places)

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
        self._caches.add(mirror)
        cache.mirrors.append(mirror)
        return mirror

    # -------------------------------------------------------------------------- rows to rows
    def rms_norm(self, x: Rows, weight: Vector, eps: float, *, in_place: bool = False) -> Rows:
        """As Ops.rms_norm."""
        assert x.width == weight.n
        out, at = x if in_place else self.arena.rows(x.count, x.width), self._address(weight)
        key = ("rms_norm", x, out.address, at) if x.count <= FEW * 64 else None
        self.run(key, lambda: [kernels.rms_norm(x, out, at, eps)])
        return out

    def layer_norm(
        self, x: Rows, weight: Vector, bias: Vector | None, eps: float, *, in_place: bool = False
    ) -> Rows:
        """As Ops.layer_norm."""
        assert x.width == weight.n
        out, at = x if in_place else self.arena.rows(x.count, x.width), self._address(weight)
        shift = self._address(bias) if bias is not None else 0
        key = _key("layer_norm", x, out.address, at)
        self.run(key, lambda: [kernels.layer_norm(x, out, at, shift, eps)])
        return out

    def scale(self, x: Rows, factors: Vector) -> None:
        """As Ops.scale."""
        assert factors.n in (1, x.count)
        at, stride = self._address(factors), 0 if factors.n == 1 else 1
        self.run(_key("scale", x, at, stride), lambda: [kernels.scale_rows(x, at, stride)])

    def clamp(self, x: Rows, limit: float) -> None:
        """As Ops.clamp."""
        self.run(_key("clamp", x, limit), lambda: [kernels.clamp_rows(x, limit)])

    def add(self, x: Rows, y: Rows) -> None:
        """As Ops.add."""
        self.run(_key("add", x, y), lambda: [kernels.add_rows(x, y)])

    def add_bias(self, x: Rows, bias: Vector) -> None:
        """As Ops.add_bias."""
        assert x.width == bias.n
        at = self._address(bias)
        self.run(_key("add_bias", x, at), lambda: [kernels.add_bias(x, at)])

    def add_gated(self, x: Rows, y: Rows, gate: Rows) -> None:
        """As Ops.add_gated."""
        self.run(_key("add_gated", x, y, gate), lambda: [kernels.add_gated(x, y, gate)])

    def silu_mul(self, gate: Rows, up: Rows) -> Rows:
        """As Ops.silu_mul."""
        self.run(_key("silu_mul", gate, up), lambda: [kernels.silu_mul(gate, up, gate)])
        return gate

    def sigmoid_mul(self, gate: Rows, up: Rows) -> Rows:
        """As Ops.sigmoid_mul."""
        self.run(_key("sigmoid_mul", gate, up), lambda: [kernels.sigmoid_mul(gate, up, up)])
        return up

    def select(self, x: Rows, rows: NDArray[np.int64]) -> Rows:
        """As Ops.select."""
        if len(rows) == 0 or rows[-1] - rows[0] + 1 == len(rows):
            return x.part(int(rows[0]) if len(rows) else 0, len(rows))
        index, out = self.upload(rows.astype(np.int32)), self.arena.rows(len(rows), x.width)
        self.run(None, lambda: [kernels.copy_rows(x, out, index)])
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
        with self.arena.temporaries():
            packings = [
                self.arena.take(DeviceKernels.packed_bytes(x.count, x.width)) for _ in _FORMS
            ]
            key = ("linears", x, matrices, outs[0].address, packings[0])
            self.run(
                key if x.count <= FEW else None,
                lambda: self._matvecs(x, matrices, outs, packings),
            )
        return outs

    def _matvecs(
        self,
        x: Rows,
        matrices: Sequence[Matrix],
        outs: Sequence[Rows],
        packings: Sequence[Address],
    ) -> Launches:
        """`packings`: room for each form of the activations."""
        forms: dict[int, Packed] = {}
        record, where = self._recorded, (x.address, x.count, x.width, x.stride // 4)
        for matrix, out in zip(matrices, outs, strict=True):
            form = _FORMS.index(block_geometry(matrix.type)[0])
            if form not in forms:
                forms[form] = record.pack(matrix.type, *where, packings[form])
            shape = (matrix.type, matrix.rows, matrix.columns)
            to = (out.address, out.stride // 4)
            record.matvec(self._address(matrix), *shape, forms[form], *to)
        return self._recorder.take()

    def _multiply(self, x: Rows, matrix: Matrix, out: Rows) -> None:
        """A panel of the matrix's rows at a time, where it is too large as float32."""
        assert x.gap == 0
        backend, columns = self.backend, matrix.columns
        panel = max(1, PANEL_BYTES // (4 * columns))
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
                    target = out.columns(first, part.rows)
                    self.run(None, lambda p=product, t=target: [kernels.copy_rows(p, t)])  # type: ignore[misc]

    # -------------------------------------------------------------------------- attention
    def rope_table(self, rope: RopeFrequencies, batch: Batch) -> Rope:
        """As Ops.rope_table."""
        cosines, sines = rope.table(batch)
        count, pairs = cosines.shape
        return Rows(self.upload(cosines), count, pairs), Rows(self.upload(sines), count, pairs)

    def rope(self, x: Rows, heads: int, table: Rope, *, half_split: bool, first: int = 0) -> None:
        """As Ops.rope."""
        where = Rows(x.address + 4 * first, x.count, x.width, x.gap)
        key = _key("rope", where, heads, table[0].address, table[1].address, half_split)
        size = x.width // heads
        self.run(key, lambda: [kernels.rope(where, heads, size, *table, half_split=half_split)])

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

        def launches() -> Launches:
            where = (shape, kv_type, slices, places)
            views = (sight.window, sight.chunk)
            attention = kernels.attention(q, out, *where, grid, partial, scale, views, extra)
            return [kernels.append_kv(k, v, *where), *attention]

        with self.arena.temporaries():
            partial = self.arena.take(grid.partial_bytes(q.count, heads, shape.value_size))
            same = (slices.table, slices.number, slices.tokens, places, grid, partial)
            self.run(_key("attend", q, k.address, v.address, out.address, *same, layer), launches)
        return out


def _key(name: str, x: Rows, *more: object) -> object | None:
    """The key of a launch on few rows; launches on many are made anew."""
    return (name, x, *more) if x.count <= FEW else None
