"""Small seeded changes of quantised weights, made in the blocks themselves.

The weights of a block are proportional to its one or two float16 scales: multiplying those by a
factor multiplies the weights, whatever the type, and nothing is quantised a second time.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import UnsupportedError
from colibri_mmap.format.quants import GGMLType, block_geometry

# Byte offsets in a block of its float16 scales, d and where there is one m or dmin: ggml-common.h.
SCALE_OFFSETS: dict[GGMLType, tuple[int, ...]] = {
    GGMLType.F16: (0,),
    GGMLType.Q4_0: (0,),
    GGMLType.Q4_1: (0, 2),
    GGMLType.Q5_0: (0,),
    GGMLType.Q5_1: (0, 2),
    GGMLType.Q8_0: (0,),
    GGMLType.Q2_K: (80, 82),
    GGMLType.Q3_K: (108,),
    GGMLType.Q4_K: (0, 2),
    GGMLType.Q5_K: (0, 2),
    GGMLType.Q6_K: (208,),
    GGMLType.IQ4_NL: (0,),
    GGMLType.IQ4_XS: (0,),
}


def perturbed(
    blocks: bytes, kind: GGMLType, strength: float, rng: np.random.Generator
) -> NDArray[np.uint8]:
    """A copy of `blocks` with each block's weights multiplied by a factor from 1 +- strength.

    Unquantised weights count as blocks of one. UnsupportedError for a type without float16 scales.
    """
    if kind is GGMLType.F32:
        values = np.frombuffer(blocks, np.float32)
        return (values * _factors(len(values), strength, rng)).view(np.uint8)
    if kind is GGMLType.BF16:
        wide = (np.frombuffer(blocks, np.uint16).astype(np.uint32) << 16).view(np.float32)
        scaled = (wide * _factors(len(wide), strength, rng)).view(np.uint32)
        return ((scaled + 0x8000) >> 16).astype(np.uint16).view(np.uint8)
    if kind not in SCALE_OFFSETS:
        raise UnsupportedError(f"feed-forward weights of type {kind.name} cannot be upcycled")
    _, block_bytes = block_geometry(kind)
    result = np.frombuffer(blocks, np.uint8).reshape(-1, block_bytes).copy()
    factors = _factors(len(result), strength, rng)
    for offset in SCALE_OFFSETS[kind]:
        scales = result[:, offset : offset + 2].copy().view(np.float16)[:, 0]
        result[:, offset : offset + 2] = (
            (scales * factors).astype(np.float16).view(np.uint8).reshape(-1, 2)
        )
    return result.reshape(-1)


def _factors(n: int, strength: float, rng: np.random.Generator) -> NDArray[np.float32]:
    return 1 + np.float32(strength) * (2 * rng.random(n, np.float32) - 1)
