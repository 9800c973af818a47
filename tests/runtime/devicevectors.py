"""Small products with what the shim makes of them, to be repeated on a GPU (tests/data/gpu).

python tests/runtime/devicevectors.py      writes them anew, from the repository's directory
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from devicecases import (
    SHARED,
    SINGLE,
    Experts,
    Workbench,
    expert_shape,
    random_activations,
    random_experts,
    random_weights,
)
from numpy.typing import NDArray

from colibri_mmap.format.quants import GGMLType, block_geometry
from colibri_mmap.runtime.cudasources import FLOAT_TYPES, WEIGHT_TYPES
from colibri_mmap.runtime.devicekernels import CLAMPED_SWIGLU, SILU, ExpertShape

VECTORS = Path(__file__).parents[1] / "data" / "gpu" / "products.npz"
QUANTISED = tuple(type for type in WEIGHT_TYPES if type not in FLOAT_TYPES)
DEVIATION = 2e-6  # of the largest value of a row: a GPU contracts to FMA and has its own exp

Array = NDArray[Any]
Case = dict[str, Array]


def _products() -> Iterator[tuple[str, Case]]:
    """Name and inputs of every case."""
    for type in WEIGHT_TYPES:
        rng = np.random.default_rng(100 + int(type))
        columns = max(96, 2 * block_geometry(type)[0])
        raw, x = random_weights(type, 5, columns, rng), random_activations(3, columns, rng)
        yield f"matvec {type.name}", {"raw": raw, "x": x}
        yield f"dequantise {type.name}", {"raw": raw[:2], "columns": np.array(columns)}
    shapes = (
        (expert_shape(GGMLType.MXFP4, None, CLAMPED_SWIGLU, hidden=64), SHARED, True),
        (expert_shape(GGMLType.Q8_0, hidden=32), SINGLE, False),
        (expert_shape(GGMLType.Q4_K, GGMLType.Q6_K), [[1, 0]], False),
        (expert_shape(GGMLType.F16, hidden=32), SHARED, False),
    )
    for number, (shape, choices, biases) in enumerate(shapes):
        rng = np.random.default_rng(200 + number)
        experts = random_experts(shape, choices, rng, biases=biases)
        case = {
            "x": random_activations(len(choices), shape.width, rng),
            "shape": np.array([shape.type, shape.down_type, shape.width, shape.hidden]),
            "activation": np.array(shape.activation),
            "chosen": experts.chosen,
            "tokens": experts.tokens,
            "weights": experts.weights,
        }
        for i, parts in enumerate(experts.parts):
            case |= {f"part {i} {j}": part for j, part in enumerate(parts)}
        yield f"experts {shape.type.name} {shape.down_type.name}", case


def outputs(bench: Workbench, name: str, case: Case) -> Case:
    """What a device makes of a case."""
    kind, *types = name.split()
    type = GGMLType[types[0]]
    if kind == "matvec":
        out = bench.matvec(type, case["raw"], case["x"])[:, : len(case["raw"])]
        q, d, s = bench.quantise(type if type in QUANTISED else GGMLType.Q8_0, case["x"])
        return {"out": out, "q": q, "d": d, "s": s}
    if kind == "dequantise":
        return {"out": bench.dequantise(type, case["raw"], int(case["columns"]))}
    _, _, width, hidden = case["shape"].tolist()
    shape = ExpertShape(type, GGMLType[types[1]], width, hidden, int(case["activation"]) or SILU)
    parts: list[list[Array]] = []
    for key in sorted((key for key in case if key.startswith("part")), key=_numbers):
        expert, part = _numbers(key)
        parts += [[]] if part == 0 else []
        parts[expert].append(case[key])
    experts = Experts(shape, parts, case["chosen"], case["tokens"], case["weights"])
    rows, out = bench.experts(experts, case["x"], False)
    return {"hidden": rows, "out": out[:, :-2]}


def _numbers(key: str) -> tuple[int, int]:
    _, expert, part = key.split()
    return int(expert), int(part)


def compare(bench: Workbench, say: Callable[[str, float], None], *, exact: bool = False) -> float:
    """Repeat every case, saying its deviation; the worst one.

    Integers must be equal, and everything where `exact`; a deviation is one from the largest value.
    """
    worst = 0.0
    with np.load(VECTORS) as stored:
        names = sorted({key.split("/")[0] for key in stored.files})
        for name in names:
            case = {k.split("/")[2]: stored[k] for k in stored.files if k.startswith(f"{name}/in/")}
            deviation = 0.0
            for key, found in outputs(bench, name, case).items():
                expected = stored[f"{name}/out/{key}"]
                if exact or expected.dtype.kind == "i":
                    assert np.array_equal(found, expected), f"{name}: {key} differs"
                apart = np.abs(found.astype(np.float64) - expected)
                largest = max(float(np.abs(expected).max()), 1e-30)
                deviation = max(deviation, float(apart.max()) / largest)
            say(name, deviation)
            worst = max(worst, deviation)
            bench.free()
    return worst


def main() -> None:
    from shim import Shim

    from colibri_mmap.runtime.hostdevice import HostBackend

    bench = Workbench(HostBackend(Shim(Path(".pytest_cache/d/shim").absolute())))
    arrays: Case = {}
    for name, case in _products():
        arrays |= {f"{name}/in/{key}": array for key, array in case.items()}
        arrays |= {f"{name}/out/{key}": a for key, a in outputs(bench, name, case).items()}
    VECTORS.parent.mkdir(exist_ok=True)
    np.savez_compressed(VECTORS, **arrays)


if __name__ == "__main__":
    main()
