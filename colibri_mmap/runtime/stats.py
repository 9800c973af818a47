"""Figures of a generation."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class Counters:
    """What a process has read so far, and its experts: counts, bytes, seconds."""

    bytes_read: int = 0
    major_faults: int = 0
    expert_hits: int = 0
    expert_misses: int = 0
    wait_seconds: float = 0.0
    prefetched_experts: int = 0
    prefetch_hits: int = 0
    vram_hits: int = 0
    vram_misses: int = 0
    vram_uploads: int = 0
    vram_upload_bytes: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        names = [field.name for field in fields(self)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


@dataclass(slots=True)
class Stats:
    """Figures of one reply; seconds, tokens and bytes.

    `bytes_read` and `major_faults` are of all of it; those of experts and `wait_seconds`, in which
    the computation stood still for the disk, are of the tokens after the prompt. With a GPU, chosen
    experts are hits or misses of VRAM first, and those that the CPU computes then of memory.
    Replies that are made at the same time share what is read: each has all of it.
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
    vram_hits: int = 0
    vram_misses: int = 0
    vram_uploads: int = 0
    vram_upload_bytes: int = 0
    finish_reason: str = ""

    def count(self, whole: Counters, part: Counters) -> None:
        """Take over what was read for the whole reply, and for the part that is being made."""
        self.bytes_read, self.major_faults = whole.bytes_read, whole.major_faults
        self.expert_hits, self.expert_misses = part.expert_hits, part.expert_misses
        self.wait_seconds = part.wait_seconds
        self.prefetched_experts = part.prefetched_experts
        # What was prefetched before may be hit now.
        self.prefetch_hits = min(part.prefetch_hits, part.prefetched_experts)
        self.vram_hits, self.vram_misses = part.vram_hits, part.vram_misses
        self.vram_uploads, self.vram_upload_bytes = part.vram_uploads, part.vram_upload_bytes

    def end_prompt(self) -> None:
        """What was counted so far is of the prompt."""
        self.prefill_bytes_read, self.prefill_wait_seconds = self.bytes_read, self.wait_seconds

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
    def vram_hit_rate(self) -> float:
        """The share of chosen experts that were in VRAM, 0 to 1; 0 without a GPU."""
        return self.vram_hits / max(1, self.vram_hits + self.vram_misses)

    @property
    def vram_uploads_per_token(self) -> float:
        """Experts that a token after the first had uploaded for later ones."""
        return self.vram_uploads / max(1, self.generated_tokens - 1)

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
    "vram_hit_rate",
    "vram_uploads_per_token",
)


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 and count > 0 else 0.0
