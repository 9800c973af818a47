"""Figures that come with a reply: OpenAI's usage, and timings as llama.cpp words them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from colibri_mmap.runtime.stats import Stats


def usage(replies: Sequence[Stats], prompts: int = 1) -> dict[str, Any]:
    """Tokens of a request; replies to the same prompt count it once."""
    each = len(replies) // prompts  # replies in a row that share a prompt
    prompt = sum(stats.prompt_tokens for stats in replies[::each])
    generated = sum(stats.generated_tokens for stats in replies)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {
            "cached_tokens": sum(stats.cached_tokens for stats in replies[::each])
        },
    }


def timings(stats: Stats) -> dict[str, Any]:
    """Milliseconds and speeds; the prompt's are of what was not known from before."""
    read = stats.prompt_tokens - stats.cached_tokens
    prompt_ms, predicted_ms = 1000 * stats.prefill_seconds, 1000 * stats.decode_seconds
    generated = stats.generated_tokens
    return {
        "cache_n": stats.cached_tokens,
        "prompt_n": read,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / max(1, read),
        "prompt_per_second": stats.prefill_tokens_per_second,
        "predicted_n": generated,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / max(1, generated - 1),
        "predicted_per_second": stats.decode_tokens_per_second,
    }
