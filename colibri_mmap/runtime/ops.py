"""The fused operations that models are written in, on the CPU.

A model receives `Ops` as an object. Values are `Rows` in an arena that is emptied at every forward
pass, so that a decode step finds the addresses of the step before, and its launches with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType
from .arena import Arena, Rows, Temporaries
from .attend import ALL_KEYS, Sight, attend
from .kernels import elementwise
from .kernels.registry import ACTIVATIONS, WeightKernels, dequantise_task, weight_kernels
from .kv import Batch
from .operations import T
from .pool import Job, Launch, Pool, job
from .rope import Rope, RopeFrequencies
from .task import Task
from .weights import Matrix, Vector

Mode = Literal["int8", "exact"]

# (activation, few tokens) -> address and stride of the packed rows
Packed = dict[tuple[str, bool], tuple[int, int]]

# Arguments of jobs that a kept launch gets anew: the addresses of the output of a product, and of
# the rows, the bias and the output of a bias job.
PRODUCT_OUT = 6
BIAS_X, BIAS, BIAS_OUT = 0, 2, 4

_FEW = 16  # tokens: launches of such batches are kept
_CHUNK_BYTES = 1 << 16  # weights of one item of a matrix-vector product
_PANEL_BYTES = 1 << 23  # float32 weights of a type without kernels, at a time


def float_bits(value: float) -> int:
    """A float32 as a word for a kernel."""
    return int(np.float32(value).view(np.int32))


class _Present(NamedTuple):
    """Rows that are on the host already."""

    rows: tuple[Rows, ...]

    def wait(self) -> tuple[Rows, ...]:
        return self.rows


class Ops:
    """Operations on rows; `mode` says how quantised weights are multiplied.

    `alone`: every row is computed as if it were the only one, bit by bit; else products of many
    rows are made in another, faster form, which differs in the last bits.
    """

    def __init__(self, pool: Pool, mode: Mode) -> None:
        self.pool, self.mode = pool, mode
        self.alone = False
        self.arena = Arena()
        self._launches: dict[object, Launch] = {}
        self._kernels: dict[GGMLType, WeightKernels | None] = {}

    # -------------------------------------------------------------------------- plumbing
    def temporaries(self) -> Temporaries:
        """Rows made inside are released at the end."""
        return self.arena.temporaries()

    def kernels(self, kind: GGMLType) -> WeightKernels | None:
        """The kernels of a weight type in this mode; None where it has none."""
        if kind not in self._kernels:
            self._kernels[kind] = weight_kernels(kind, self.mode)
        return self._kernels[kind]

    def run(self, key: object | None, phases: Callable[[], list[list[Job]]]) -> Launch:
        """Run phases; with a key, which must fix every word, they are built once."""
        launch = self._launches.get(key) if key is not None else None
        if launch is None:
            launch = Launch(phases())
            if key is not None:
                self._launches[key] = launch
        self.pool.run(launch)
        return launch

    def numpy(self, rows: Rows) -> NDArray[np.float32]:
        """A copy of the values, float32 [count, width]."""
        return self.arena.view(rows).copy()

    @property
    def cpu(self) -> Ops:
        """The CPU's operations, for what is computed there wherever the rows are."""
        return self

    def kept(self, what: object, x: Rows, work: Callable[[], T]) -> T:
        """The result of `work`: operations on x, always the same ones for `what`.

        A device launches again what it did for the same rows and batch, without asking `work`.
        """
        return work()

    def read(self, *rows: Rows) -> _Present:
        """Start to bring rows to the host; work goes on until `wait` asks for them."""
        return _Present(rows)

    def to_host(self, rows: Rows) -> Rows:
        """The rows as rows of the CPU's operations."""
        return rows

    def from_host(self, rows: Rows) -> Rows:
        """Rows of the CPU's operations as rows of these."""
        return rows

    def zeros(self, count: int, width: int) -> Rows:
        """Rows of zeros."""
        rows = self.arena.rows(count, width)
        self.arena.view(rows)[:] = 0
        return rows

    def vector(self, values: NDArray[np.float32]) -> Vector:
        """A copy of float32 values in the arena."""
        return Vector(self.arena.copy_in(values), len(values), values)

    # -------------------------------------------------------------------------- rows to rows
    def embed(self, table: Matrix, tokens: NDArray[np.int64]) -> Rows:
        """The rows of `table` that belong to the tokens."""
        out = self.arena.rows(len(tokens), table.columns)
        task = dequantise_task(table.type)
        if task is None:
            view = self.arena.view(out)
            for row, token in enumerate(tokens):
                view[row] = table.part(int(token), 1).floats()
            return out
        index = self.arena.copy_in(tokens)
        words = (table.address, table.row_bytes, table.columns, out.address, out.stride, index)
        self.run(None, lambda: [[job(task, out.count, 8, *words)]])
        return out

    def rms_norm(self, x: Rows, weight: Vector, eps: float, *, in_place: bool = False) -> Rows:
        """Each row divided by its root mean square, times `weight`."""
        assert x.width == weight.n
        out = x if in_place else self.arena.rows(x.count, x.width)
        words = (x.address, x.stride, out.address, out.stride, weight.address, x.width)
        key = ("rms_norm", x.count, *words) if x.count <= _FEW * 64 else None
        chunk = max(4, 4096 // x.width)
        task = elementwise.rms_norm
        self.run(key, lambda: [[job(task, x.count, chunk, *words, float_bits(eps))]])
        return out

    def layer_norm(
        self, x: Rows, weight: Vector, bias: Vector | None, eps: float, *, in_place: bool = False
    ) -> Rows:
        """Each row brought to mean 0 and variance 1, times `weight`, plus `bias`."""
        assert x.width == weight.n
        out = x if in_place else self.arena.rows(x.count, x.width)
        words = (x.address, x.stride, out.address, out.stride, weight.address)
        more = (bias.address if bias else 0, x.width, float_bits(eps))
        key = ("layer_norm", x.count, *words) if x.count <= _FEW else None
        chunk = max(4, 4096 // x.width)
        self.run(key, lambda: [[job(elementwise.layer_norm, x.count, chunk, *words, *more)]])
        return out

    def scale(self, x: Rows, factors: Vector) -> None:
        """x[t] *= factors[t], or the same factor for all rows if there is one only."""
        assert factors.n in (1, x.count)
        stride = 0 if factors.n == 1 else 4
        words = (x.address, x.stride, x.address, x.stride, factors.address, stride, x.width)
        key = ("scale", x.count, *words) if x.count <= _FEW else None
        self.run(key, lambda: [[job(elementwise.scale_rows, x.count, 4, *words)]])

    def clamp(self, x: Rows, limit: float) -> None:
        """Every value brought into [-limit, limit]."""
        words = (x.address, x.stride, x.width, float_bits(limit))
        key = ("clamp", x.count, *words) if x.count <= _FEW else None
        self.run(key, lambda: [[job(elementwise.clamp_rows, x.count, 4, *words)]])

    def add(self, x: Rows, y: Rows) -> None:
        """x += y."""
        words = (x.address, x.stride, y.address, y.stride, x.address, x.stride, x.width)
        key = ("add", x.count, *words) if x.count <= _FEW else None
        self.run(key, lambda: [[job(elementwise.add_rows, x.count, 4, *words)]])

    def add_bias(self, x: Rows, bias: Vector) -> None:
        """x += bias in every row."""
        assert x.width == bias.n
        key = ("add_bias", x, bias.address) if x.count <= _FEW else None
        self.run(key, lambda: [[bias_job(x, bias.address)]])

    def silu_mul(self, gate: Rows, up: Rows) -> Rows:
        """silu(gate) * up, in the place of gate."""
        key = ("silu_mul", gate, up) if gate.count <= _FEW else None
        self.run(key, lambda: [[activation_job(elementwise.silu_mul, gate, up)]])
        return gate

    def sigmoid_mul(self, gate: Rows, up: Rows) -> Rows:
        """sigmoid(gate) * up, in the place of up."""
        assert (gate.count, gate.width) == (up.count, up.width)
        words = (gate.address, gate.stride, up.address, up.stride, up.address, up.stride)
        key = ("sigmoid_mul", up.count, *words, up.width) if up.count <= _FEW * 64 else None
        chunk, task = max(1, 8192 // up.width), elementwise.sigmoid_mul
        self.run(key, lambda: [[job(task, up.count, chunk, *words, up.width)]])
        return up

    def add_gated(self, x: Rows, y: Rows, gate: Rows) -> None:
        """x[t] += sigmoid(gate[t]) * y[t], where gate is [T, 1]."""
        words = (x.address, x.stride, y.address, y.stride, gate.address, gate.stride, x.width)
        key = ("add_gated", x.count, *words) if x.count <= _FEW else None
        self.run(key, lambda: [[job(elementwise.add_gated, x.count, 4, *words)]])

    def select(self, x: Rows, rows: NDArray[np.int64]) -> Rows:
        """The rows with these ascending numbers: a view where they are neighbours."""
        if len(rows) == 0 or rows[-1] - rows[0] + 1 == len(rows):
            return x.part(int(rows[0]) if len(rows) else 0, len(rows))
        out = self.arena.rows(len(rows), x.width)
        self.arena.view(out)[:] = self.arena.view(x)[rows]
        return out

    # -------------------------------------------------------------------------- matrix products
    def linear(self, x: Rows, matrix: Matrix) -> Rows:
        """x times the transposed matrix: [T, columns] -> [T, rows]."""
        return self.linears(x, matrix)[0]

    def linears(self, x: Rows, *matrices: Matrix) -> tuple[Rows, ...]:
        """`linear` for several matrices, in one launch."""
        outs = tuple(self.arena.rows(x.count, matrix.rows) for matrix in matrices)
        if any(self.kernels(matrix.type) is None for matrix in matrices):
            for matrix, out in zip(matrices, outs, strict=True):
                self._linear_in_panels(x, matrix, out)
            return outs
        if x.count:
            key = (x, matrices, outs[0].address, self.alone) if x.count <= _FEW else None
            with self.temporaries():
                self.run(
                    key, lambda: self.product_phases(x, list(zip(matrices, outs, strict=True)))
                )
        return outs

    def head_linear(self, x: Rows, matrices: Sequence[Matrix]) -> Rows:
        """The first values of every head times the matrix of the head, in one launch.

        x [T, heads * size] -> [T, heads * rows]; a matrix has at most `size` columns.
        """
        size, rows = x.width // len(matrices), matrices[0].rows
        out = self.arena.rows(x.count, len(matrices) * rows)

        def products() -> Iterator[tuple[Rows, Matrix, Rows]]:
            for head, matrix in enumerate(matrices):
                part = x.columns(size * head, matrix.columns)
                yield part, matrix, out.columns(rows * head, rows)

        def phases() -> list[list[Job]]:
            packs: list[Job] = []
            multiplications: list[Job] = []
            for part, matrix, result in products():
                packed: Packed = {}
                packs += self.pack_jobs(matrix.type, part, part.count, packed)
                multiplications.append(self.product_job(matrix, packed, result))
            return [packs, multiplications]

        if self.kernels(matrices[0].type) is None:
            for part, matrix, result in products():
                self._linear_in_panels(part, matrix, result)
            return out
        words = (matrices[0].address, out.address, self.alone)
        key = ("head_linear", x, *words) if x.count <= _FEW else None
        with self.temporaries():
            self.run(key, phases)
        return out

    def product_phases(self, x: Rows, products: list[tuple[Matrix, Rows]]) -> list[list[Job]]:
        """The two phases of out = x times the transposed matrix, for every (matrix, out)."""
        packed: Packed = {}
        packs = [j for m, _ in products for j in self.pack_jobs(m.type, x, x.count, packed)]
        return [packs, [self.product_job(matrix, packed, out) for matrix, out in products]]

    def pack_jobs(
        self, weight: GGMLType, x: Rows, count: int, packed: Packed, index: int = 0
    ) -> list[Job]:
        """Jobs that bring `count` rows of x into the form that products with `weight` read.

        `index`: address of their int64 row numbers, or 0 for the first `count`. `packed` gets what
        was made; a form it already has costs nothing.
        """
        kernels = self._kernels_of(weight)
        few = self.alone or count <= kernels.columns_limit
        form = (kernels.activation, few)
        if form in packed:
            return []
        if few and kernels.activation == "f32" and not index and x.width % 16 == 0:
            packed[form] = (x.address, x.stride)
            return []
        activation, source = ACTIVATIONS[kernels.activation], (x.address, x.stride)
        if few:
            stride = activation.column_bytes(x.width)
            out = self.arena.take(stride * count)
            jobs = [job(activation.pack_columns, count, 4, *source, index, x.width, out, stride)]
        else:
            stride, vectors = activation.lanes_bytes(x.width), -(-count // 16)
            out = self.arena.take(stride * vectors)
            jobs = [
                job(activation.pack_lanes, vectors, 1, *source, index, count, x.width, out, stride)
            ]
        packed[form] = (out, stride)
        return jobs

    def product_job(self, matrix: Matrix, packed: Packed, out: Rows) -> Job:
        """out = packed activations times the transposed matrix."""
        kernels = self._kernels_of(matrix.type)
        few = self.alone or out.count <= kernels.columns_limit
        if few:
            chunk = max(1, _CHUNK_BYTES // matrix.row_bytes // 16) * 16
        else:
            chunk = max(1, min(8, matrix.rows // (64 * self.pool.threads))) * 16
        task = kernels.matvec if few else kernels.matmul
        activations = packed[kernels.activation, few]
        words = (matrix.address, matrix.row_bytes, matrix.columns, *activations, out.count)
        return job(task, matrix.rows, chunk, *words, out.address, out.stride)

    def _kernels_of(self, kind: GGMLType) -> WeightKernels:
        kernels = self.kernels(kind)
        assert kernels is not None
        return kernels

    def _linear_in_panels(self, x: Rows, matrix: Matrix, out: Rows) -> None:
        """The product with a matrix whose type has no kernels: exact, a panel of rows at a time."""
        rows = max(1, _PANEL_BYTES // (4 * matrix.columns))
        result = self.arena.view(out)
        for first in range(0, matrix.rows, rows):
            count = min(rows, matrix.rows - first)
            with self.temporaries():
                address = self.arena.copy_in(matrix.part(first, count).floats())
                panel = Matrix(address, GGMLType.F32, count, matrix.columns, 4 * matrix.columns)
                part = self.arena.rows(x.count, count)
                self.run(None, lambda p=panel, o=part: self.product_phases(x, [(p, o)]))  # type: ignore[misc]
                result[:, first : first + count] = self.arena.view(part)

    # -------------------------------------------------------------------------- attention
    def rope_table(self, rope: RopeFrequencies, batch: Batch) -> Rope:
        """Cosines and sines of the positions [T, pairs] each, for `rope`."""
        cosines, sines = rope.table(batch)
        count, pairs = cosines.shape
        return (
            Rows(self.arena.copy_in(cosines), count, pairs),
            Rows(self.arena.copy_in(sines), count, pairs),
        )

    def rope(
        self,
        x: Rows,
        heads: int,
        table: tuple[Rows, Rows],
        *,
        half_split: bool,
        first: int = 0,
    ) -> None:
        """Rotate dimensions of every head in place: as many as the table has, from `first` on."""
        cosines, sines = table
        where = (x.address + 4 * first, x.stride, heads, x.width // heads)
        words = (*where, cosines.address, sines.address)
        more = (cosines.stride, cosines.width, int(half_split))
        key = ("rope", x.count, *words, *more) if x.count <= _FEW else None
        self.run(key, lambda: [[job(elementwise.rope, x.count, 4, *words, *more)]])

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
        """Append k and v to the sequences' caches and attend causally: [T, heads * d_v].

        `sinks` [heads] take part in the softmax, each as the score of a key without value.
        """
        shape = batch.sequences[0].cache.layers[layer].shape
        out = self.arena.rows(q.count, q.width // shape.key_size * shape.value_size)
        how = (float_bits(scale), sight.window, sight.chunk, sinks.address if sinks else 0)
        attend(self.pool, (q, k, v, out), batch, layer, how)
        return out


def activation_job(task: Task, gate: Rows, up: Rows) -> Job:
    """gate = gate and up joined, by `silu_mul` or a task with the same arguments."""
    words = (gate.address, gate.stride, up.address, up.stride, gate.address, gate.stride)
    chunk = max(1, 8192 // gate.width)
    return job(task, gate.count, chunk, *words, gate.width)


def bias_job(x: Rows, bias: int) -> Job:
    """x += the bias at an address, in every row."""
    words = (x.address, x.stride, bias, 0, x.address, x.stride, x.width)
    return job(elementwise.add_rows, x.count, 4, *words)


def combine_job(x: Rows, y: Rows, slots: int, weights: int, k: int) -> Job:
    """x[t] += sum over j of weights[t, j] * y[slots[t, j]]; addresses of f32 and int64 [T, k]."""
    words = (x.address, x.stride, x.address, x.stride, y.address, y.stride, slots, weights)
    return job(elementwise.combine_experts, x.count, 4, *words, k, x.width)
