"""The engine: a model file opened for logits, generation and chat."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import index
from os import PathLike
from types import TracebackType
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ContextLengthError, FormatError
from ..format.gguf import GGUF, open_gguf
from . import scheduler
from .experts import ExpertStore
from .kv import STEP_TOKENS, KVCache, Trace, cache_bytes
from .models import load_model
from .ops import Mode, Ops
from .pages import IoCounters, io_counters
from .pool import Pool
from .predict import RouterPredictor
from .processor import default_threads
from .profile import load_profile
from .ram import PLANNED_CONTEXT, RamSettings, RamTier, open_ram_tier
from .sampling import Sampler, Sampling
from .stats import Stats
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .tokenwriter import Token, TokenWriter
from .tracefile import TraceHeader, TraceWriter
from .warmup import compile_tasks, model_tasks
from .weights import Weights

KVType = Literal["f16", "f32"]
Message = Mapping[str, Any]

_MAINTAIN_EVERY = 16  # tokens
_UNSTATED_CONTEXT = 4096  # tokens, where the file does not say what the model was made for


class Engine:
    """One model, one conversation at a time; a context manager.

    Successive calls reuse the keys and values of the tokens they have in common.
    """

    def __init__(
        self,
        gguf: GGUF,
        *,
        mode: Mode,
        threads: int,
        ctx: int | None,
        kv_type: KVType,
        memory: RamSettings,
        trace_file: str | PathLike[str] | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.gguf, self.mode, self.threads, self.kv_type = gguf, mode, threads, kv_type
        self.memory = memory
        self.tokenizer = Tokenizer.from_gguf(gguf)
        self._weights = Weights(gguf)
        self._pool: Pool | None = None
        self._tier: RamTier | None = None
        self._trace_writer: TraceWriter | None = None
        try:
            if trace_file is not None:
                self._trace_writer = TraceWriter(trace_file, TraceHeader.of(gguf))
            self._pool = Pool(threads)
            self._ops = Ops(self._pool, mode)
            store = ExpertStore(self._ops)
            self._model = load_model(self._weights, self._ops, store)
            self._check_vocabulary()
            self.context_length = ctx or self._model.context_length or _UNSTATED_CONTEXT
            planned = min(self.context_length, ctx or PLANNED_CONTEXT)
            kv_bytes = cache_bytes(self._model.kv_shapes, planned, kv_type)
            self._tier = open_ram_tier(self._weights, kv_bytes, memory)
            self.memory_plan = self._tier.plan
            if self._tier.pager is not None:
                store.pager = self._tier.pager
                if memory.prefetch:
                    store.predictor = RouterPredictor(self._ops, store.routers, memory.prefetch)
            compile_tasks(model_tasks(gguf, mode, kv_type), progress)
            self.template = ChatTemplate.of(self.tokenizer)
            self._tier.trunk.wait(progress and partial(progress, "reading weights"))
            self._weights.check()
            self._sequence = self._new_sequence(self.context_length)
        except BaseException:
            self.close()
            raise
        self.notices = [*self.tokenizer.notices, *self.template.notices, *self._context_notices()]
        self.notices += self._tier.notices
        self.stats = Stats()
        self._counted_from: IoCounters | None = None  # while a generation is going on
        self._generation = 0
        self._said: tuple[str, list[int]] = ("", [])

    @classmethod
    def open(
        cls,
        path: str | PathLike[str],
        *,
        mode: Mode = "int8",
        threads: int | None = None,
        ctx: int | None = None,
        kv_type: KVType | None = None,
        memory: RamSettings | None = None,
        profile: bool = True,
        trace_file: str | PathLike[str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Engine:
        """Open a GGUF file, any shard of one, a directory or a container.

        `mode`: "int8" rounds activations to 8 bit where weights are quantised, "exact" computes
        in float32. `ctx` tokens of context (default: the model's). `kv_type` "f16" (default) or
        "f32" (default in exact mode). `memory` says how RAM is used; with `profile`, what it and
        `threads` leave open is as `tune` found best. The routing of every generated token is
        appended to `trace_file`. `progress(stage, done, total)` tells of kernels being compiled and
        weights being read.
        """
        if mode not in ("int8", "exact"):
            raise ArgumentError(f"mode {mode!r}: choose int8 or exact")
        kv_type = kv_type or ("f32" if mode == "exact" else "f16")
        if kv_type not in ("f16", "f32"):
            raise ArgumentError(f"KV type {kv_type!r}: choose f16 or f32")
        if threads is not None and not 1 <= threads <= 1024:
            raise ArgumentError(f"threads must be 1 to 1024, not {threads}")
        if ctx is not None and ctx < 1:
            raise ArgumentError(f"the context must hold at least 1 token, not {ctx}")
        gguf = open_gguf(path)
        tuned = load_profile(gguf) if profile else None
        return cls(
            gguf,
            mode=mode,
            threads=threads or (tuned.threads if tuned else default_threads()),
            ctx=ctx,
            kv_type=kv_type,
            memory=(memory or RamSettings()).tuned(tuned),
            trace_file=trace_file,
            progress=progress,
        )

    def close(self) -> None:
        """End the threads and unmap the files; a second call does nothing."""
        if self._tier is not None:
            self._tier.close()
            self._tier = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None
        if self._trace_writer is not None:
            self._trace_writer.close()
            self._trace_writer = None
        self._weights.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------- logits
    def logits(self, ids: Iterable[int], trace: Trace | None = None) -> NDArray[np.float32]:
        """Logits float32 [T, n_vocab] of every position: one pass over the ids, from fresh state.

        `trace` records the chosen experts and their weights.
        """
        ids = self._checked(ids)
        sequence = self._new_sequence(len(ids))
        sequence.announce(len(ids), self._model.length_limit)
        chunks = [self._step(sequence, part, "all", trace) for part in _chunks(ids)]
        return np.concatenate(chunks)

    # -------------------------------------------------------------------------- generation
    def generate(
        self,
        ids: Iterable[int],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Generator[Token, None, None]:
        """Continue the ids; ends at an end token, a stop string, `max_tokens` or the context's end.

        `progress(done, total)` is called as the prompt is read. Settings and ids are checked at
        once, the work is done as tokens are asked for. Starting another generation ends this one.
        """
        ids = self._checked(ids)
        if len(ids) >= self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens, the context holds {self.context_length} and a "
                "reply needs room: shorten the prompt or open the model with a larger context"
            )
        if max_tokens is not None and max_tokens < 1:
            raise ArgumentError(f"max_tokens must be at least 1, not {max_tokens}")
        sampling = sampling or Sampling()
        sampler = Sampler(sampling, self.tokenizer.vocab_size)
        limit = min(max_tokens or self.context_length, self.context_length - len(ids))
        return self._generate(ids, limit, max_tokens, sampling, sampler, progress)

    def chat(
        self,
        messages: Sequence[Message],
        max_tokens: int | None = None,
        sampling: Sampling | None = None,
        progress: Callable[[int, int], None] | None = None,
        template: ChatTemplate | None = None,
    ) -> Generator[Token, None, None]:
        """The reply to messages ({"role", "content"}), rendered by the model's chat template."""
        prompt = (template or self.template).render(messages, add_generation_prompt=True)
        ids = self._prompt_ids(prompt)
        return self._chat(prompt, ids, self.generate(ids, max_tokens, sampling, progress))

    def reset(self) -> None:
        """Forget all tokens: the next generation starts from nothing."""
        self._sequence.rewind(0)
        self._generation += 1

    def _chat(
        self, prompt: str, ids: list[int], tokens: Generator[Token, None, None]
    ) -> Generator[Token, None, None]:
        reply: list[int] = []
        text = ""
        try:
            for token in tokens:
                reply.append(token.id)
                if text == "" and self.tokenizer.is_sentencepiece:
                    shown = token.text.removeprefix(" ")  # the space that begins every word
                    text = token.text
                    yield Token(token.id, shown)
                else:
                    text += token.text
                    yield token
        finally:
            # Of a reply that a stop string cut, the tokens say more than was shown.
            whole = self.tokenizer.decode(reply, skip_special=True, at_start=False) == text
            self._said = (prompt + text, ids + reply) if whole else ("", [])

    def _prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a rendered prompt; what was said before keeps the ids it was generated with.

        A reply that is tokenised again may come out as other tokens, and would be computed again.
        """
        text, ids = self._said
        if text and prompt.startswith(text):
            rest = prompt[len(text) :]
            more = self.tokenizer.encode(
                rest, add_special=False, parse_special=True, at_start=False
            )
            return ids + more
        return self.tokenizer.encode(prompt, add_special=True, parse_special=True)

    def _generate(
        self,
        ids: list[int],
        limit: int,
        max_tokens: int | None,
        sampling: Sampling,
        sampler: Sampler,
        progress: Callable[[int, int], None] | None,
    ) -> Generator[Token, None, None]:
        self._check_open()
        self._generation += 1
        mine = self._generation
        self.stats = stats = Stats(prompt_tokens=len(ids), finish_reason="cancelled")
        self._take_pager_stats()
        self._counted_from, started = io_counters(), time.perf_counter()
        try:
            logits = self._prefill(ids, stats, progress)
            stats.prefill_seconds = time.perf_counter() - started
            self.update_stats()
            stats.prefill_bytes_read, stats.prefill_wait_seconds = (
                stats.bytes_read,
                stats.wait_seconds,
            )
            self._take_pager_stats()
            decode_started = time.perf_counter()
            writer = TokenWriter(self.tokenizer, sampling.stop)
            while True:
                token = sampler.sample(logits[: self.tokenizer.vocab_size], ids)
                if stats.generated_tokens == 0:
                    stats.ttft_seconds = time.perf_counter() - started
                if token in self.tokenizer.end_ids and not sampling.ignore_eos:
                    stats.finish_reason = "stop"
                    break
                ids.append(token)
                stats.generated_tokens += 1
                stats.decode_seconds = time.perf_counter() - decode_started
                yield from writer.push(token)
                if writer.stopped:
                    stats.finish_reason = "stop"
                    break
                if stats.generated_tokens >= limit:
                    stats.finish_reason = "length" if limit == max_tokens else "context"
                    break
                self._check_open()
                if mine != self._generation:
                    raise ArgumentError("another generation was started: this one cannot go on")
                logits = self._step(self._sequence, [token], "last")[0]
                if self._tier is not None and stats.generated_tokens % _MAINTAIN_EVERY == 1:
                    self._tier.maintain()
            yield from writer.finish()
        finally:
            if mine == self._generation:
                self.update_stats()
                self._counted_from = None

    def _prefill(
        self, ids: list[int], stats: Stats, progress: Callable[[int, int], None] | None
    ) -> NDArray[np.float32]:
        """Read the prompt, except what the cache has of it; the logits of its last token."""
        sequence = self._sequence
        sequence.announce(len(ids), self._model.length_limit)
        sequence.rewind(_common_prefix(sequence.ids, ids[:-1]))
        stats.cached_tokens = known = len(sequence.ids)

        def read(part: Sequence[int], wanted: Literal["none", "last"]) -> NDArray[np.float32]:
            if progress is not None:
                progress(len(sequence.ids), len(ids))
            return self._step(sequence, part, wanted)

        *early, final = _chunks(ids[known:])
        for part in early:
            read(part, "none")
        logits: NDArray[np.float32] = read(final, "last")[0]
        if progress is not None:
            progress(len(ids), len(ids))
        return logits

    def _step(
        self,
        sequence: scheduler.Sequence,
        tokens: Sequence[int],
        wanted: Literal["none", "last", "all"],
        trace: Trace | None = None,
    ) -> NDArray[np.float32]:
        """Tokens through the model; ModelReadError if weights vanished while they were used."""
        known = len(sequence.ids)
        if known + len(tokens) > sequence.announced:
            lost = sequence.announce(known + len(tokens), self._model.length_limit)
            for part in _chunks(lost):
                self._step(sequence, part, "none")
        writer = self._trace_writer if trace is None else None
        if writer is not None:
            trace = Trace()
        try:
            logits = scheduler.step(self._model, self._ops, [(sequence, tokens)], wanted, trace)
            self._weights.check()
        except BaseException:
            sequence.rewind(known)
            self._weights.mend()
            raise
        if writer is not None and trace is not None:
            writer.write(trace.experts)
        return logits

    def update_stats(self) -> Stats:
        """Bring `stats` up to date while a generation is going on."""
        stats = self.stats
        if self._counted_from is not None:
            used = io_counters() - self._counted_from
            stats.bytes_read, stats.major_faults = used.bytes_read, used.major_faults
            if self._tier is not None and self._tier.pager is not None:
                paged = self._tier.pager.stats
                stats.expert_hits, stats.expert_misses = paged.hits, paged.misses
                stats.wait_seconds = paged.wait_seconds
                stats.prefetched_experts = paged.prefetched
                stats.prefetch_hits = paged.prefetch_hits
        return stats

    def _take_pager_stats(self) -> None:
        if self._tier is not None and self._tier.pager is not None:
            self._tier.pager.take_stats()

    # -------------------------------------------------------------------------- checks
    def _check_open(self) -> None:
        if self._pool is None:
            raise ArgumentError("the engine is closed: open the model again")

    def _new_sequence(self, context: int) -> scheduler.Sequence:
        return scheduler.Sequence(KVCache(self._model.kv_shapes, context, self.kv_type))

    def _checked(self, ids: Iterable[int]) -> list[int]:
        """The ids as a list of our own, numpy integers too; ArgumentError if one is no token."""
        self._check_open()
        try:
            checked = [index(token) for token in ids]
        except TypeError as error:
            raise ArgumentError(f"token ids must be integers: {error}") from error
        if not checked:
            raise ArgumentError("there are no tokens to start from: give at least one")
        for token in checked:
            if not 0 <= token < self._model.vocabulary:
                raise ArgumentError(
                    f"token id {token} is outside the vocabulary of {self._model.vocabulary}"
                )
        return checked

    def _context_notices(self) -> list[str]:
        stated, used = self._model.context_length, self.context_length
        if stated == 0:
            return [f"the file states no context length; {used} tokens are used"]
        if used > stated:
            return [f"the model was made for {stated} tokens of context; beyond, answers get worse"]
        return []

    def _check_vocabulary(self) -> None:
        rows, tokens = self._model.vocabulary, self.tokenizer.vocab_size
        if tokens > rows:
            raise FormatError(
                self.gguf.path,
                "tensor 'token_embd.weight'",
                f"has {rows} rows, but the tokenizer has {tokens} tokens",
            )


def _chunks(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    for start in range(0, len(ids), STEP_TOKENS):
        yield ids[start : start + STEP_TOKENS]


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    for length, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return length
    return min(len(a), len(b))
