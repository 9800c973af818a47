"""Which form and which grid of the expert products suits this GPU.

    python bench/gpusweep.py [--types Q4_K,Q6_K] [--seconds 0.01]

A row is a form of the CUDA text, in which something is replaced; its cells are GB/s of weights, one
for each grid: warps wanted in a launch and warps of a block, as devicekernels.py has them.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from gpu import MODELS, TYPES, Card, Layers, copy_rate

from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime import devicekernels
from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules
from colibri_mmap.runtime.devicekernels import ExpertShape

GRIDS = tuple(itertools.product((4, 8), (1024, 2048, 4096, 8192, 16384)))
MANY = ("as it is", "rows 1", "unroll 1")  # forms that are tried with several tokens too

_NEXT = "            if (after < units) load_unit<T>(row[r], after, next[r]);\n"
_END = "        i = after;\n    }\n}\n\n// The sums"
_LOOP = "#pragma unroll\n        for (int r = 0; r < ROWS_; r++)\n"


@dataclass(frozen=True, slots=True)
class Form:
    """Replacements in the text, and constants of devicekernels.py that go with them."""

    name: str
    changes: tuple[tuple[str, str], ...] = ()
    constants: dict[str, int] = field(default_factory=dict)
    parts: int = 0  # units of a block, if not as usual


def _bounded(blocks: int) -> Form:
    names = ("JOINED(NAME(gate_up_)", "NAME(down_weighted_)")
    before, bound = 'extern "C" __global__ void ', f"__launch_bounds__(256, {blocks}) "
    return Form(f"bounds {blocks}", tuple((before + n, before + bound + n) for n in names))


FORMS = (
    Form("as it is"),
    Form("rows 1", (("#define ROWS 2", "#define ROWS 1"),), {"_ROWS": 1}),
    Form("rows 4", (("#define ROWS 2", "#define ROWS 4"),), {"_ROWS": 4}),
    Form("unroll 1", (("#pragma unroll 2\n    while", "#pragma unroll 1\n    while"),)),
    Form("late loads", ((_NEXT, ""), (_END, _LOOP + _NEXT + _END))),
    _bounded(4),
    _bounded(5),
)
_NIBBLES = (
    ("Quantised<T, 2, 2, 1, SUMS>", "Quantised<T, 2, 4, 1, SUMS>"),
    ("WEIGHTS = 32, PARTS = 2;", "WEIGHTS = 32, PARTS = 1;"),
    ("Words<2>", "Words<4>"),
    ("i < 2; i++) {\n            unit.w[0][i] = minus", "i < 4; i++) {\n unit.w[0][i] = minus"),
    ("i < 2; i++) look_up", "i < 4; i++) look_up"),
)
_BYTES = (
    ("Quantised<q8_0, 1, 2, 1", "Quantised<q8_0, 1, 4, 1"),
    ("BYTES = 34, PARTS = 4", "BYTES = 34, PARTS = 2"),
    ("Words<2>", "Words<4>"),
    ("return 8 * part; }", "return 16 * part; }"),
    ("block + 2 + 8 * part", "block + 2 + 16 * part"),
    ("unit.w[0][0] = (int)raw.q[0];", "for (int i = 0; i < 4; i++) unit.w[0][i] = (int)raw.q[i];"),
    ("unit.w[0][1] = (int)raw.q[1];", ""),
)
WIDTHS = {
    "Q6_K": tuple(
        Form(f"words {n}", (("Q6_K_WORDS 2", f"Q6_K_WORDS {n}"),), parts=32 // n) for n in (1, 4)
    ),
    "Q8_0": (Form("words 4", _BYTES, parts=2),),
    "Q4_0": (Form("words 4", _NIBBLES, parts=1),),
    "MXFP4": (Form("words 4", _NIBBLES, parts=1),),
}


def modules(type: GGMLType, form: Form) -> list[CudaModule]:
    """All modules; the products of a type in a form."""
    found = []
    for module in cuda_modules().values():
        source = module.source
        if module.name == f"experts_{type.name.lower()}":
            for old, new in form.changes:
                source = source.replace(old, new)
            assert not form.changes or source != module.source, form.name
        found.append(replace(module, source=source))
    return found


@contextmanager
def constants(type: GGMLType, form: Form, grid: tuple[int, int]) -> Iterator[None]:
    """devicekernels.py with other constants."""
    changed = {"_WARPS_PER_BLOCK": grid[0], "_WARPS_WANTED": grid[1]} | form.constants
    before = {name: getattr(devicekernels, name) for name in changed}
    parts = dict(devicekernels._PARTS)
    if form.parts:
        devicekernels._PARTS[type] = form.parts
    for name, value in changed.items():
        setattr(devicekernels, name, value)
    yield
    for name, value in before.items():
        setattr(devicekernels, name, value)
    devicekernels._PARTS.clear()
    devicekernels._PARTS.update(parts)


def show(card: Card, layers: Layers, type: GGMLType, form: Form, title: str, time: float) -> None:
    """Two rows of the table."""
    layers.card = card
    for number, name in enumerate(("gate_up", "down")):
        cells = []
        for grid in GRIDS:
            with constants(type, form, grid):
                work = partial(layers.run, number == 0, number == 1)
                rate = layers.nbytes[number] / card.seconds(work, time)
            cells.append(f"{rate / 1e9:5.0f}")
        print(f"{title} {form.name:10s} {name:7s} {' '.join(cells)}", flush=True)


def main() -> None:
    from colibri_mmap.runtime.cuda import open_cuda

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", default=",".join(type.name for type in TYPES))
    parser.add_argument("--seconds", type=float, default=0.008)
    options = parser.parse_args()
    device: Any = open_cuda(cuda_modules().values())
    if isinstance(device, str):
        raise SystemExit(f"no GPU: {device}")
    card = Card(device)
    print(f"{device.name}: copy {copy_rate(card, 0.05) / 1e9:.0f} GB/s read and written")
    print(f"warps of a block and wanted: {', '.join(f'{a}/{b}' for a, b in GRIDS)}")
    for name in options.types.split(","):
        type = GGMLType[name]
        forms = (*FORMS, *WIDTHS.get(name, ()))
        cards = [(form, Card(open_cuda(modules(type, form)))) for form in forms]
        for model, count in itertools.product(MODELS[:2], (1, 4)):
            shape = ExpertShape(type, type, model.width, model.hidden)
            layers = Layers(card, shape, model.chosen, count, 400 << 20)
            for form, own in cards:
                if count == 1 or form.name in MANY:
                    title = f"{model.name[:5]} {name:5s} {count}"
                    show(own, layers, type, form, title, options.seconds)
            layers.free()


if __name__ == "__main__":
    main()
