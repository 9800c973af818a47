"""Weight kernels against gguf-py in float64, against ggml's bytes, and against themselves."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest

from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes
from colibri_mmap.runtime.kernels.registry import ACTIVATIONS, dequantise_task, weight_kernels
from colibri_mmap.runtime.simd import FORM, FORMS
from colibri_mmap.runtime.task import SCRATCH_BYTES, Task

QUANTISED = tuple(
    GGMLType[name]
    for name in ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "Q4_K", "Q5_K", "Q6_K"]
)
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
CASES = [(type, "exact") for type in FLOATS + QUANTISED] + [(type, "int8") for type in QUANTISED]
SCALE_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
DATA = Path(__file__).parents[1] / "data" / "types"


def aligned(nbytes: int) -> np.ndarray:
    buffer = np.full(nbytes + 64, 0xA5, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes]


SCRATCH = aligned(SCRATCH_BYTES)


def run(task: Task, units: int, *arguments: int, chunk: int | None = None) -> None:
    """What the pool does, on this thread."""
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(task.address)
    words = np.array(arguments, np.int64)
    for lo in range(0, units, chunk or units):
        call(words.ctypes.data, lo, min(units, lo + (chunk or units)), SCRATCH.ctypes.data)


def random_weights(type: GGMLType, rows: int, columns: int, rng: np.random.Generator) -> np.ndarray:
    """uint8 [rows, row bytes]: random bytes; scales of mixed size, zero and denormal among them."""
    if type in FLOATS:
        w = rng.standard_normal((rows, columns)).astype(np.float32)
        if type is GGMLType.F16:
            return w.astype(np.float16).view(np.uint8)
        return w.view(np.uint16)[:, 1::2].copy().view(np.uint8) if type == 30 else w.view(np.uint8)
    block, size = block_geometry(type)
    raw = rng.integers(0, 256, (rows * columns // block, size), np.uint8)
    if type is GGMLType.MXFP4:
        raw[:, 0] = rng.choice([0, 1, 2, 120, 121], len(raw), p=[0.01] * 3 + [0.485] * 2)
        return raw.reshape(rows, -1)
    for offset in SCALE_FIELDS.get(type.name, (0,)):
        scales = rng.uniform(0.2, 2, len(raw)) * rng.choice([1, -1], len(raw)) * 1e-3
        scales = scales.astype(np.float16)
        scales[rng.random(len(raw)) < 0.02] = 0
        scales[rng.random(len(raw)) < 0.02] = 3e-7
        raw[:, offset : offset + 2] = scales[:, None].view(np.uint8)
    return raw.reshape(rows, -1)


def dequantised(type: GGMLType, raw: np.ndarray) -> np.ndarray:
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(type)).astype(np.float64)


def rounded(name: str, x: np.ndarray) -> np.ndarray:
    """The activations as the kernels round them, float64."""
    if name == "f32":
        return x.astype(np.float64)
    blocks = x.reshape(len(x), -1, int(name.split("_")[1]))
    d = np.abs(blocks).max(axis=2, keepdims=True) / np.float32(127)
    q = np.rint(blocks / np.where(d > 0, d, np.float32(1)))
    return (q.astype(np.float64) * d).reshape(x.shape)


def pack(name: str, x: np.ndarray, lanes: bool, picked: np.ndarray | None = None) -> np.ndarray:
    """Records uint8 [n, record bytes] of x f32 [tokens, K]."""
    form, (tokens, columns) = ACTIVATIONS[name], x.shape
    tokens = tokens if picked is None else len(picked)
    units = -(-tokens // 16) if lanes else tokens
    nbytes = (form.lanes_bytes if lanes else form.column_bytes)(columns)
    out = aligned(units * nbytes).reshape(units, nbytes)
    source = (x.ctypes.data, x.strides[0], 0 if picked is None else picked.ctypes.data)
    if lanes:
        run(form.pack_lanes, units, *source, tokens, columns, out.ctypes.data, nbytes)
    else:
        run(form.pack_columns, units, *source, columns, out.ctypes.data, nbytes)
    return out


def multiply(
    type: GGMLType, mode: str, raw: np.ndarray, x: np.ndarray, lanes: bool, chunk: int | None = None
) -> np.ndarray:
    """y f32 [tokens, rows]."""
    kernels = weight_kernels(type, mode)
    assert kernels is not None
    rows, (tokens, columns) = len(raw), x.shape
    records = pack(kernels.activation, x, lanes)
    y = np.full((tokens + 1, rows + 5), np.nan, np.float32)
    run(
        kernels.matmul if lanes else kernels.matvec,
        rows,
        raw.ctypes.data,
        raw.strides[0],
        columns,
        records.ctypes.data,
        records.strides[0],
        tokens,
        y.ctypes.data,
        y.strides[0],
        chunk=chunk,
    )
    assert np.isnan(y[tokens]).all(), "a token too many was written"
    assert np.isnan(y[:, rows:]).all(), "a row too many was written"
    return y[:tokens, :rows]


def assert_close(type: GGMLType, mode: str, raw: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    kernels = weight_kernels(type, mode)
    assert kernels is not None
    w, v = dequantised(type, raw), rounded(kernels.activation, x)
    reference, size = v @ w.T, np.abs(v) @ np.abs(w.T)
    # Short rows are few terms: the rounding of the largest does not average out.
    allowed = (4e-8 if x.shape[1] >= 1024 else 2**-23) * size
    worst = np.max(np.abs(y - reference) / np.maximum(allowed, 1e-30))
    assert worst <= 1, f"{worst:.2f} times the allowed error"


def shapes(type: GGMLType) -> list[tuple[int, int]]:
    """(rows, columns), tails included."""
    return {
        1: [(7, 77), (35, 1040)],
        32: [(7, 96), (35, 1056)],
        256: [(7, 256), (35, 1280)],
    }[block_geometry(type)[0]]


def name_of(value: object) -> str:
    return getattr(value, "name", str(value))


@pytest.mark.parametrize(("type", "mode"), CASES, ids=name_of)
def test_products(type: GGMLType, mode: str) -> None:
    rng = np.random.default_rng(type)
    for rows, columns in shapes(type):
        raw = random_weights(type, rows, columns, rng)
        for tokens in (1, 2, 3, 5, 16, 17, 33, 64):
            x = rng.standard_normal((tokens, columns)).astype(np.float32)
            for lanes in (False, True):
                assert_close(type, mode, raw, x, multiply(type, mode, raw, x, lanes))


@pytest.mark.parametrize(("type", "mode"), CASES, ids=name_of)
def test_the_same_bits_however_the_work_is_cut(type: GGMLType, mode: str) -> None:
    rng = np.random.default_rng(100 + type)
    rows, columns = 35, shapes(type)[0][1]
    raw = random_weights(type, rows, columns, rng)
    x = rng.standard_normal((33, columns)).astype(np.float32)
    order = rng.permutation(len(x))
    for lanes in (False, True):
        whole = multiply(type, mode, raw, x, lanes)
        for chunk in (1, 3, 16, 32):
            assert np.array_equal(whole, multiply(type, mode, raw, x, lanes, chunk)), chunk
        assert np.array_equal(whole[order], multiply(type, mode, raw, x[order], lanes))
        assert np.array_equal(whole[20:21], multiply(type, mode, raw, x[20:21], lanes))


def test_long_rows_and_many_tokens_pass_the_scratch_limits() -> None:
    rng = np.random.default_rng(5)
    for type, mode, columns in ((GGMLType.Q8_0, "exact", 8224), (GGMLType.F16, "exact", 300)):
        raw = random_weights(type, 17, columns, rng)
        tokens = 2100 if type is GGMLType.F16 else 3
        x = rng.standard_normal((tokens, columns)).astype(np.float32)
        for lanes in (False, True):
            assert_close(type, mode, raw, x, multiply(type, mode, raw, x, lanes))


# ------------------------------------------------------------------ dequantisation
def dequantise(
    type: GGMLType, raw: np.ndarray, columns: int, picked: np.ndarray | None
) -> np.ndarray:
    task = dequantise_task(type)
    assert task is not None
    rows = len(raw) if picked is None else len(picked)
    out = np.full((rows, columns), np.nan, np.float32)
    index = 0 if picked is None else picked.ctypes.data
    where = (raw.ctypes.data, raw.strides[0], columns, out.ctypes.data, out.strides[0], index)
    run(task, rows, *where, chunk=2)
    return out


@pytest.mark.parametrize("type", [*QUANTISED, GGMLType.F16, GGMLType.BF16], ids=name_of)
def test_dequantise_equals_ggml(type: GGMLType) -> None:
    arrays = np.load(DATA / "types.npz")
    for part in ("", "_rand"):
        raw, expected = arrays[f"{type.name}{part}_q"], arrays[f"{type.name}{part}_deq"]
        if len(raw):
            y = dequantise(type, np.ascontiguousarray(raw), expected.shape[1], None)
            assert np.array_equal(y.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("type", QUANTISED + FLOATS, ids=name_of)
def test_dequantise_equals_gguf_on_any_bytes_and_gathers_rows(type: GGMLType) -> None:
    rng = np.random.default_rng(200 + type)
    columns = 77 if type in FLOATS else 512
    raw = rng.integers(0, 256, (40, row_bytes(type, columns)), np.uint8)
    picked = np.array([39, 0, 7, 7, 12], np.int64)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw[picked], gguf.GGMLQuantizationType(type))
    y = dequantise(type, raw, columns, picked)
    same = (y.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(y) & np.isnan(expected))
    assert same.all()


# ------------------------------------------------------------------ activations
def unpacked(name: str, records: np.ndarray, tokens: int, columns: int, lanes: bool) -> np.ndarray:
    """d * q of q8 records, float64 [tokens, columns], read back with numpy."""
    width = int(name.split("_")[1])
    if lanes and width == 256:
        records = records.reshape(len(records), -1, 5184)
        groups, d = records[:, :, :5120].reshape(len(records), -1, 640), records[:, :, 5120:]
        d = d.copy().view(np.float32).reshape(len(records), -1, 16)
    elif lanes:
        groups = records.reshape(len(records), -1, 640)
        d = groups[:, :, 576:].copy().view(np.float32).reshape(len(records), -1, 16)
    if lanes:
        q = groups[:, :, :512].copy().view(np.int8).reshape(len(records), -1, 8, 16, 4)
        q = q.transpose(0, 3, 1, 2, 4).reshape(-1, columns)
        d = d.transpose(0, 2, 1).reshape(len(q), -1)
    elif width == 256:
        blocks = records.reshape(tokens, -1, 320)
        q = blocks[:, :, :256].copy().view(np.int8).reshape(tokens, -1)
        d = blocks[:, :, 288:292].copy().view(np.float32)[:, :, 0]
    else:
        blocks = records.reshape(tokens, -1, 256)
        q = blocks[:, :, :128].copy().view(np.int8).reshape(tokens, -1, 2, 4, 16)
        q = q.transpose(0, 1, 3, 2, 4).reshape(tokens, -1)[:, :columns]
        d = blocks[:, :, 192:208].copy().view(np.float32).reshape(tokens, -1)
    d = np.repeat(d[:, : columns // width].astype(np.float64), width, axis=1)
    return (q * d)[:tokens]


@pytest.mark.parametrize("name", ["q8_32", "q8_256"])
@pytest.mark.parametrize("lanes", [False, True], ids=("columns", "lanes"))
def test_activations_are_rounded_alike_in_both_forms(name: str, lanes: bool) -> None:
    rng = np.random.default_rng(3)
    columns = 512 + (160 if name == "q8_32" else 0)
    x = rng.standard_normal((19, columns)).astype(np.float32)
    x[1] = 0
    x[2] *= np.float32(1e-42)  # denormal
    x[3, ::2] = 127 * np.round(x[3, ::2])
    x[3, 1::2] = 0.5 * np.round(9 * x[3, 1::2])  # ties
    x[3, ::32] = 127
    picked = np.array([18, 3, 3, 0, 1, 2], np.int64)
    for tokens in (None, picked):
        source = x if tokens is None else x[tokens]
        records = pack(name, x, lanes, tokens)
        found = unpacked(name, records, len(source), columns, lanes)
        expected = rounded(name, source)
        normal = np.abs(source).max(axis=1) > 1e-37
        assert np.array_equal(found[normal], expected[normal])
        assert np.abs(found - source).max() <= np.abs(source).max() / 127


@pytest.mark.parametrize("type", [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.F32], ids=name_of)
def test_infinities_and_nans_only_spoil_their_own_token(type: GGMLType) -> None:
    rng = np.random.default_rng(4)
    raw = random_weights(type, 16, 512, rng)
    x = rng.standard_normal((18, 512)).astype(np.float32)
    expected = [multiply(type, "int8", raw, x, lanes) for lanes in (False, True)]
    x[5, 100], x[9, 3], x[11, 7] = np.nan, np.inf, -np.inf
    fine = np.setdiff1d(np.arange(18), (5, 9, 11))
    for lanes in (False, True):
        assert np.array_equal(multiply(type, "int8", raw, x, lanes)[fine], expected[lanes][fine])


# ------------------------------------------------------------------ memory
@pytest.mark.parametrize(("type", "mode"), CASES, ids=name_of)
def test_nothing_is_read_past_the_end_of_the_weights(type: GGMLType, mode: str) -> None:
    """The matrix ends where an unreadable page begins: a byte too many ends the process."""
    rng = np.random.default_rng(6)
    for rows, columns in ((3, shapes(type)[0][1]), (16, shapes(type)[0][1])):
        raw = random_weights(type, rows, columns, rng)
        pages = -(-raw.size // mmap.PAGESIZE) * mmap.PAGESIZE
        area = mmap.mmap(-1, pages + mmap.PAGESIZE)
        everything = np.frombuffer(area, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        guard = ctypes.c_void_p(everything.ctypes.data + pages)
        assert libc.mprotect(guard, mmap.PAGESIZE, 0) == 0
        placed = everything[pages - raw.size : pages].reshape(raw.shape)
        placed[:] = raw
        x = rng.standard_normal((3, columns)).astype(np.float32)
        for lanes in (False, True):
            expected = multiply(type, mode, raw, x, lanes)
            assert np.array_equal(multiply(type, mode, placed, x, lanes), expected)
        assert np.array_equal(
            dequantise(type, placed, columns, None), dequantise(type, raw, columns, None)
        )
        assert libc.mprotect(guard, mmap.PAGESIZE, 3) == 0


# ------------------------------------------------------------------ instruction sets
def digest(types: list[GGMLType]) -> str:
    """A hash of products in both modes, for comparison between processes."""
    rng, result = np.random.default_rng(8), hashlib.sha256()
    for type in types:
        columns = 256 + (block_geometry(type)[0] % 256)
        raw = random_weights(type, 9, columns, rng)
        x = rng.standard_normal((5, columns)).astype(np.float32)
        for lanes in (False, True):
            result.update(multiply(type, "int8", raw, x, lanes).tobytes())
    return result.hexdigest()


def assert_same_in(form: str, types: list[GGMLType]) -> None:
    script = (
        "import sys; from test_kernels import GGMLType, digest;"
        "print(digest([GGMLType[name] for name in sys.argv[1:]]))"
    )
    here = Path(__file__).parent
    environment = os.environ | {
        "COLIBRI_SIMD": form,
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parents[1])]),
    }
    names = [type.name for type in types]
    done = subprocess.run(
        [sys.executable, "-c", script, *names],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest(types)


LOWER_FORMS = FORMS[FORMS.index(FORM) + 1 :]


@pytest.mark.parametrize("form", LOWER_FORMS)
def test_every_instruction_set_gives_the_same_bits(form: str) -> None:
    assert_same_in(form, [GGMLType.Q4_K, GGMLType.Q8_0, GGMLType.MXFP4])


@pytest.mark.slow
@pytest.mark.parametrize("form", LOWER_FORMS)
def test_every_instruction_set_gives_the_same_bits_for_every_type(form: str) -> None:
    assert_same_in(form, [*QUANTISED, *FLOATS])
