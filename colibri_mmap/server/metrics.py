"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colibri_mmap.runtime.batcher import Status
from colibri_mmap.runtime.pages import io_counters
from colibri_mmap.runtime.stats import Counters

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class Load:
    """What one open model is busy with."""

    model: str
    queued: int
    active: int
    tokens_per_second: float


@dataclass(slots=True)
class Totals:
    """What models have done since the start; `replies` by how they ended."""

    loads: int = 0
    replies: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    wait_seconds: float = 0.0

    def add(self, status: Status, counters: Counters) -> None:
        """Count what one model has done."""
        self.loads += 1
        self.replies.update(status.finished)
        self.replies["failed"] += status.failed
        self.prompt_tokens += status.prompt_tokens
        self.cached_tokens += status.cached_tokens
        self.generated_tokens += status.generated_tokens
        self.expert_hits += counters.expert_hits
        self.expert_misses += counters.expert_misses
        self.wait_seconds += counters.wait_seconds


@dataclass(frozen=True, slots=True)
class Situation:
    """What is read, not counted, at the time somebody asks."""

    loads: tuple[Load, ...]
    totals: Totals


class Metrics:
    """A registry of its own, so that several servers in one process do not meet in it."""

    def __init__(self, situation: Callable[[], Situation]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Reader(situation))
        self._requests = prometheus_client.Counter(
            "colibri_requests", "Requests answered", ("endpoint", "code"), registry=registry
        )
        self._first_token = Histogram(
            "colibri_first_token_seconds",
            "From the beginning of a request, when it may have to wait, to its first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self._token = Histogram(
            "colibri_token_seconds",
            "Between two tokens of a reply",
            buckets=_TOKEN_SECONDS,
            registry=registry,
        )

    def count_request(self, endpoint: str, code: int) -> None:
        """An answer was given."""
        self._requests.labels(endpoint, str(code)).inc()

    def count_first_token(self, seconds: float) -> None:
        """A reply has begun, so long after it was asked for."""
        self._first_token.observe(seconds)

    def count_token(self, seconds: float) -> None:
        """A token came so long after the one before."""
        self._token.observe(seconds)

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self._registry)


class _Reader(Collector):
    """Figures that are read when they are asked for."""

    def __init__(self, situation: Callable[[], Situation]) -> None:
        self._situation = situation

    def describe(self) -> Iterable[Metric]:
        return ()  # what there is depends on nothing but the code: no look at the models for it

    def collect(self) -> Iterator[Metric]:
        now = self._situation()
        for name, meaning, values in (
            ("queued_requests", "Requests that wait for their turn", [x.queued for x in now.loads]),
            ("active_sequences", "Replies being made", [x.active for x in now.loads]),
            (
                "tokens_per_second",
                "Of all replies together, while there were any in the last seconds",
                [x.tokens_per_second for x in now.loads],
            ),
        ):
            gauge = GaugeMetricFamily(f"colibri_{name}", meaning, labels=("model",))
            for load, value in zip(now.loads, values, strict=True):
                gauge.add_metric((load.model,), value)
            yield gauge
        totals = now.totals
        yield _counter("replies", "Replies ended, by how", "reason", totals.replies)
        tokens = {
            "prompt": totals.prompt_tokens,
            "cached": totals.cached_tokens,
            "generated": totals.generated_tokens,
        }
        meaning = "Tokens of prompts, those of them known from before, and generated ones"
        yield _counter("tokens", meaning, "kind", tokens)
        for name, meaning, value in (
            ("model_loads", "Models opened", totals.loads),
            ("read_bytes", "Bytes read from disk by the process", io_counters().bytes_read),
            ("expert_hits", "Chosen experts that were in memory", totals.expert_hits),
            ("expert_misses", "Chosen experts that were not", totals.expert_misses),
            ("disk_wait_seconds", "Computing stood still for the disk", totals.wait_seconds),
        ):
            yield CounterMetricFamily(f"colibri_{name}", meaning, value=value)


def _counter(name: str, meaning: str, label: str, values: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"colibri_{name}", meaning, labels=(label,))
    for value, count in values.items():
        family.add_metric((value,), count)
    return family
