"""Launches of the kernels of cuda/trunk.cu and attention.cu: names, grids and arguments."""

from __future__ import annotations

from typing import NamedTuple

from .arena import Rows
from .device import Address, KernelLaunch
from .kv import KVShape

MAX_HEAD = 256  # dimensions of a head, at most
TILE = 64  # keys that the attention kernel takes at a time
SLICE_WORDS, PLACE_WORDS = 4, 5  # int32, uint64: the structs Slice and Place
_THREADS = 256
_ATTENTION_THREADS = 128
_FEW_ROWS = (4, 8)  # of a block of the attention kernel, whose warps share the work
_MANY_ROWS = 32  # of one whose warps have rows of their own
_ENOUGH_BLOCKS = 256  # of the attention kernel, to keep a device busy
_MOST_SHARES = 64
_JOINED_AT_ONCE = 4  # shares of a row
_COLUMN = 128  # dimensions of a head: kernels are for one of them, or two


def rms_norm(x: Rows, out: Rows, weight: int, eps: float) -> KernelLaunch:
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    where = (Address(x.address), x.stride // 4, Address(out.address), out.stride // 4)
    return _by_row("rms_norm", x, (*where, Address(weight), x.width, float(eps)))


def layer_norm(x: Rows, out: Rows, weight: int, bias: int, eps: float) -> KernelLaunch:
    """out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias, which may be 0: none."""
    where = (Address(x.address), x.stride // 4, Address(out.address), out.stride // 4)
    what = (Address(weight), Address(bias), x.width, float(eps))
    return _by_row("layer_norm", x, (*where, *what))


def silu_mul(gate: Rows, up: Rows, out: Rows) -> KernelLaunch:
    """out = silu(gate) * up"""
    return _elementwise("silu_mul", out, (*_strided(gate, up, out), out.width))


def sigmoid_mul(gate: Rows, up: Rows, out: Rows) -> KernelLaunch:
    """out = sigmoid(gate) * up"""
    return _elementwise("sigmoid_mul", out, (*_strided(gate, up, out), out.width))


def add_rows(x: Rows, y: Rows) -> KernelLaunch:
    """x += y"""
    return _elementwise("add_rows", x, (*_strided(x, y), x.width))


def add_bias(x: Rows, bias: int) -> KernelLaunch:
    """x += bias in every row."""
    return _elementwise("add_rows", x, (*_strided(x), Address(bias), 0, x.width))


def add_gated(x: Rows, y: Rows, gate: Rows) -> KernelLaunch:
    """x[t] += sigmoid(gate[t]) * y[t]"""
    return _elementwise("add_gated", x, (*_strided(x, y, gate), x.width))


def scale_rows(x: Rows, factors: int, stride: int) -> KernelLaunch:
    """x[t] *= factors[t * stride]"""
    return _elementwise("scale_rows", x, (*_strided(x), Address(factors), stride, x.width))


def clamp_rows(x: Rows, limit: float) -> KernelLaunch:
    """Every value into [-limit, limit]."""
    return _elementwise("clamp_rows", x, (*_strided(x), x.width, float(limit)))


def fill_rows(x: Rows, value: float) -> KernelLaunch:
    """Every value becomes `value`."""
    return _elementwise("fill_rows", x, (*_strided(x), x.width, float(value)))


def copy_rows(x: Rows, out: Rows, index: int = 0) -> KernelLaunch:
    """out[t] = x[index[t]] for int32 numbers at an address; without, x[t]."""
    where = (*_strided(x), Address(index), *_strided(out))
    return _elementwise("copy_rows", out, (*where, out.width))


def rope(
    x: Rows, heads: int, head_size: int, cosines: Rows, sines: Rows, *, half_split: bool
) -> KernelLaunch:
    """Rotate the first 2 * pairs numbers of every head, where the tables are [T, pairs]."""
    pairs = cosines.width
    tables = (Address(cosines.address), Address(sines.address), cosines.stride // 4)
    arguments = (*_strided(x), heads, head_size, *tables, pairs, int(half_split))
    grid = (-(-heads * pairs // _THREADS), x.count, 1)
    return KernelLaunch("rope", grid, (_THREADS, 1, 1), arguments)


class Slices(NamedTuple):
    """The sequences of a batch: where the table of Slice lies, their number, the most tokens that
    one brings, and the most positions that one has after the step."""

    table: int
    number: int
    tokens: int
    length: int


def append_kv(
    k: Rows, v: Rows, shape: KVShape, kv_type: str, slices: Slices, places: int
) -> KernelLaunch:
    """Write k and v into the caches at `places`."""
    sizes = (shape.heads, shape.key_size, shape.value_size)
    elements = shape.heads * (shape.key_size + shape.padded_value_size)
    grid = (-(-elements // _THREADS), slices.tokens, slices.number)
    arguments = (*_strided(k, v), *sizes, Address(slices.table), Address(places))
    return KernelLaunch(f"append_kv_{kv_type}", grid, (_THREADS, 1, 1), arguments)


class AttentionGrid(NamedTuple):
    """How the work of an attention launch is shared out.

    `rows` of a block, blocks of rows of the longest slice, `shares` that keys are cut into at most,
    and those that there are.
    """

    rows: int
    row_blocks: int
    most: int
    shares: int

    @classmethod
    def of(cls, slices: Slices, shape: KVShape, group: int) -> AttentionGrid:
        """For `group` query heads per KV head; shares double as sequences grow.

        How the keys of a token are cut does not depend on the sequences beside it.
        """
        pairs = slices.tokens * group
        rows = next((n for n in _FEW_ROWS if n >= pairs), _FEW_ROWS[-1])
        if slices.tokens > 1 and pairs > 2 * rows:
            rows = _MANY_ROWS
        row_blocks = -(-pairs // rows)
        most = max(1, min(_ENOUGH_BLOCKS // (shape.heads * row_blocks), _MOST_SHARES))
        keys = min(slices.length, shape.window + slices.tokens) if shape.window else slices.length
        return cls(rows, row_blocks, most, min(most, _power_of_two(_tiles(keys))))

    @staticmethod
    def size_class(slices: Slices) -> int:
        """What the grids of all layers depend on, of the length of sequences."""
        return _power_of_two(_tiles(slices.length))

    def partial_bytes(self, tokens: int, heads: int, value_size: int) -> int:
        """What the shares of `tokens` rows take until they are joined."""
        return 4 * tokens * heads * self.shares * (2 + value_size) if self.shares > 1 else 0


def attention_bytes(value_size: int) -> int:
    """The most that shares of one sequence take, see `AttentionGrid`."""
    return 4 * _ENOUGH_BLOCKS * _MANY_ROWS * (2 + value_size)


def attention(
    q: Rows,
    out: Rows,
    shape: KVShape,
    kv_type: str,
    slices: Slices,
    places: int,
    grid: AttentionGrid,
    partial: int,
    scale: float,
    sight: tuple[int, int],
    sinks: int,
) -> list[KernelLaunch]:
    """Causal attention; `sight`: window and chunk; `sinks`, `partial`: addresses or 0."""
    group = q.width // shape.key_size // shape.heads
    sizes = (grid.row_blocks, grid.most, group, shape.key_size, shape.value_size)
    tables = (Address(slices.table), Address(places))
    where = (*_strided(q, out), *tables, *sizes, float(scale), *sight)
    size = -(-max(shape.key_size, shape.value_size) // _COLUMN) * _COLUMN
    launch = KernelLaunch(
        f"attention_{kv_type}_r{grid.rows}_d{size}",
        (shape.heads * grid.row_blocks, grid.shares, slices.number),
        (_ATTENTION_THREADS, 1, 1),
        (*where, Address(sinks), Address(partial)),
    )
    if grid.shares == 1:
        return [launch]
    joined = (Address(partial), *_strided(out), shape.value_size, grid.shares)
    block = (-(-min(shape.value_size, _COLUMN) // 32) * 32, _JOINED_AT_ONCE, 1)
    reduce = KernelLaunch("attention_reduce", (shape.heads * group, q.count, 1), block, joined)
    return [launch, reduce]


def _tiles(keys: int) -> int:
    """Tiles that the keys of a token are in, whose first one begins at a multiple of 16."""
    return -(-(keys + 16) // TILE)


def _power_of_two(n: int) -> int:
    """The next one from n on."""
    return 1 << (n - 1).bit_length()


def _by_row(kernel: str, x: Rows, arguments: tuple[int | float, ...]) -> KernelLaunch:
    """A block a row, with up to 1024 threads, eight values or fewer each."""
    threads = min(1024, max(32, -(-x.width // 4 // 32) * 32))
    return KernelLaunch(kernel, (x.count, 1, 1), (threads, 1, 1), arguments)


def _elementwise(kernel: str, x: Rows, arguments: tuple[int | float, ...]) -> KernelLaunch:
    """A thread a value."""
    grid = (-(-x.width // _THREADS), x.count, 1)
    return KernelLaunch(kernel, grid, (_THREADS, 1, 1), arguments)


def _strided(*rows: Rows) -> tuple[int, ...]:
    """Address and stride in floats of each."""
    return tuple(word for r in rows for word in (Address(r.address), r.stride // 4))
