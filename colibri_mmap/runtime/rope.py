"""Rotary embedding: frequencies from GGUF metadata, cosines and sines for positions."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from ..errors import UnsupportedError
from ..format.gguf import GGUF
from .arena import Rows
from .kv import Batch
from .weights import Weights

Rope = tuple[Rows, Rows]  # cosines and sines of a batch's positions, [T, pairs] each


LOG_MULTIPLIER = ".rope.scaling.yarn_log_multiplier"  # 0.1 * DeepSeek's mscale_all_dim


class RopeFrequencies:
    """Angles per position of every rotated pair; `factor` scales cosines and sines (YaRN).

    `limit`: sequences of more tokens have other angles; 0 if there is none.
    """

    limit = 0

    def __init__(self, frequencies: NDArray[np.float32], factor: float = 1.0) -> None:
        self.frequencies, self.factor = frequencies, np.float32(factor)

    def of(self, batch: Batch) -> NDArray[np.float32]:
        """The frequencies of every token: [pairs], or [T, pairs] where they differ."""
        return self.frequencies

    def table(self, batch: Batch) -> tuple[NDArray[np.float32], ...]:
        """Cosines and sines, float32 [T, pairs] each; the angle is a float32 product as in HF."""
        angles = batch.positions[:, None].astype(np.float32) * self.of(batch)
        return np.cos(angles) * self.factor, np.sin(angles) * self.factor


class LongRopeFrequencies(RopeFrequencies):
    """Others for all tokens of a sequence longer than `limit` (LongRoPE, Ding et al. 2024)."""

    def __init__(
        self, short: NDArray[np.float32], long: NDArray[np.float32], limit: int, factor: float
    ) -> None:
        super().__init__(short, factor)
        self.long, self.limit = long, limit

    def of(self, batch: Batch) -> NDArray[np.float32]:
        return np.concatenate(
            [
                np.broadcast_to(
                    self.long if part.length > self.limit else self.frequencies,
                    (part.stop - part.start, len(self.long)),
                )
                for part in batch.sequences
            ]
        )


def long_rope_frequencies(weights: Weights, rotated: int, factor: float) -> LongRopeFrequencies:
    """The frequencies divided by rope_factors_short.weight and rope_factors_long.weight."""
    gguf = weights.gguf
    limit = gguf.int(".rope.scaling.original_context_length", minimum=1)
    _, plain = _plain_frequencies(gguf, rotated)
    short, long = (
        plain / weights.vector(f"rope_factors_{name}.weight", rotated // 2).values
        for name in ("short", "long")
    )
    return LongRopeFrequencies(short, long, limit, factor)


def _plain_frequencies(gguf: GGUF, rotated: int) -> tuple[float, NDArray[np.float32]]:
    """The base, and the frequencies without any scaling."""
    base = gguf.float(".rope.freq_base", 0.0) or 10000.0  # 0 means not stated
    if not 1.0 < base < math.inf:
        gguf.fail(".rope.freq_base", f"must be above 1, is {base}")
    exponents = np.arange(0, rotated, 2, dtype=np.float32) / np.float32(rotated)
    return base, (1.0 / np.float32(base) ** exponents).astype(np.float32)


def rope_frequencies(
    weights: Weights, rotated: int, *, round_limits: bool = True
) -> RopeFrequencies:
    """The frequencies of `rotated` dimensions; the tensor rope_freqs.weight divides them.

    Scaling: none, linear, yarn (Peng et al. 2023), whose ramp runs between whole dimensions if
    `round_limits`; another kind is an UnsupportedError.
    """
    gguf = weights.gguf
    base, frequencies = _plain_frequencies(gguf, rotated)
    factors = weights.optional_vector("rope_freqs.weight", rotated // 2)
    if factors is not None:
        frequencies = frequencies / factors.values
    kind = gguf.str(".rope.scaling.type", "none")
    scale = gguf.float(".rope.scaling.factor", 0.0) or 1.0  # 0 means not stated
    if not 0.0 < scale < math.inf:
        gguf.fail(".rope.scaling.factor", f"must be above 0, is {scale}")
    if kind == "none" or scale == 1.0:
        return RopeFrequencies(frequencies)
    if kind == "linear":
        return RopeFrequencies(frequencies / np.float32(scale))
    if kind == "yarn":
        return _yarn(gguf, rotated, frequencies, scale, base, round_limits)
    raise UnsupportedError(f"{gguf.path}: rope scaling {kind!r}; supported: none, linear, yarn")


def _yarn(
    gguf: GGUF,
    rotated: int,
    frequencies: NDArray[np.float32],
    scale: float,
    base: float,
    round_limits: bool,
) -> RopeFrequencies:
    key = ".rope.scaling.original_context_length"
    original = gguf.int(key, gguf.int(".context_length"))
    if original < 1:
        gguf.fail(key, f"must be at least 1, is {original}")

    def dimension(key: str, usual: float) -> float:
        rotations = gguf.float(key, usual)
        if not 0.0 < rotations < math.inf:
            gguf.fail(key, f"must be above 0, is {rotations}")
        return rotated * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = dimension(".rope.scaling.yarn_beta_fast", 32.0)
    high = dimension(".rope.scaling.yarn_beta_slow", 1.0)
    if round_limits:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotated - 1)
    ramp = (np.arange(rotated // 2, dtype=np.float32) - low) / max(high - low, 1e-3)
    keep = 1.0 - np.clip(ramp, 0.0, 1.0)
    mixed = frequencies / np.float32(scale) * (1 - keep) + frequencies * keep
    factor = gguf.float(".rope.scaling.attn_factor", 1.0)
    if not gguf.float(LOG_MULTIPLIER, 0.0):  # else the scale of the scores holds it, see mla.py
        factor *= 0.1 * math.log(scale) + 1.0
    return RopeFrequencies(mixed.astype(np.float32), factor)
