"""What a token will cost: from the memory plan, the known routing, and the machine's rates.

Choices are taken to be independent from token to token. By Che's approximation of an LRU an expert
with rate r is then absent with probability (1 - r) ** T, where T is the age at which experts leave.
On such routing a real LRU reads up to a fifth more, the engine's policy the same or up to a fifth
less; real routing repeats itself, so that real runs read less still. Source: H. Che, Y. Tung,
Z. Wang, Hierarchical Web Caching Systems, IEEE JSAC 20 (2002).

Shapes: L layers with experts, E experts per layer; layers with fewer have size and rate 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..format.experts import ExpertLayer
from ..format.gguf import GGUF
from .budget import MemoryPlan
from .profile import MachineRates
from .usage import Usage

Bottleneck = Literal["disk", "memory bandwidth", "computation"]

RULE_OF_THUMB = MachineRates(
    disk_sequential=2e9,
    disk_depth_1=1e9,
    disk_depth_4=1.5e9,
    disk_depth_16=1.5e9,
    memory=12e9,
    kernels=8e9,
)
"""A laptop with an NVMe drive, for machines that `tune` has not measured."""

_FEWEST_TOKENS = 64  # of usage counts that say more about a model than nothing does
_AT_MEMORY_SPEED = 0.7  # of the memory's rate: the kernels wait for it


@dataclass(frozen=True, slots=True)
class Forecast:
    """Per token: bytes that are computed with and, of them, read from disk; seconds of either.

    `counted_tokens` is how many tokens the routing was learned from, 0 where uniform routing is
    assumed. The two speeds are those of no overlap between disk and computation, and of a full one.
    """

    computed_bytes: int
    read_bytes: int
    counted_tokens: int
    disk_seconds: float
    compute_seconds: float
    bottleneck: Bottleneck

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        slowest = self.disk_seconds + self.compute_seconds
        return 1 / slowest, 1 / max(self.disk_seconds, self.compute_seconds)


def forecast(
    gguf: GGUF,
    layers: Mapping[int, ExpertLayer],
    plan: MemoryPlan,
    trunk_bytes: int,
    usage: Usage,
    rates: MachineRates,
) -> Forecast:
    """The expected costs of a token; `trunk_bytes` are used by each, in memory or not."""
    read, chosen, counted = trunk_bytes - plan.trunk_bytes, 0, 0
    if layers:
        top_k = gguf.int(".expert_used_count", minimum=1)
        sizes = _sizes(layers)
        uses = np.where(sizes > 0, top_k / (sizes > 0).sum(axis=1, keepdims=True), 0.0)
        if usage.tokens >= _FEWEST_TOKENS:
            counted = int(usage.tokens)
            counts = usage.counts[list(layers)][:, : sizes.shape[1]]
            uses = (counts + uses) / (usage.tokens + 1)  # one token's worth of doubt
        uses = np.minimum(uses, 1.0)
        chosen = sum(layer.expert_bytes for layer in layers.values()) * top_k
        read += expected_reads(sizes, uses, plan.expert_budget if plan.evict else sizes.sum())
    computed = trunk_bytes + chosen
    disk = read / (rates.disk_depth_4 or RULE_OF_THUMB.disk_depth_4)
    compute = computed / rates.kernels
    bottleneck: Bottleneck = "disk"
    if disk < compute:
        fast = rates.kernels >= _AT_MEMORY_SPEED * rates.memory
        bottleneck = "memory bandwidth" if fast else "computation"
    return Forecast(computed, read, counted, disk, compute, bottleneck)


def expected_reads(sizes: NDArray[np.int64], rates: NDArray[np.float64], budget: int) -> int:
    """Bytes that a token reads: `sizes` bytes and `rates` uses per token [L, E]; `budget` bytes."""
    used = sizes[rates > 0].sum()
    if used <= budget:
        return 0
    low, high = 0.0, 1.0

    def absent(age: float) -> NDArray[np.float64]:
        chance: NDArray[np.float64] = (1 - rates) ** age
        return chance

    while (sizes * (1 - absent(high))).sum() < budget:
        low, high = high, high * 2
    for _ in range(60):
        age = (low + high) / 2
        low, high = (age, high) if (sizes * (1 - absent(age))).sum() < budget else (low, age)
    return int((sizes * rates * absent(high)).sum())


def _sizes(layers: Mapping[int, ExpertLayer]) -> NDArray[np.int64]:
    """Bytes of every expert [L, E]."""
    sizes = np.zeros((len(layers), max(layer.n_experts for layer in layers.values())), np.int64)
    for row, layer in zip(sizes, layers.values(), strict=True):
        row[: layer.n_experts] = layer.expert_bytes
    return sizes
