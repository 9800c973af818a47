"""What the owner of a request is told, in this order; the last one is Finished or Failed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .generation import FinishReason
from .stats import Stats
from .tokenwriter import Token


@dataclass(frozen=True, slots=True)
class Started:
    """The request has left the queue; `cached_tokens` of its `prompt_tokens` are known already."""

    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`done` of `total` tokens are read."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A token of the reply."""

    token: Token


@dataclass(frozen=True, slots=True)
class Finished:
    """The reply is complete; `stop_string` is the one that ended it, if one did."""

    reason: FinishReason
    stats: Stats
    stop_string: str | None


@dataclass(frozen=True, slots=True)
class Failed:
    """There will be no more of the reply: a ColibriError, or something unexpected."""

    error: Exception


Event: TypeAlias = Started | PromptProgress | TokenEvent | Finished | Failed
