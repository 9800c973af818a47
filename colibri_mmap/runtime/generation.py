"""One reply in the making: what goes through the model next, and what comes of it.

Whoever runs the model, for one reply or for several at once, puts `next_tokens` through it and
hands the logits to `advance`. V: the tokens of the vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ContextLengthError
from . import scheduler
from .grammar import Grammar
from .kv import STEP_TOKENS
from .sampling import Sampler, Sampling, log_probabilities
from .stats import Counters, Stats
from .tokenizer import Tokenizer
from .tokenwriter import Token, TokenWriter
from .transcripts import Transcripts

FinishReason = Literal["stop", "length", "context", "cancelled", "timeout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to continue, and how.

    `ids` is the prompt. `chat_prompt` is its text where it is the rendered one of a chat: what is
    said keeps its ids when the chat goes on (Transcripts). `shown` are control tokens that have a
    text in the reply. `logprobs`: how many alternatives are named with every token; None: no
    probabilities. `deadline`, in time.monotonic(), is observed by the batcher.
    """

    ids: Sequence[int]
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    chat_prompt: str | None = None
    shown: frozenset[int] = frozenset()
    logprobs: int | None = None
    grammar: Grammar | None = None
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ArgumentError(f"max_tokens must be at least 1, not {self.max_tokens}")
        if self.logprobs is not None and self.logprobs < 0:
            raise ArgumentError(f"logprobs must be at least 0, not {self.logprobs}")


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What replies of one engine have in common.

    `length_limit` is the model's (Sequence.announce); `count` tells what was read so far.
    """

    tokenizer: Tokenizer
    context_length: int
    length_limit: int
    transcripts: Transcripts
    count: Callable[[], Counters]


class Generation:
    """The state of one reply; `ids` are those of the prompt and of the reply so far.

    `reason` says why no more tokens will come; None as long as some will.
    """

    sequence: scheduler.Sequence

    def __init__(self, request: Request, surroundings: Surroundings) -> None:
        """ContextLengthError if the prompt leaves no room, ArgumentError for other mistakes."""
        prompt, context = len(request.ids), surroundings.context_length
        if prompt >= context:
            raise ContextLengthError(
                f"the prompt has {prompt} tokens, the context holds {context} and a "
                "reply needs room: shorten the prompt or open the model with a larger context"
            )
        tokenizer = surroundings.tokenizer
        self.request, self._surroundings = request, surroundings
        self.ids = list(request.ids)
        self.stats = Stats(prompt_tokens=prompt, finish_reason="cancelled")
        self.reason: FinishReason | None = None
        self.text = ""  # all that has come out; `ids` may be ahead of it
        self._limit = min(request.max_tokens or context, context - prompt)
        self._sampler = Sampler(request.sampling, tokenizer.vocab_size)
        self._writer = TokenWriter(tokenizer, request.sampling.stop, request.shown)
        self._matcher = request.grammar.matcher(tokenizer) if request.grammar else None
        self._began = self._decode_began = 0.0  # seconds; 0: not yet
        self._counted_from = self._part_counted_from = Counters()

    # -------------------------------------------------------------------------- steps
    def begin(self, sequence: scheduler.Sequence) -> None:
        """Go on from what a sequence knows of the prompt; the rest of it is forgotten."""
        self.sequence = sequence
        self._began = time.perf_counter()
        self._counted_from = self._part_counted_from = self._surroundings.count()
        sequence.announce(len(self.ids), self._surroundings.length_limit)
        sequence.rewind(_common_prefix(sequence.ids, self.ids[:-1]))
        self.stats.cached_tokens = len(sequence.ids)

    @property
    def finished(self) -> bool:
        return self.reason is not None

    @property
    def longest(self) -> int:
        """How many tokens there can be in the end."""
        return self.stats.prompt_tokens + self._limit

    @property
    def pending(self) -> int:
        """How many tokens have to go through the model before the next one can be chosen."""
        return len(self.ids) - len(self.sequence.ids)

    def next_tokens(self) -> list[int]:
        """The tokens that go through the model next."""
        known = len(self.sequence.ids)
        return self.ids[known : known + STEP_TOKENS]

    def advance(self, logits: NDArray[np.float32]) -> list[Token]:
        """Choose the next token by the logits [V] after all of `ids`; the tokens that come out.

        A token comes out once its text is known, and so may be one of an earlier step.
        """
        assert self.pending == 0
        assert not self.finished
        if not self._decode_began:
            self._note_prompt()
        stats, sampling, tokenizer = self.stats, self.request.sampling, self._surroundings.tokenizer
        logits = logits[: tokenizer.vocab_size]
        token = self._sampler.sample(logits, self.ids, self._matcher)
        now = time.perf_counter()
        if stats.generated_tokens == 0:
            stats.ttft_seconds = now - self._began
        if token in tokenizer.end_ids and not sampling.ignore_eos:
            return self.end("stop")
        probabilities = None
        if self.request.logprobs is not None:
            probabilities = log_probabilities(logits, token, self.request.logprobs)
        self.ids.append(token)
        stats.generated_tokens += 1
        stats.decode_seconds = now - self._decode_began
        tokens = [self._out(token) for token in self._writer.push(token, probabilities)]
        if self._writer.stopped or (self._matcher is not None and self._matcher.stopped):
            return tokens + self.end("stop")
        if stats.generated_tokens >= self._limit:
            reached = self._limit == self.request.max_tokens
            return tokens + self.end("length" if reached else "context")
        self.sequence.announce(len(self.ids), self._surroundings.length_limit)
        return tokens

    def end(self, reason: FinishReason) -> list[Token]:
        """End the reply here; the tokens that were held back come out."""
        assert not self.finished
        self.reason = self.stats.finish_reason = reason
        tokens = [self._out(token) for token in self._writer.finish()]
        self._count()
        self._remember()
        return tokens

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the reply."""
        return self._writer.stop_string

    # -------------------------------------------------------------------------- text
    def _out(self, token: Token) -> Token:
        """A token as it is shown: a chat's reply does not begin with its first word's space."""
        first = self.text == ""
        self.text += token.text
        chat = self.request.chat_prompt is not None
        if chat and first and self._surroundings.tokenizer.is_sentencepiece:
            return Token(token.id, token.text.removeprefix(" "), token.logprobs)
        return token

    def _remember(self) -> None:
        """Keep a chat's ids, unless a stop string cut it: the tokens say more than the text."""
        if self.request.chat_prompt is None:
            return
        reply = self.ids[self.stats.prompt_tokens :]
        stream = self._surroundings.tokenizer.stream(
            skip_special=True, at_start=False, shown=self.request.shown
        )
        if "".join(map(stream.push, reply)) + stream.flush() == self.text:
            self._surroundings.transcripts.keep(self.request.chat_prompt + self.text, self.ids)

    # -------------------------------------------------------------------------- figures
    def update_stats(self) -> Stats:
        """The figures, up to date also while the reply is going on."""
        if not self.finished:
            self._count()
        return self.stats

    def _count(self) -> None:
        if self._began:
            now = self._surroundings.count()
            self.stats.count(now - self._counted_from, now - self._part_counted_from)

    def _note_prompt(self) -> None:
        """The prompt is read: what is counted from now on belongs to the tokens after it."""
        stats = self.stats
        self._count()
        stats.end_prompt()
        self._decode_began, self._part_counted_from = (
            time.perf_counter(),
            self._surroundings.count(),
        )
        stats.prefill_seconds = self._decode_began - self._began


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    for length, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return length
    return min(len(a), len(b))
