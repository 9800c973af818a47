"""Weight kernels against ggml on the same mapped bytes, paired and interleaved.

    python bench/kernels.py --peer-python /path/to/venv/bin/python [--only Q4_K] [--seconds 10]

Each sample multiplies one window of matrices (about 12 MB) of a file larger than the L3 cache, by
ours and by ggml in turn, so that a noisy machine hits both. Both sides include the rounding of the
activations. The peer is the ggml inside llama-cpp-python, called through ctypes; it computes on the
mapped bytes, without repacking.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes
from colibri_mmap.runtime.kernels.registry import ACTIVATIONS, weight_kernels
from colibri_mmap.runtime.pool import Launch, Pool, job

WINDOW = 12 << 20
FILE = 640 << 20
SCALE_FIELDS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}


@dataclass(frozen=True, slots=True)
class Case:
    type: GGMLType
    rows: int
    columns: int
    tokens: int


def cases() -> list[Case]:
    """Mat-vec of decoding, small batches of experts, prompts."""
    experts = [GGMLType.Q4_K, GGMLType.Q6_K, GGMLType.Q8_0, GGMLType.Q4_0]
    rest = [GGMLType.Q5_K, GGMLType.Q4_1, GGMLType.Q5_0, GGMLType.Q5_1, GGMLType.F16, GGMLType.BF16]
    found = [Case(type, 4096, 4096, 1) for type in experts + rest]
    found += [Case(type, *shape, 1) for type in experts for shape in ((768, 2048), (2048, 768))]
    found += [Case(GGMLType.Q4_1, *shape, 1) for shape in ((1536, 576), (576, 1536))]
    found += [Case(GGMLType.F32, 128, 2048, 1)]
    for tokens in (2, 4, 8, 16, 32, 64):
        found += [Case(type, 768, 2048, tokens) for type in experts]
    found += [Case(type, 2048, 2048, 512) for type in [*experts, GGMLType.Q4_1, GGMLType.F16]]
    return found


def write_blocks(path: Path, type: GGMLType) -> None:
    """Random blocks with finite scales."""
    block, size = block_geometry(type)
    rng = np.random.default_rng(1)
    unit = 1 << 20
    if block == 1:
        values = rng.standard_normal(unit).astype(np.float32)
        if type is GGMLType.F16:
            raw = values.astype(np.float16).tobytes()
        elif type is GGMLType.BF16:
            raw = values.view(np.uint16)[1::2].tobytes()
        else:
            raw = values.tobytes()
    else:
        blocks = rng.integers(0, 256, (unit // block, size), np.uint8)
        for offset in SCALE_FIELDS.get(type.name, (0,)):
            scales = rng.uniform(1e-4, 1e-3, len(blocks)).astype(np.float16)
            blocks[:, offset : offset + 2] = scales[:, None].view(np.uint8)
        raw = blocks.tobytes()
    with path.open("wb") as file:
        for _ in range(-(-FILE // len(raw))):
            file.write(raw)


def clock_for(threads: int) -> Callable[[], float]:
    """Wall time; with one thread its CPU time, which other load on the machine moves less."""
    return time.perf_counter if threads > 1 else time.thread_time


class Peer:
    """ggml's matrix product as a graph of `ggml_mul_mat` nodes over given addresses."""

    DATA_OFFSET = 248  # of `data` in struct ggml_tensor

    def __init__(self, python: str, threads: int) -> None:
        where = subprocess.run(
            [python, "-c", "import llama_cpp; print(llama_cpp.__path__[0])"],
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        base = ctypes.CDLL(f"{where}/lib/libggml-base.so", ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(f"{where}/lib/libggml-cpu.so", ctypes.RTLD_GLOBAL)
        pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64

        class Parameters(ctypes.Structure):
            _fields_ = [("size", size), ("buffer", pointer), ("no_alloc", ctypes.c_bool)]

        self.parameters, self.threads, self.base, self.cpu = Parameters, threads, base, cpu
        self.clock = clock_for(threads)
        base.ggml_init.argtypes, base.ggml_init.restype = [Parameters], pointer
        base.ggml_new_tensor_2d.argtypes = [pointer, ctypes.c_int, integer, integer]
        base.ggml_mul_mat.argtypes = [pointer] * 3
        base.ggml_new_graph_custom.argtypes = [pointer, size, ctypes.c_bool]
        base.ggml_build_forward_expand.argtypes = [pointer] * 2
        base.ggml_free.argtypes = [pointer]
        base.ggml_get_data.argtypes, base.ggml_get_data.restype = [pointer], pointer
        for name in ("ggml_new_tensor_2d", "ggml_mul_mat", "ggml_new_graph_custom"):
            getattr(base, name).restype = pointer
        cpu.ggml_graph_compute_with_ctx.argtypes = [pointer, pointer, ctypes.c_int]
        cpu.ggml_cpu_init()

    def _place(self, tensor: int, address: int) -> int:
        ctypes.c_void_p.from_address(tensor + self.DATA_OFFSET).value = address
        assert self.base.ggml_get_data(tensor) == address
        return tensor

    def product(self, case: Case, matrices: list[int], x: int, y: int) -> float:
        """Seconds to multiply every matrix by x f32 [tokens, columns]."""
        base, nodes = self.base, len(matrices) + 8
        context = base.ggml_init(self.parameters((1 << 26) + 4096 * nodes, None, True))
        graph = base.ggml_new_graph_custom(context, nodes, False)
        vectors = base.ggml_new_tensor_2d(context, GGMLType.F32, case.columns, case.tokens)
        self._place(vectors, x)
        for address in matrices:
            matrix = base.ggml_new_tensor_2d(context, case.type, case.columns, case.rows)
            result = base.ggml_mul_mat(context, self._place(matrix, address), vectors)
            base.ggml_build_forward_expand(graph, self._place(result, y))
        start = self.clock()
        self.cpu.ggml_graph_compute_with_ctx(context, graph, self.threads)
        seconds = self.clock() - start
        base.ggml_free(context)
        return seconds


class Ours:
    """The same products as launches of the pool."""

    def __init__(self, threads: int) -> None:
        self.pool = Pool(threads)
        self.clock = clock_for(threads)

    def prepare(
        self, case: Case, matrices: list[int], x: int, y: int
    ) -> tuple[Launch, np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        """The launch, and the memory of its activation records."""
        kernels = weight_kernels(case.type, "int8")
        assert kernels is not None
        form, lanes = ACTIVATIONS[kernels.activation], case.tokens > kernels.columns_limit
        stride = (form.lanes_bytes if lanes else form.column_bytes)(case.columns)
        units = -(-case.tokens // 16) if lanes else case.tokens
        records = np.zeros(units * stride + 64, np.uint8)
        at = -(-records.ctypes.data // 64) * 64
        source = (x, 4 * case.columns, 0)
        if lanes:
            packing = job(form.pack_lanes, units, 1, *source, case.tokens, case.columns, at, stride)
        else:
            packing = job(form.pack_columns, units, 1, *source, case.columns, at, stride)
        task, width = (
            kernels.matmul if lanes else kernels.matvec,
            row_bytes(case.type, case.columns),
        )
        chunk = 64 if case.rows > 128 else 16
        rest = (width, case.columns, at, stride, case.tokens, y, 4 * case.rows)
        phases = []
        for matrix in matrices:
            phases += [[packing], [job(task, case.rows, chunk, matrix, *rest)]]
        return Launch(phases), records

    def run(self, launch: Launch) -> float:
        start = self.clock()
        self.pool.run(launch)
        return self.clock() - start


def measure(case: Case, ours: Ours, peer: Peer, base: int, seconds: float) -> str:
    """One line of the table."""
    nbytes = case.rows * row_bytes(case.type, case.columns)
    budget = WINDOW if case.tokens == 1 else max(nbytes, WINDOW // case.tokens)
    per_window = max(1, budget // nbytes)
    windows = FILE // (per_window * nbytes)
    x = np.random.default_rng(2).standard_normal((case.tokens, case.columns)).astype(np.float32)
    y, z = (np.zeros((case.tokens, case.rows), np.float32) for _ in range(2))
    launches = {}

    def addresses(index: int) -> list[int]:
        first = base + (index % windows) * per_window * nbytes
        return [first + i * nbytes for i in range(per_window)]

    def launch(index: int) -> Launch:
        key = index % windows
        if key not in launches:
            launches[key] = ours.prepare(case, addresses(key), x.ctypes.data, y.ctypes.data)
        return launches[key][0]

    ours.run(launch(0))
    peer.product(case, addresses(0), x.ctypes.data, z.ctypes.data)
    error = np.abs(y - z).max() / np.abs(z).max()
    assert error < 0.02, f"{case}: the two differ by {error:.3f}"
    times: list[tuple[float, float]] = []
    stop, index = time.monotonic() + seconds, 0
    while time.monotonic() < stop or len(times) < 5:
        first, second = launch(index), addresses(index + 1)
        times.append((ours.run(first), peer.product(case, second, x.ctypes.data, z.ctypes.data)))
        index += 2 if index % 4 else 3  # neither side sees the same windows every time
    ratios = sorted(theirs / own for own, theirs in times)
    own, theirs = (statistics.median(side) for side in zip(*times, strict=True))
    work = per_window * nbytes
    gbs = [work / t / 1e9 for t in (own, theirs)]
    gops = [2e-9 * per_window * case.rows * case.columns * case.tokens / t for t in (own, theirs)]
    low, middle, high = (ratios[int(q * (len(ratios) - 1))] for q in (0.1, 0.5, 0.9))
    shape = f"{case.rows}x{case.columns}"
    return (
        f"| {case.type.name} | {shape} | {case.tokens} | {gbs[0]:.1f} | {gbs[1]:.1f} | "
        f"{gops[0]:.0f} | {gops[1]:.0f} | {middle:.2f} | {low:.2f}-{high:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peer-python", required=True, help="python that has llama-cpp-python")
    parser.add_argument("--only", default="", help="types to measure, separated by commas")
    parser.add_argument("--tokens", type=int, help="only cases of this many tokens")
    parser.add_argument("--seconds", type=float, default=4.0, help="per case")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    ours, peer = Ours(options.threads), Peer(options.peer_python, options.threads)
    print("| type | rows x K | tokens | GB/s | ggml | Gop/s | ggml | ratio | 10-90 % |")
    print("|---|---|---|---|---|---|---|---|---|")
    wanted = [
        case for case in cases() if not options.only or case.type.name in options.only.split(",")
    ]
    with tempfile.TemporaryDirectory() as directory:
        for type in dict.fromkeys(case.type for case in wanted):
            path = Path(directory) / type.name
            write_blocks(path, type)
            with (
                path.open("rb") as file,
                mmap.mmap(
                    file.fileno(), 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ
                ) as mapped,
            ):
                view = np.frombuffer(mapped, np.uint8)
                for case in wanted:
                    if case.type is type and options.tokens in (None, case.tokens):
                        print(
                            measure(case, ours, peer, view.ctypes.data, options.seconds), flush=True
                        )
                del view
            path.unlink()


if __name__ == "__main__":
    main()
