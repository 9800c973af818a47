"""Expected reads against caches that are simulated, and what they must obey."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.budget import plan_memory
from colibri_mmap.runtime.forecast import RULE_OF_THUMB, expected_reads, forecast
from colibri_mmap.runtime.replay import replay
from colibri_mmap.runtime.tracefile import RoutingTrace, TraceHeader
from colibri_mmap.runtime.usage import Usage

LAYERS, EXPERTS, TOP_K, TOKENS = 6, 64, 8, 500
SIZE = 1000


def routing(skew: float) -> tuple[RoutingTrace, np.ndarray]:
    """Independent choices by power-law popularity, and how often each was chosen [L, E]."""
    popularity = -skew * np.log(1 + np.arange(EXPERTS))
    noise = np.random.default_rng(0).gumbel(size=(TOKENS, LAYERS, 1, EXPERTS))
    ids = np.argsort(-(popularity + noise), axis=-1)[..., :TOP_K].astype(np.uint16)
    rates = np.stack([np.bincount(ids[:, n].ravel(), minlength=EXPERTS) for n in range(LAYERS)])
    header = TraceHeader("a", "b", tuple(range(LAYERS)), EXPERTS, TOP_K, (SIZE,) * LAYERS)
    return RoutingTrace(header, tuple(ids)), rates / TOKENS


@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("share", [0.2, 0.4, 0.7])
def test_it_lies_between_an_lru_and_the_engines_policy(skew: float, share: float) -> None:
    trace, rates = routing(skew)
    budget = int(share * rates.size) * SIZE
    expected = expected_reads(np.full(rates.shape, SIZE), rates, budget)
    lru, hybrid = (
        replay(trace, budget, name, skip_passes=100).bytes_per_token / expected
        for name in ("lru", "hybrid")
    )
    assert 1.0 <= lru <= 1.25
    assert 0.8 <= hybrid <= 1.05


def test_equally_likely_experts_miss_by_the_share_that_is_absent() -> None:
    rates = np.full((LAYERS, EXPERTS), TOP_K / EXPERTS)
    sizes = np.full(rates.shape, 1_000_000)
    for share in (0.1, 0.5, 0.9):
        reads = expected_reads(sizes, rates, int(share * sizes.sum()))
        assert reads == pytest.approx(LAYERS * TOP_K * 1e6 * (1 - share), rel=1e-3)
    assert expected_reads(sizes, rates, int(sizes.sum())) == 0


def test_experts_that_are_always_or_never_used() -> None:
    rates = np.array([[1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]])
    sizes = np.full(rates.shape, 10)
    assert expected_reads(sizes, rates, 60) == 0
    assert 0 < expected_reads(sizes, rates, 40) <= 10  # of the second row, half at most


def test_a_model_is_forecast(mini: Path) -> None:
    gguf = open_gguf(next((mini / "qwen3moe").glob("*.gguf")))
    layers = expert_layers(gguf)
    size = max(layer.expert_bytes for layer in layers.values())
    total = sum(layer.expert_bytes * layer.n_experts for layer in layers.values())
    top_k = gguf.int(".expert_used_count")
    plan = plan_memory(
        available_bytes=10**9,
        trunk_bytes=1000,
        expert_bytes_total=total,
        largest_expert=size,
        top_k=top_k,
        anonymous_bytes=0,
        kv_bytes=0,
        reserve=0,
        ram=1000 + total * 3 // 4,
    )
    shape = (max(layers) + 1, max(layer.n_experts for layer in layers.values()))
    nothing = Usage(np.zeros(shape), 0.0)
    uniform = forecast(gguf, layers, plan, 1000, nothing, RULE_OF_THUMB)
    per_token = sum(layer.expert_bytes for layer in layers.values()) * top_k
    assert uniform.computed_bytes == 1000 + per_token
    assert uniform.counted_tokens == 0
    assert uniform.read_bytes == pytest.approx(per_token / 4, rel=0.02)
    slowest, fastest = uniform.tokens_per_second
    assert slowest < fastest < 2 * slowest
    counts = np.zeros(shape)
    counts[:, :top_k] = 10_000  # always the same experts
    known = forecast(gguf, layers, plan, 1000, Usage(counts, 10_000.0), RULE_OF_THUMB)
    assert known.counted_tokens == 10_000
    assert known.read_bytes < 0.01 * per_token
