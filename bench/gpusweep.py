"""Which form and which grid of the expert products suits this GPU.

    python bench/gpusweep.py [--quick] [--types Q4_K,Q6_K] [--seconds 0.01]

A row is a form of the CUDA text, in which something is replaced; its cells are GB/s of weights, one
for each grid: warps of a block and warps wanted in a launch, as devicekernels.py has them. --quick
tries two grids and takes about half a minute.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpu import MODELS, TYPES, Card, Layers
from gpucopy import copy_rate

from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime import devicekernels
from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules
from colibri_mmap.runtime.device import Dimensions
from colibri_mmap.runtime.devicekernels import ExpertShape

GRIDS = tuple(itertools.product((4, 8), (1024, 2048, 4096, 8192, 16384)))
QUICK_GRIDS = ((4, 2048), (4, 4096))
QUICK_TYPES = "Q4_K,Q6_K,Q8_0,Q4_0"
COUNTS = (1, 4, 8)

_LOADS = """#pragma unroll
        for (int r = 0; r < ROWS_; r++)
            if (i < units) load_unit<T>(row[r], i, raw[r]);
"""
_UNPACKING = "T::unpack(raw[r], part, unit[r]);\n"
_NEXT_ENTRY = (
    "        if (after < all) load_entry<T>(downs + start, row_bytes, first, rows, units,"
    " reciprocal, after, next);\n"
)
_END_OF_ENTRY = "        i = after;\n    }\n    for (int e = start"

Changes = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Form:
    """Replacements in the text, and what of devicekernels.py goes with them."""

    name: str
    changes: Changes = ()
    constants: dict[str, Any] = field(default_factory=dict)
    counts: tuple[int, ...] = COUNTS  # of tokens
    halves: tuple[int, ...] = (0, 1)  # that it changes: gate and up, down


_tiling = devicekernels._tiling


def _tiling_of_pairs(
    type: GGMLType, columns: int, row_groups: int, others: int
) -> tuple[int, Dimensions]:
    return _tiling(type, columns, -(-row_groups // 2), others)


EARLY: Changes = (  # loads as soon as what they load over is unpacked
    ("        i += blockDim.y * WARP;\n" + _LOADS, "        i = after;\n"),
    ("u32 part = i % T::PARTS;", "u32 part = i % T::PARTS, after = i + blockDim.y * WARP;"),
    (_UNPACKING, _UNPACKING + _LOADS.replace("(i <", "(after <").replace(", i,", ", after,")),
)
LATE: Changes = (
    (_NEXT_ENTRY, ""),
    (_END_OF_ENTRY, _NEXT_ENTRY + _END_OF_ENTRY),
)
ONE_BY_ONE: Changes = (("#pragma unroll 2\n    while", "#pragma unroll 1\n    while"),)
TWO_PAIRS: Changes = (
    ("int group = blockIdx.y, r = first_row(1);", "int group = blockIdx.y, first = first_row(2);"),
    (
        "    u64 start = min(r, rows - 1) * bytes_of_row<T>(columns);\n",
        "    u64 row_bytes = bytes_of_row<T>(columns);\n"
        "    u64 start = min(first, rows - 1) * row_bytes;\n"
        "    u64 other = min(first + 1, rows - 1) * row_bytes;\n",
    ),
    ("const u8* const row[2] = {", "const u8* const row[4] = {"),
    (
        "(const u8*)fetch<u64>(ups + group) + start};\n    typename T::Raw raw[2];",
        "(const u8*)fetch<u64>(ups + group) + start, (const u8*)fetch<u64>(gates + group) + other,"
        "(const u8*)fetch<u64>(ups + group) + other};\n    typename T::Raw raw[4];",
    ),
    ("float sums[2 * N] = {};", "float sums[4 * N] = {};"),
    ("accumulate<T, 2, N>(", "accumulate<T, 4, N>("),
    (
        "    if (!writes() || r >= rows) return;\n",
        "    if (!writes()) return;\n#pragma unroll\n    for (int k = 0; k < 2; k++) {\n"
        "    int r = first + k;\n    if (r >= rows) return;\n",
    ),
    (
        "activate(sums[j] + gate_bias, sums[N + j] + up_bias, activation);\n",
        "activate(sums[2 * k * N + j] + gate_bias,"
        " sums[2 * k * N + N + j] + up_bias, activation);\n    }\n",
    ),
)
FOUR_ROWS: Changes = (("#define ROWS 2", "#define ROWS 4"),)


def _together(columns: int) -> Changes:
    return (("#define COLUMNS_AT_ONCE 2", f"#define COLUMNS_AT_ONCE {columns}"),)


FORMS = (
    Form("as it is"),
    Form("early", EARLY, halves=(0,)),
    Form("late", LATE, counts=(1,), halves=(1,)),
    Form("one by one", ONE_BY_ONE),
    Form("rows 4", FOUR_ROWS, {"_ROWS": 4}, halves=(1,)),
    Form("rows 4 late", FOUR_ROWS + LATE, {"_ROWS": 4}, counts=(1,), halves=(1,)),
    Form("pairs 2", TWO_PAIRS, {"_tiling": _tiling_of_pairs}, halves=(0,)),
    Form("columns 1", _together(1), counts=(4, 8)),
    Form("columns 4", _together(4), counts=(4, 8)),
    Form("columns 8", _together(8), counts=(4, 8)),
)


def modules(type: GGMLType, form: Form) -> list[CudaModule]:
    """All modules; the products of a type in a form."""
    found = []
    for module in cuda_modules().values():
        source = module.source
        if module.name == f"experts_{type.name.lower()}":
            for old, new in form.changes:
                assert source.count(old) == 1 or "unroll" in old, (form.name, old)
                source = source.replace(old, new)
        found.append(replace(module, source=source))
    return found


def compile_form(type: GGMLType, form: Form) -> None:
    """Keep the machine code of a form for processes that come."""
    from colibri_mmap.runtime.cuda import open_cuda

    device: Any = open_cuda(modules(type, form))
    device.prepare([f"down_weighted_{type.name.lower()}"])
    device.close()


def compile_all(types: list[GGMLType]) -> None:
    """Every form, on all of the machine's cores."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=spawn) as pool:
        work = [pool.submit(compile_form, *each) for each in itertools.product(types, FORMS)]
        for each in work:
            each.result()


@contextmanager
def constants(form: Form, grid: tuple[int, int]) -> Iterator[None]:
    """devicekernels.py with other constants."""
    changed = {"_WARPS_PER_BLOCK": grid[0], "_WARPS_WANTED": grid[1]} | form.constants
    before = {name: getattr(devicekernels, name) for name in changed}
    for name, value in changed.items():
        setattr(devicekernels, name, value)
    yield
    for name, value in before.items():
        setattr(devicekernels, name, value)


def show(
    card: Card,
    layers: Layers,
    form: Form,
    grids: tuple[tuple[int, int], ...],
    title: str,
    seconds: float,
) -> None:
    """The rows of a form."""
    layers.card = card
    for half in form.halves:
        cells = []
        for grid in grids:
            with constants(form, grid):
                work = partial(layers.run, half == 0, half == 1)
                cells.append(f"{layers.nbytes[half] / card.seconds(work, seconds) / 1e9:5.0f}")
        print(
            f"{title} {form.name:12s} {('gate_up', 'down')[half]:7s} {' '.join(cells)}", flush=True
        )


def main() -> None:
    from colibri_mmap.runtime.cuda import open_cuda

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default="")
    parser.add_argument("--seconds", type=float, default=0.004)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    start = time.perf_counter()
    names = options.types or (QUICK_TYPES if options.quick else ",".join(t.name for t in TYPES))
    types = [GGMLType[name] for name in names.split(",")]
    grids = QUICK_GRIDS if options.quick else GRIDS
    device: Any = open_cuda(cuda_modules().values())
    if isinstance(device, str):
        raise SystemExit(f"no GPU: {device}")
    compile_all(types)
    card = Card(device)
    print(f"{device.name}: copy {copy_rate(card) / 1e9:.0f} GB/s read and written")
    print(
        f"compiled after {time.perf_counter() - start:.0f} s; warps of a block and wanted: {grids}"
    )
    for type in types:
        cards = [(form, Card(open_cuda(modules(type, form)))) for form in FORMS]
        for model, count in itertools.product(MODELS[:2], COUNTS):
            shape = ExpertShape(type, type, model.width, model.hidden)
            layers = Layers(card, shape, model.chosen, count, 400 << 20)
            for form, own in cards:
                if count in form.counts:
                    title = f"{model.name[:5]} {type.name:5s} {count}"
                    show(own, layers, form, grids, title, options.seconds)
            layers.free()
    print(f"all after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
