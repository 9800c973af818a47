"""Figures of a generation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Stats:
    """Figures of the latest generation; seconds, tokens and bytes.

    `bytes_read` and `major_faults` are of all of it; those of experts and `wait_seconds`, in which
    the computation stood still for the disk, are of the tokens after the prompt.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    prefill_bytes_read: int = 0
    prefill_wait_seconds: float = 0.0
    bytes_read: int = 0
    major_faults: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    wait_seconds: float = 0.0
    prefetched_experts: int = 0
    prefetch_hits: int = 0
    finish_reason: str = ""

    @property
    def prefill_tokens_per_second(self) -> float:
        return _rate(self.prompt_tokens - self.cached_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Tokens after the first, which prefill pays for, per second."""
        return _rate(self.generated_tokens - 1, self.decode_seconds)

    @property
    def bytes_read_per_token(self) -> float:
        """What a token after the first, which prefill pays for, read from disk."""
        return (self.bytes_read - self.prefill_bytes_read) / max(1, self.generated_tokens - 1)

    @property
    def wait_share(self) -> float:
        """The part of decoding, 0 to 1, in which the computation stood still for the disk."""
        return self.wait_seconds / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def expert_hit_rate(self) -> float:
        """The share of chosen experts that were in memory, 0 to 1; 1 for a model without any."""
        asked = self.expert_hits + self.expert_misses
        return self.expert_hits / asked if asked else 1.0

    @property
    def prefetch_precision(self) -> float:
        """The share of prefetched experts that were used, 0 to 1."""
        return self.prefetch_hits / max(1, self.prefetched_experts)

    def as_dict(self) -> dict[str, float | int | str]:
        """All figures by name, for JSON."""
        return {name: getattr(self, name) for name in (*self.__slots__, *_DERIVED)}


_DERIVED = (
    "prefill_tokens_per_second",
    "decode_tokens_per_second",
    "bytes_read_per_token",
    "wait_share",
    "expert_hit_rate",
    "prefetch_precision",
)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0
