"""Opening the RAM tier of a model: where its experts are read from, and how many may stay."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .experts import ExpertStore
from .pager import ExpertPager
from .policy import ExpertPolicy, Key
from .sources import BufferedExperts, ExpertNumbers, ExpertSource, IoMode, MappedExperts
from .weights import Weights


@dataclass(frozen=True, slots=True)
class RamSettings:
    """How memory is used; none of it changes a result.

    ram: bytes for the whole process, None for what the machine leaves. io: how experts are read.
    lfu_weight: frequency against recency in what is kept. pin: (layer, expert) that stay.
    """

    ram: int | None = None
    io: IoMode = "mmap"
    prefetch_threads: int = 2
    lfu_weight: float = 0.3
    pin: tuple[Key, ...] = ()


def open_pager(weights: Weights, store: ExpertStore, settings: RamSettings) -> ExpertPager | None:
    """The pager of a model's routed experts; None for a model without any."""
    if not store.layers:
        return None
    numbers = ExpertNumbers(tuple(store.layers), max(e.count for e in store.layers.values()))
    layers = {layer: weights.expert_layers[layer] for layer in numbers.layers}
    total = sum(layer.expert_bytes * layer.n_experts for layer in layers.values())
    budget = total if settings.ram is None else settings.ram
    source: ExpertSource
    if settings.io == "mmap":
        source = MappedExperts(numbers, layers, weights.files)
    else:
        direct = settings.io == "direct"
        source = BufferedExperts(numbers, layers, weights.files, budget, direct=direct)
    policy = ExpertPolicy(
        source.sizes.reshape(len(numbers.layers), numbers.count),
        budget,
        settings.lfu_weight,
        [(numbers.layers.index(layer), expert) for layer, expert in settings.pin],
    )
    return ExpertPager(
        numbers,
        source,
        policy,
        threads=settings.prefetch_threads,
        distrusts=int(np.sum(source.sizes)) > budget,
    )
