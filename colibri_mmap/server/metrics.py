"""What the server counts, for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from colibri_mmap.runtime.stats import Counters, Stats

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
_TOKEN_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


@dataclass(frozen=True, slots=True)
class Load:
    """What one open model is busy with."""

    model: str
    queued: int
    active: int


@dataclass(frozen=True, slots=True)
class ExpertCounters:
    """Chosen experts that were in memory and that were not, and the time waited for these."""

    hits: int = 0
    misses: int = 0
    wait_seconds: float = 0.0

    @classmethod
    def of(cls, counters: Counters) -> ExpertCounters:
        return cls(counters.expert_hits, counters.expert_misses, counters.wait_seconds)


def sum_of(counters: Sequence[ExpertCounters]) -> ExpertCounters:
    return ExpertCounters(
        sum(each.hits for each in counters),
        sum(each.misses for each in counters),
        sum(each.wait_seconds for each in counters),
    )


@dataclass(frozen=True, slots=True)
class Situation:
    """What is read, not counted, at the time somebody asks; bytes are the process's."""

    loads: tuple[Load, ...]
    opened: int  # models, since the start
    bytes_read: int
    experts: ExpertCounters  # of all models since the start


class Metrics:
    """A registry of its own, so that several servers in one process do not meet in it."""

    def __init__(self, situation: Callable[[], Situation]) -> None:
        self._registry = registry = CollectorRegistry()
        registry.register(_Reader(situation))
        self._requests = Counter(
            "colibri_requests", "Requests answered", ("endpoint", "code"), registry=registry
        )
        self._replies = Counter(
            "colibri_replies", "Replies ended, by how", ("reason",), registry=registry
        )
        self._tokens = Counter(
            "colibri_tokens",
            "Tokens: of prompts (cached: known from before) and generated",
            ("kind",),
            registry=registry,
        )
        self._first_token = Histogram(
            "colibri_first_token_seconds",
            "From a request's turn to its first token",
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
        """An answer was given, or begun."""
        self._requests.labels(endpoint, str(code)).inc()

    def count_token_gap(self, seconds: float) -> None:
        """A token came so long after the one before."""
        self._token.observe(seconds)

    def count_reply(self, reason: str, stats: Stats) -> None:
        """A reply has ended."""
        self._replies.labels(reason).inc()
        self._tokens.labels("prompt").inc(stats.prompt_tokens)
        self._tokens.labels("cached").inc(stats.cached_tokens)
        self._tokens.labels("generated").inc(stats.generated_tokens)
        if stats.generated_tokens:
            self._first_token.observe(stats.ttft_seconds)

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
        queued = GaugeMetricFamily(
            "colibri_queued_requests", "Requests that wait for their turn", labels=("model",)
        )
        active = GaugeMetricFamily(
            "colibri_active_sequences", "Replies being made", labels=("model",)
        )
        for load in now.loads:
            queued.add_metric((load.model,), load.queued)
            active.add_metric((load.model,), load.active)
        yield queued
        yield active
        for name, meaning, value in (
            ("colibri_model_loads", "Models opened", now.opened),
            ("colibri_read_bytes", "Bytes read from disk", now.bytes_read),
            ("colibri_expert_hits", "Chosen experts that were in memory", now.experts.hits),
            ("colibri_expert_misses", "Chosen experts that were not", now.experts.misses),
            ("colibri_disk_wait_seconds", "Computing stood still", now.experts.wait_seconds),
        ):
            yield CounterMetricFamily(name, meaning, value=value)
