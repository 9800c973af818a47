"""Attention over latents, the indexer's selection and products by head, against numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes
from colibri_mmap.runtime.arena import Rows
from colibri_mmap.runtime.kernels import indexer, latent
from colibri_mmap.runtime.ops import Ops, float_bits
from colibri_mmap.runtime.pool import Pool
from colibri_mmap.runtime.weights import Matrix

KINDS = pytest.mark.parametrize("half", [False, True], ids=["f32", "f16"])


@dataclass
class Case:
    """Latents of `positions`, and queries of `heads` each; the cache starts as NaN."""

    positions: int
    heads: int = 4
    rank: int = 32
    rotated: int = 16
    half: bool = False
    seed: int = 1
    size: int = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(self.seed)
        self.size = self.rank + self.rotated
        self.latents = random.standard_normal((self.positions, self.size), np.float32)
        self.q = random.standard_normal((self.positions, self.heads, self.size), np.float32)
        self.scale = float(np.float32(self.size**-0.5))
        self.kind = np.float16 if self.half else np.float32
        self.cache = np.full((self.positions, -(-self.size // 16) * 16), np.nan, self.kind)

    def append(self, run, first: int, last: int) -> None:
        task = latent.append_latent_f16 if self.half else latent.append_latent_f32
        rows = self.latents[first:last].copy()
        words = (first, rows.ctypes.data, rows.strides[0], self.size, self.cache.ctypes.data)
        run(task, last - first, *words)

    def attend(self, run, first: int, last: int, index: np.ndarray | None = None, chunk: int = 1):
        """Outputs [tokens, heads, rank]; `index` int32 [tokens, chosen]."""
        compressed = self.q[first:last, :, : self.rank].copy()
        rotary = self.q[first:last, :, self.rank :].copy()
        out = np.full_like(compressed, np.nan)
        words = [first, compressed.ctypes.data, compressed.strides[0], rotary.ctypes.data]
        words += [*rotary.strides[:2], out.ctypes.data, out.strides[0]]
        words += [self.cache.ctypes.data, self.heads, self.rank, self.rotated]
        chosen = (0, 0) if index is None else (index.ctypes.data, index.shape[1])
        task = latent.attend_latent_f16 if self.half else latent.attend_latent_f32
        units = (last - first) * -(-self.heads // latent.HEADS)
        run(task, units, *words, *chosen, float_bits(self.scale), chunk=chunk)
        return out

    def oracle(self, first: int, last: int, index: np.ndarray | None = None) -> np.ndarray:
        latents = self.latents.astype(self.kind).astype(float)
        out = np.empty((last - first, self.heads, self.rank))
        for t in range(first, last):
            seen = np.arange(t + 1) if index is None else index[t - first][: t + 1]
            scores = self.q[t].astype(float) @ latents[seen].T * self.scale
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out[t - first] = weights @ latents[seen, : self.rank]
        return out

    def check(self, got: np.ndarray, first: int, last: int, index: np.ndarray | None = None):
        """A weight is as exact as its score, which float32 rounds in proportion to its size."""
        lengths = [np.linalg.norm(a, axis=-1).max() for a in (self.q, self.latents)]
        score = max(4.0, lengths[0] * lengths[1] * self.scale)
        error = np.abs(got - self.oracle(first, last, index)).max()
        assert error <= 2**-24 * score * np.abs(self.latents).max()


@KINDS
@pytest.mark.parametrize(
    ("heads", "rank", "rotated"),
    [(1, 16, 8), (4, 32, 8), (16, 16, 16), (20, 24, 8), (64, 128, 32), (33, 512, 64)],
)
def test_sizes(run, half: bool, heads: int, rank: int, rotated: int) -> None:
    case = Case(70, heads, rank, rotated, half)
    case.append(run, 0, 70)
    case.check(case.attend(run, 0, 70), 0, 70)


@KINDS
@pytest.mark.parametrize(("first", "last"), [(0, 1), (62, 66), (127, 130), (1000, 1003)])
def test_start_offsets(run, half: bool, first: int, last: int) -> None:
    case = Case(last, half=half)
    case.append(run, 0, last)
    case.check(case.attend(run, first, last), first, last)


@KINDS
@pytest.mark.parametrize("chosen", [1, 16, 100])
def test_only_the_chosen_keys_count(run, half: bool, chosen: int) -> None:
    case = Case(150, half=half)
    case.append(run, 0, 150)
    random = np.random.default_rng(2)
    index = np.zeros((150, chosen), np.int32)
    for t in range(150):
        seen = min(t + 1, chosen)
        index[t, :seen] = np.sort(random.permutation(t + 1)[:seen])
    got = case.attend(run, 0, 150, index)
    case.check(got, 0, 150, index)
    assert np.array_equal(case.attend(run, 149, 150, index[149:]), got[149:])


@KINDS
def test_any_split_gives_the_same_bits(run, half: bool) -> None:
    whole = Case(150, 20, half=half)
    whole.append(run, 0, 150)
    expected = whole.attend(run, 0, 150)
    assert np.array_equal(whole.attend(run, 0, 150, chunk=3), expected)
    parts = Case(150, 20, half=half)
    for first in range(0, 150, 7):
        last = min(150, first + 7)
        parts.append(run, first, last)
        assert np.array_equal(parts.attend(run, first, last), expected[first:last])
    assert np.array_equal(parts.cache, whole.cache)


def test_what_fits_into_scratch() -> None:
    assert latent.fits(512, 64)
    assert not latent.fits(1024, 64)


# ------------------------------------------------------------------------------ the indexer
@dataclass
class Indexer:
    """Keys and queries of `positions`; scores by the kernel, or in float64."""

    positions: int
    heads: int = 4
    size: int = 64
    half: bool = False

    def __post_init__(self) -> None:
        random = np.random.default_rng(3)
        self.keys = random.standard_normal((self.positions, self.size), np.float32)
        self.q = random.standard_normal((self.positions, self.heads, self.size), np.float32)
        self.weights = random.standard_normal((self.positions, self.heads), np.float32)
        self.kind = np.float16 if self.half else np.float32
        groups = -(-self.positions // 16)
        self.cache = np.zeros((groups, self.size, 16), self.kind)

    def append(self, run) -> None:
        task = indexer.append_index_keys_f16 if self.half else indexer.append_index_keys_f32
        words = (self.keys.ctypes.data, self.keys.strides[0], self.size, self.cache.ctypes.data)
        run(task, self.positions, 0, *words)

    def score(self, run, first: int, chosen: int, parts: int) -> np.ndarray:
        count = self.positions - first
        scores = np.full((count, self.cache.shape[0] * 16), np.nan, np.float32)
        words = [first]
        for a in (self.q[first:], self.weights[first:]):
            words += [a.ctypes.data, a.strides[0]]
        words += [self.cache.ctypes.data, self.heads, self.size]
        words += [scores.ctypes.data, scores.strides[0], chosen, parts]
        task = indexer.score_keys_f16 if self.half else indexer.score_keys_f32
        run(task, count * parts, *words)
        return scores

    def oracle(self, t: int) -> np.ndarray:
        keys = self.keys[: t + 1].astype(self.kind).astype(float)
        return self.weights[t].astype(float) @ np.maximum(self.q[t].astype(float) @ keys.T, 0)


@KINDS
@pytest.mark.parametrize(("heads", "size"), [(1, 64), (4, 64), (8, 128), (13, 32), (32, 128)])
def test_scores(run, half: bool, heads: int, size: int) -> None:
    case = Indexer(100, heads, size, half)
    case.append(run)
    scores = case.score(run, 40, chosen=16, parts=3)
    for t in range(40, 100):
        expected = case.oracle(t)
        assert np.abs(scores[t - 40, : t + 1] - expected).max() < 1e-5 * heads * size**0.5


def test_who_sees_few_keys_gets_no_scores(run) -> None:
    scores = Indexer(40).score(run, 0, chosen=20, parts=4)
    assert np.isnan(scores[:20]).all()
    assert not np.isnan(scores[20, :21]).any()


def select(run, scores: np.ndarray, position: int, chosen: int) -> np.ndarray:
    index = np.full((len(scores), chosen), -1, np.int32)
    words = (position, scores.ctypes.data, scores.strides[0], chosen, index.ctypes.data)
    run(indexer.select_keys, len(scores), *words)
    return index


@pytest.mark.parametrize("chosen", [1, 7, 64, 511])
def test_selection_is_exact_and_ties_go_to_the_lower_position(run, chosen: int) -> None:
    random = np.random.default_rng(4)
    scores = random.standard_normal((6, 512), np.float32)
    scores[1] = np.round(scores[1])
    scores[2] = np.maximum(scores[2], 0)
    scores[3] = 0
    scores[4] = np.abs(scores[4]) * -1e-40
    scores[5, ::3] = np.inf
    index = select(run, scores, 506, chosen)
    for t in range(6):
        visible = 507 + t
        order = np.argsort(-scores[t, :visible], kind="stable")[:chosen]
        assert np.array_equal(index[t, : min(chosen, visible)], np.sort(order))


def test_few_keys_are_all_selected(run) -> None:
    index = select(run, np.full((3, 16), np.nan, np.float32), 0, 4)
    assert index.tolist() == [[0, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, -1]]


# ------------------------------------------------------------------------------ by head
@pytest.mark.parametrize("kind", [GGMLType.F32, GGMLType.F16, GGMLType.Q8_0, GGMLType.IQ4_XS])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_products_by_head(kind: GGMLType, tokens: int) -> None:
    """The first values of each head times its matrix, kernels for the type or not."""
    heads, rows, columns, size = 3, 20, 256, 280
    random = np.random.default_rng(5)
    data = random.integers(0, 255, (heads * rows, row_bytes(kind, columns)), np.uint8)
    if kind in (GGMLType.F32, GGMLType.F16):
        values = random.standard_normal((heads * rows, columns), np.float32)
        data = values.astype(np.float16 if kind == GGMLType.F16 else np.float32).view(np.uint8)
    else:  # a scale that is a number
        blocks = data.reshape(-1, block_geometry(kind)[1])
        blocks[:, :2] = np.full(len(blocks), 0.01, np.float16).view(np.uint8).reshape(-1, 2)
    whole = Matrix(data.ctypes.data, kind, heads * rows, columns, data.strides[0])
    matrices = [whole.part(rows * head, rows) for head in range(heads)]
    x = random.standard_normal((tokens, heads, size), np.float32)
    pool = Pool(2)
    ops = Ops(pool, "exact")
    source = Rows(ops.arena.copy_in(x), tokens, heads * size)
    got = [ops.numpy(ops.head_linear(source, matrices)) for _ in range(2)]
    pool.close()
    weights = whole.floats().reshape(heads, rows, columns).astype(float)
    expected = np.einsum("thc,hrc->thr", x[:, :, :columns], weights).reshape(tokens, -1)
    assert np.abs(got[0] - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.array_equal(*got)
