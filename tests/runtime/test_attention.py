"""Attention against a float64 oracle, and decoding against prefill bit by bit."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from colibri_mmap.runtime.kernels import attention as kernels
from colibri_mmap.runtime.ops import float_bits

ALL = 1 << 30
SLACK = 16  # floats that kernels may read past the end


@dataclass
class Case:
    """`positions` keys and values of `kv_heads` heads, and a query of `group` heads per each.

    The cache starts as NaN, so that reading a position that was not written shows.
    """

    positions: int
    group: int = 3
    kv_heads: int = 2
    dk: int = 16
    dv: int = 16
    half: bool = False
    window: int = ALL
    seed: int = 1
    own_chunk: int = ALL
    sinks: np.ndarray | None = None
    ring: int = 0
    capacity: int = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        normal = lambda *shape: random.standard_normal(shape, np.float32)  # noqa: E731
        self.capacity = self.ring or -(-self.positions // kernels.KEYS) * kernels.KEYS
        self.q = normal(self.positions, self.kv_heads * self.group, self.dk)
        self.k = normal(self.positions, self.kv_heads, self.dk)
        self.v = normal(self.positions, self.kv_heads, self.dv)
        self.scale = float(np.float32(self.dk**-0.5))
        kind = np.float16 if self.half else np.float32
        padded = -(-self.dv // 16) * 16
        self.keys = np.full((self.kv_heads, self.capacity * self.dk), np.nan, kind)
        self.values = np.full((self.kv_heads, self.capacity * padded), np.nan, kind)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """The cache as kernels are told of it."""
        addresses = (self.keys.ctypes.data, self.values.ctypes.data)
        return (*addresses, self.keys.strides[0], self.values.strides[0])

    def append(self, run, first: int, last: int) -> None:
        """Write the keys and values of positions [first, last)."""
        task = kernels.append_kv_f16 if self.half else kernels.append_kv_f32
        words: list[int] = []
        kept = []
        for rows in (self.k[first:last], self.v[first:last]):
            kept.append(np.concatenate([rows.ravel(), np.full(SLACK, np.nan, np.float32)]))
            words += [kept[-1].ctypes.data, 4 * rows[0].size]
        shape = (self.kv_heads, self.dk, self.dv, first)
        run(task, last - first, *words, *shape, *self.place, self.capacity)

    def attend(self, run, first: int, last: int, chunk: int = 1) -> np.ndarray:
        """Outputs [last - first, heads, dv] of these positions, which are in the cache."""
        q = self.q[first:last]
        out = np.full((len(q), self.kv_heads * self.group, self.dv), np.nan, np.float32)
        blocks = -(-len(q) * self.group // kernels.ROWS)
        words = (q.ctypes.data, q.strides[0], out.ctypes.data, out.strides[0], *self.place)
        shape = (self.group, self.dk, self.dv, len(q), first)
        task = kernels.attention_f16 if self.half else kernels.attention_f32
        sinks = 0 if self.sinks is None else self.sinks.ctypes.data
        more = (float_bits(self.scale), self.window, blocks, self.capacity, self.own_chunk, sinks)
        run(task, self.kv_heads * blocks, *words, *shape, *more, chunk=chunk)
        return out

    def oracle(self, first: int, last: int) -> np.ndarray:
        """float64, with keys and values rounded as the cache rounds them."""
        kind = np.float16 if self.half else np.float32
        q = self.q[first:last].reshape(last - first, self.kv_heads, self.group, self.dk)
        k, v = (rows[:last].astype(kind).astype(float) for rows in (self.k, self.v))
        scores = np.einsum("tkgd,nkd->tkgn", q.astype(float), k) * self.scale
        query, key = np.arange(first, last)[:, None], np.arange(last)
        visible = (key <= query) & (key > query - self.window)
        visible &= key // self.own_chunk == query // self.own_chunk
        scores[~np.broadcast_to(visible[:, None, None], scores.shape)] = -np.inf
        if self.sinks is not None:
            sinks = np.broadcast_to(
                self.sinks.astype(float).reshape(1, self.kv_heads, self.group, 1),
                (*scores.shape[:-1], 1),
            )
            scores = np.concatenate([scores, sinks], axis=-1)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        weights = weights[..., :last]
        return np.einsum("tkgn,nkd->tkgd", weights, v).reshape(last - first, -1, self.dv)

    def largest_score(self, last: int) -> float:
        lengths = [np.linalg.norm(rows[:last], axis=-1).max() for rows in (self.q, self.k)]
        return float(lengths[0] * lengths[1] * self.scale)

    def check(self, run, first: int, last: int) -> None:
        self.append(run, 0, last)
        error = np.abs(self.attend(run, first, last) - self.oracle(first, last)).max()
        # A weight is as exact as its score, which float32 rounds in proportion to its size.
        assert error <= 2**-24 * max(4.0, self.largest_score(last)) * np.abs(self.v).max()


KINDS = pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])


@KINDS
@pytest.mark.parametrize("size", [8, 16, 24, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8])
def test_heads(run, half: bool, size: int, group: int) -> None:
    Case(70, group, dk=size, dv=size, half=half).check(run, 0, 70)


@KINDS
@pytest.mark.parametrize(("dk", "dv"), [(24, 16), (16, 24), (192, 128), (8, 40), (576, 512)])
def test_values_of_another_size(run, half: bool, dk: int, dv: int) -> None:
    Case(40, dk=dk, dv=dv, half=half).check(run, 0, 40)


@KINDS
@pytest.mark.parametrize(
    ("first", "last"), [(0, 1), (0, 16), (15, 17), (63, 65), (100, 101), (129, 200), (1000, 1003)]
)
def test_start_offsets(run, half: bool, first: int, last: int) -> None:
    Case(last, half=half).check(run, first, last)


@KINDS
@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 150])
def test_windows(run, half: bool, window: int) -> None:
    Case(200, half=half, window=window).check(run, 0, 200)
    Case(200, half=half, window=window, group=1).check(run, 199, 200)


@KINDS
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_do_not_see_one_another(run, half: bool, chunk: int) -> None:
    Case(200, half=half, own_chunk=chunk).check(run, 0, 200)
    Case(200, half=half, own_chunk=chunk).check(run, 199, 200)


@KINDS
@pytest.mark.parametrize("window", [ALL, 20])
def test_sinks(run, half: bool, window: int) -> None:
    """One takes nearly all the weight, one next to nothing."""
    sinks = np.array([0.5, 8, -80, 0, 1, -1], np.float32)
    Case(100, half=half, window=window, sinks=sinks).check(run, 0, 100)


@KINDS
@pytest.mark.parametrize(("window", "own_chunk"), [(20, ALL), (ALL, 64)])
def test_ring_is_like_all_positions(run, half: bool, window: int, own_chunk: int) -> None:
    """What is overwritten is never looked at, nor what was there before."""
    visible = {"half": half, "window": window, "own_chunk": own_chunk}
    whole, ring = Case(500, **visible), Case(500, ring=128, **visible)
    whole.append(run, 0, 500)
    for first in range(0, 500, 60):
        last = min(500, first + 60)
        ring.append(run, first, last)
        expected = whole.attend(run, first, last)
        assert np.array_equal(ring.attend(run, first, last), expected)


@KINDS
@pytest.mark.parametrize("window", [ALL, 20])
@pytest.mark.parametrize("dv", [16, 40])
def test_decode_is_prefill(run, half: bool, window: int, dv: int) -> None:
    """Any split of the tokens gives the same bits, whatever is written later."""
    whole = Case(150, dv=dv, half=half, window=window)
    whole.append(run, 0, 150)
    expected = whole.attend(run, 0, 150)
    assert np.array_equal(whole.attend(run, 0, 150, chunk=3), expected)
    for size in (1, 7, 64):
        parts = Case(150, dv=dv, half=half, window=window)
        for first in range(0, 150, size):
            last = min(150, first + size)
            parts.append(run, first, last)
            assert np.array_equal(parts.attend(run, first, last), expected[first:last])
        assert np.array_equal(parts.keys, whole.keys, equal_nan=True)


def test_large_scores(run) -> None:
    """One key takes all the weight; the others underflow to nothing."""
    case = Case(100)
    case.q *= 1000
    case.check(run, 0, 100)
