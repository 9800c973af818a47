"""Faults planted in the CUDA text: each must be caught by the checks of devicecases.py."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from colibri_mmap.runtime.cudasources import CudaModule, cuda_modules


class Fault(NamedTuple):
    """`old` becomes `new`, once, behind `behind`, in `file`: rows, or experts with `type`."""

    type: str
    old: str
    new: str
    behind: str = ""
    file: str = "experts"


def _rows(old: str, new: str, type: str = "Q8_0") -> Fault:
    return Fault(type, old, new, file="rows")


_SUMS_OF_WARP = "for (int i = 0; i < COUNT; i++) of_warp[first + threadIdx.y][i] = sums[i];\n"

FAULTS = {
    # activations and sums of experts
    "rounding cuts off": _rows("__float2int_rn(value / scale)", "(int)(value / scale)"),
    "no guard for a scale of 0": _rows("scale == 0.0f ? 0 : ", ""),
    "no limit of 127": _rows(
        "min(127, max(-127, __float2int_rn(value / scale)))", "__float2int_rn(value / scale)"
    ),
    "sum without its scale": _rows("scale * sum", "sum"),
    "what is not a number is lost": _rows("(b > a || b != b) ? b : a", "b > a ? b : a"),
    "stride of activations": _rows("(u64)row * x_stride", "(u64)row * width"),
    "no barrier before the largest": _rows(
        "of_warp[threadIdx.y] = largest;\n        __syncthreads();",
        "of_warp[threadIdx.y] = largest;",
    ),
    "largest of half a block": _rows("i < blockDim.y; i++) largest", "i < 4; i++) largest"),
    "combining without weights": _rows("sum += weights[e] * y", "sum += y"),
    "combining adds to nothing": _rows("float sum = add ? *to : 0.0f", "float sum = 0.0f"),
    "combining other pairs": _rows("(u64)row[e] * width", "(u64)e * width"),
    # what all types share
    "row behind the matrix": Fault("Q8_0", "min(first + r, rows - 1)", "(first + r)"),
    "surplus rows are written": Fault("Q4_0", "t + j < count && first + r < rows", "t + j < count"),
    "surplus columns are written": Fault(
        "Q4_0", "t + j < count && first + r < rows", "first + r < rows"
    ),
    "surplus columns are read": Fault("F16", "min(t + j, count - 1)", "t + j"),
    "the first columns alone": Fault("F16", "from == 0 || from < live", "from == 0"),
    "surplus hidden rows are written": Fault("Q4_0", "if (p + j < end) out", "out", "void down("),
    "warps share units twice": Fault(
        "Q8_0", "i += blockDim.y * WARP", "i += WARP", "void accumulate("
    ),
    "warps share entries twice": Fault(
        "Q8_0", "after = i + blockDim.y * WARP", "after = i + WARP", "void down_weighted("
    ),
    "unit behind the row": Fault("Q4_0", "if (i < units) load_unit", "load_unit"),
    "first unit behind the row": Fault(
        "Q4_0", "if (lane_of_row_group() < units_of<T>(columns))", "if (true)"
    ),
    "no barrier before the sums": Fault(
        "Q8_0", _SUMS_OF_WARP + "    __syncthreads();", _SUMS_OF_WARP
    ),
    "a barrier in a branch": Fault(
        "Q8_0",
        "    if (threadIdx.x == 0)\n#pragma unroll\n        "
        + _SUMS_OF_WARP
        + "    __syncthreads();",
        "    if (threadIdx.x == 0) {\n#pragma unroll\n" + _SUMS_OF_WARP + "    __syncthreads();\n}",
    ),
    "sums of another row group": Fault(
        "Q4_K", "first = threadIdx.z * blockDim.y;", "first = 0;", "void sum_of_row_group("
    ),
    "half of the lanes": Fault("Q8_0", "apart = WARP / 2", "apart = WARP / 4", "sum_of_warp"),
    "half of the mask": Fault("Q8_0", "ALL_LANES 0xffffffffu", "ALL_LANES 0x0000ffffu"),
    "a collective in a branch": Fault(
        "Q8_0",
        "sums[i] = sum_of_warp(sums[i]);",
        "if (threadIdx.x < 16) sums[i] = sum_of_warp(sums[i]);",
    ),
    "up is the gate": Fault("F16", "fetch<u64>(ups + group)", "fetch<u64>(gates + group)"),
    "the bias of the first expert": Fault(
        "F16", "fetch<u64>(biases + group)", "fetch<u64>(biases)"
    ),
    "bias without its weight": Fault(
        "F16", "sums[r] += fetch<float>(weights + e) * bias_of", "sums[r] += bias_of"
    ),
    "gate without its limit": Fault("F16", "gate > 7.0f ? 7.0f : gate", "gate"),
    "up without its limits": Fault("F16", "up > 7.0f ? 7.0f : up < -7.0f ? -7.0f : up", "up"),
    "every part of a group is the first": Fault(
        "Q4_0", "fetch<int>(off + group) + N * blockIdx.z", "fetch<int>(off + group)"
    ),
    "sums without weights": Fault("Q4_0", "weight * T::product", "T::product"),
    "reciprocal too small": Fault("Q4_0", "0x7fffffffu / units + 1", "0x7fffffffu / units"),
    "hidden rows of the first token": Fault(
        "Q4_0", "fetch<int>(hidden + start + e)", "fetch<int>(hidden + e)"
    ),
    "matrices of the first token": Fault("Q4_0", "downs + start, row_bytes", "downs, row_bytes"),
    "sums are not added": Fault("Q4_0", "(add ? *to : 0.0f) + sums[r]", "sums[r]"),
    "scales of the next activations": Fault(
        "Q8_0", "(at + T::start(part, i)) / 32;", "(at + T::start(part, i)) / 32 + 1;"
    ),
    "floats without offsets": Fault(
        "Q4_1", "SUMS == NO_OFFSET ? 0.0f : unit.offset[run % SCALES]", "0.0f"
    ),
    "floats behind the matrix": Fault("Q4_1", "if (i >= units) return;", ""),
    "products without offsets": Fault(
        "Q4_1", "if (SUMS == SUM_OF_32) total +=", "if (false) total +="
    ),
    "sums of other activations": Fault("Q2_K", "__dp4a(0x01010101, q", "__dp4a(0x00010101, q"),
    # words and tables
    "a word behind the matrix": Fault(
        "Q8_0", "words.shift ? fetch<u32>(from + N) : 0u", "fetch<u32>(from + N)"
    ),
    "odd bytes": Fault("MXFP4", "((u32)(u64)address & 3)", "((u32)(u64)address & 2)"),
    "a misaligned load": Fault(
        "Q8_0",
        "raw.q = Words<4>::at(block + 2 + 16 * part);",
        "raw.q.shift = 0; for (u32 i = 0; i < 4; i++)"
        " raw.q.aligned[i] = fetch<u32>(block + 2 + 16 * part + 4 * i);",
        "struct q8_0",
    ),
    "borrow between bytes": Fault("Q4_0", "(bytes | 0x80808080u) - less", "bytes - less"),
    "half of the table": Fault("MXFP4", "& 0x88888888u) >> 1", "& 0x88888888u) >> 2"),
    # types
    "q4_0 without its 8": Fault("Q4_0", "0x08080808u", "0x00000000u"),
    "q4_0 high nibbles": Fault("Q4_0", "(raw.q[i] >> 4)", "raw.q[i]", "struct q4_0"),
    "q4_1 minimum is the scale": Fault("Q4_1", "high_half(raw.head)", "low_half(raw.head)"),
    "q5_0 high bits": Fault("Q5_0", "four_bits(bits >> 16)", "four_bits(bits)", "struct q5_0"),
    "q5_1 high bits": Fault("Q5_1", "four_bits(bits >> 16)", "four_bits(bits)", "struct q5_1"),
    "q8_0 second word": Fault("Q8_0", "(int)raw.q[i]", "(int)raw.q[i & 2]"),
    "mxfp4 least scales": Fault("MXFP4", "e > 1 ?", "e > 0 ?"),
    "q4_k first half of scales": Fault("Q4_K", "pair < 2 ? scales", "pair < 3 ? scales"),
    "q4_k high bits of scales": Fault("Q4_K", "(scales >> 2) & 0x3030u", "(scales >> 3) & 0x3030u"),
    "q4_k high bits of minima": Fault("Q4_K", "(minima >> 2)", "(scales >> 2)"),
    "q4_k minimum twice": Fault("Q4_K", "return (part & 1) == 0;", "return true;"),
    "q4_k scales of a neighbour": Fault("Q4_K", "(at / 32 + (part & ~1u))", "(at / 32 + part)"),
    "q4_k halves": Fault("Q4_K", "+ 16 * (part & 1) + 32 * run", "+ 8 * (part & 1) + 32 * run"),
    "q4_k nibbles": Fault("Q4_K", "(int)(q[i] & 0x0f0f0f0fu)", "(int)(q[i] >> 4 & 0x0f0f0f0fu)"),
    "q5_k group": Fault("Q5_K", "bits[i] >> (part & ~1u)", "bits[i] >> part"),
    "q5_k second group": Fault("Q5_K", "(high << 3)", "(high << 4)"),
    "q6_k high bits": Fault("Q6_K", "shift = part & 2;", "shift = part & 1;"),
    "q6_k scales": Fault("Q6_K", "start(part, run) / 16", "start(part, run) / 32"),
    "q6_k unsigned scales": Fault("Q6_K", "i8 scales[2];", "u8 scales[2];"),
    "q2_k late scales": Fault("Q2_K", "8 * late);", "0 * late);"),
    "q2_k minima": Fault("Q2_K", "(field >> 4) & 15u", "field & 15u"),
    "q3_k high bits": Fault("Q3_K", "(4 * half + run)", "(4 * half)"),
    "q3_k scale": Fault("Q3_K", "- 32);", "- 31);", "struct q3_k"),
    "q3_k high bits of scales": Fault("Q3_K", "2 * (run >> 1))) & 3u", "(run >> 1))) & 3u"),
    "iq4_xs scales": Fault("IQ4_XS", "(16 + 2 * part)", "(16 + part)"),
    "iq4_xs table": Fault("IQ4_XS", "0xf6eaddcfu", "0xf6eaddceu"),
    "bf16 halves": Fault("BF16", "raw.x << 16", "raw.y << 16"),
    "f16 second word": Fault("F16", "half_to_float((u16)(raw.y >> 16))", "0.0f"),
}


def with_fault(name: str) -> dict[str, CudaModule]:
    """The module that has the fault, by its name."""
    fault = FAULTS[name]
    module = cuda_modules()["rows" if fault.file == "rows" else f"experts_{fault.type.lower()}"]
    start = module.source.index(fault.behind)
    before, text = module.source[:start], module.source[start:]
    assert fault.old in text, f"{name}: the text has changed"
    line = text[: text.index(fault.old)].rsplit("\n", 1)[-1]
    assert "//" not in line, f"{name}: a comment"
    return {module.name: replace(module, source=before + text.replace(fault.old, fault.new, 1))}
