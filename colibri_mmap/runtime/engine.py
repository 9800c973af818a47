"""The engine: a model file opened for logits, generation and chat."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import index
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, FormatError, ResourceError
from ..format.gguf import GGUF, open_gguf
from . import scheduler
from .device import ContextOutgrew
from .experts import ExpertStore
from .expertview import ExpertView
from .generation import Generation, Request, Surroundings
from .kv import STEP_TOKENS, KVCache, Trace, cache_bytes
from .modelkey import model_key
from .models import load_model
from .ops import Mode, Ops
from .pager import PagerStats
from .pages import io_counters
from .pool import Pool
from .predict import RouterPredictor
from .prefixstore import PrefixStore
from .processor import default_threads
from .profile import load_profile
from .ram import PLANNED_CONTEXT, RamSettings, RamTier, open_ram_tier
from .sampling import Sampling
from .stats import Counters, Stats
from .template import ChatTemplate
from .tokenizer import Tokenizer
from .tokenwriter import Token
from .tracefile import TraceHeader, TraceWriter
from .transcripts import Transcripts
from .vramsettings import VramSettings, find_device
from .warmup import compile_tasks, model_tasks
from .weights import Weights

if TYPE_CHECKING:
    from .device import DeviceBackend
    from .vramtier import DeviceReport, VramTier

KVType = Literal["f16", "f32"]
Message = Mapping[str, Any]

_MAINTAIN_EVERY = 16  # steps
_UNSTATED_CONTEXT = 4096  # tokens, where the file does not say what the model was made for


class Engine:
    """An open model; a context manager.

    `generate` and `chat` make one reply at a time; successive ones reuse the keys and values of the
    tokens they have in common, with a `store` also those of earlier ones. `prepare` and `run` are
    for those who make several (Batcher): steps may be run from any thread, one after the other.
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
        gpu: VramSettings,
        parallel: int,
        trace_file: str | PathLike[str] | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.gguf, self.mode, self.threads, self.kv_type = gguf, mode, threads, kv_type
        self.memory, self.gpu = memory, gpu
        self.tokenizer = Tokenizer.from_gguf(gguf)
        self._weights = Weights(gguf)
        self._pool: Pool | None = None
        self._tier: RamTier | None = None
        self._vram: VramTier | None = None
        self._trace_writer: TraceWriter | None = None
        self._lock = threading.Lock()  # held while a step runs
        self._steps = 0
        try:
            device = find_device(gpu, mode)
            if trace_file is not None:
                self._trace_writer = TraceWriter(trace_file, TraceHeader.of(gguf))
            self._pool = Pool(threads)
            self._ops = Ops(self._pool, mode)
            store = ExpertStore(self._ops)
            self._model = load_model(self._weights, self._ops, store)
            self._check_vocabulary()
            self.context_length = ctx or self._model.context_length or _UNSTATED_CONTEXT
            planned = min(self.context_length, ctx or PLANNED_CONTEXT)
            kv_bytes = parallel * cache_bytes(self._model.kv_shapes, planned, kv_type)
            self._tier = open_ram_tier(self._weights, kv_bytes, memory)
            self.memory_plan, self._pager = self._tier.plan, self._tier.pager
            self.sequence_room = self._tier.sequence_room  # bytes, of all sequences together
            if self._pager is not None:
                store.pager = self._pager
                if memory.prefetch:
                    store.predictor = RouterPredictor(self._ops, store.routers, memory.prefetch)
            compile_tasks(model_tasks(gguf, mode, kv_type), progress)
            self.template = ChatTemplate.of(self.tokenizer)
            self._tier.trunk.wait(progress and partial(progress, "reading weights"))
            self._weights.check()
            gpu_notices: Sequence[str] = ()
            if device is not None:
                gpu_notices = self._open_vram(device, store, parallel * planned)
            self._sequence = self.new_sequence()
        except BaseException:
            self.close()
            raise
        self.notices = [*self.tokenizer.notices, *self.template.notices, *self._context_notices()]
        self.notices += self._tier.notices
        self.notices += gpu_notices
        self.stats = Stats()
        self.store: PrefixStore | None = None  # for `generate` and `chat`; its owner closes it
        self._generation: Generation | None = None  # whose sequence is the engine's own
        self._surroundings = Surroundings(
            self.tokenizer,
            self.context_length,
            self._model.length_limit,
            Transcripts(),
            self.counters,
        )

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
        gpu: VramSettings | None = None,
        profile: bool = True,
        parallel: int = 1,
        trace_file: str | PathLike[str] | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> Engine:
        """Open a GGUF file, any shard of one, a directory or a container.

        `mode`: "int8" rounds activations to 8 bit where weights are quantised, "exact" computes
        in float32. `ctx` tokens of context (default: the model's). `kv_type` "f16" (default) or
        "f32" (default in exact mode). `memory` and `gpu` say how RAM and VRAM are used; with
        `profile`, what `memory` and `threads` leave open is as `tune` found best. Memory is planned
        for `parallel` sequences. The routing of every generated token is appended to `trace_file`.
        `progress(stage, done, total)` tells of kernels being compiled and weights being read.
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
        if parallel < 1:
            raise ArgumentError(f"parallel must be at least 1, not {parallel}")
        gguf = open_gguf(path)
        tuned = load_profile(gguf) if profile else None
        return cls(
            gguf,
            mode=mode,
            threads=threads or (tuned.threads if tuned else default_threads()),
            ctx=ctx,
            kv_type=kv_type,
            memory=(memory or RamSettings()).tuned(tuned),
            gpu=gpu or VramSettings(),
            parallel=parallel,
            trace_file=trace_file,
            progress=progress,
        )

    def close(self) -> None:
        """End the threads and unmap the files, after the step that is running; may be repeated."""
        with self._lock:
            if self._vram is not None:
                self._vram.close()
                self._vram = None
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
        return np.concatenate(
            [
                self._step([(sequence, ids[start : start + STEP_TOKENS])], "all", trace)
                for start in range(0, len(ids), STEP_TOKENS)
            ]
        )

    # -------------------------------------------------------------------------- one reply
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
        request = Request(ids=ids, max_tokens=max_tokens, sampling=sampling or Sampling())
        return self._generate(self.prepare(request), progress)

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
        request = Request(
            ids=self.prompt_ids(prompt),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(),
            chat_prompt=prompt,
        )
        return self.reply(request, progress)

    def reply(
        self, request: Request, progress: Callable[[int, int], None] | None = None
    ) -> Generator[Token, None, None]:
        """The reply to a request, which says more than `generate` and `chat` can."""
        return self._generate(self.prepare(request), progress)

    def prompt_ids(self, prompt: str) -> list[int]:
        """The ids of a chat's rendered prompt; what was said before keeps those it was made of."""
        text, ids = self._surroundings.transcripts.longest(prompt)
        if not text:
            return self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        rest = prompt[len(text) :]
        return ids + self.tokenizer.encode(
            rest, add_special=False, parse_special=True, at_start=False
        )

    def reset(self) -> None:
        """Forget all tokens: the next generation starts from nothing."""
        self._sequence.rewind(0)
        self._generation = None

    def update_stats(self) -> Stats:
        """Bring `stats` up to date while a generation is going on."""
        if self._generation is not None:
            self._generation.update_stats()
        return self.stats

    def _generate(
        self, generation: Generation, progress: Callable[[int, int], None] | None
    ) -> Generator[Token, None, None]:
        self._check_open()
        self._generation, self.stats = generation, generation.stats
        store, sequence = self.store, self._sequence
        if store is not None:
            sequence = store.take(generation.ids)
        generation.begin(sequence)
        total = len(generation.ids)
        try:
            while not generation.finished:
                if progress is not None and generation.stats.generated_tokens == 0:
                    progress(len(sequence.ids), total)
                logits = self.run([generation])
                if store is not None and generation.stats.generated_tokens == 0:
                    store.checkpoint(sequence)
                if not len(logits):
                    continue
                if progress is not None and generation.stats.generated_tokens == 0:
                    progress(total, total)
                yield from generation.advance(logits[0])
                if self._generation is not generation and not generation.finished:
                    raise ArgumentError("another generation was started: this one cannot go on")
        finally:
            if not generation.finished:
                generation.end("cancelled")
            if store is not None:
                store.give(sequence)

    def prefix_store(
        self,
        *,
        ram_bytes: int,
        directory: Path | None = None,
        disk_bytes: int = 0,
        keep_latest: bool = False,
        notify: Callable[[str], None] = lambda notice: None,
    ) -> PrefixStore:
        """A store for this engine's sequences, in memory and in a directory; see PrefixStore."""
        return PrefixStore(
            self.new_sequence,
            model_key(self.gguf, self.mode, self.kv_type, self._model.kv_shapes),
            ram_bytes=ram_bytes,
            directory=directory,
            disk_bytes=disk_bytes,
            length_limit=self._model.length_limit,
            keep_latest=keep_latest,
            notify=notify,
        )

    @property
    def transcripts(self) -> Transcripts:
        """The ids of what was said."""
        return self._surroundings.transcripts

    # -------------------------------------------------------------------------- several replies
    def prepare(self, request: Request) -> Generation:
        """A reply that can begin; what is wrong with the request is an error here and now."""
        request = replace(request, ids=self._checked(request.ids))
        return Generation(request, self._surroundings)

    def new_sequence(self) -> scheduler.Sequence:
        """An empty sequence, with room for the whole context."""
        return self._new_sequence(self.context_length)

    def sequence_bytes(self, tokens: int) -> int:
        """What a sequence of so many tokens takes of `sequence_room`."""
        return cache_bytes(self._model.kv_shapes, min(tokens, self.context_length), self.kv_type)

    def run(self, generations: Sequence[Generation]) -> NDArray[np.float32]:
        """One step: the next tokens of a reply, or of several that each have one token pending.

        Logits float32 [replies, n_vocab], of what follows; [0, n_vocab] for a part of a prompt.
        Whatever error ends the step, the sequences are what they were before it.
        """
        assert len(generations) == 1 or all(each.pending == 1 for each in generations)
        work = [(each.sequence, each.next_tokens()) for each in generations]
        whole = all(
            each.pending == len(tokens) for each, (_, tokens) in zip(generations, work, strict=True)
        )
        return self._step(work, "last" if whole else "none")

    def _step(
        self,
        work: Sequence[tuple[scheduler.Sequence, Sequence[int]]],
        wanted: Literal["none", "last", "all"],
        trace: Trace | None = None,
    ) -> NDArray[np.float32]:
        """Tokens through the model; ModelReadError if weights vanished while they were used."""
        with self._lock:
            self._check_open()
            writer = self._trace_writer if trace is None else None
            if writer is not None:
                trace = Trace()
            known = [len(sequence.ids) for sequence, _ in work]
            try:
                logits = self._forward(work, wanted, trace)
                self._weights.check()
            except BaseException:
                for (sequence, _), length in zip(work, known, strict=True):
                    sequence.rewind(length)
                self._weights.mend()
                raise
            if writer is not None and trace is not None:
                for part in _passes(trace, len(work)):
                    writer.write(part)
            if self._tier is not None and self._steps % _MAINTAIN_EVERY == 0:
                self._tier.maintain()
            self._steps += 1
            return logits

    def counters(self) -> Counters:
        """What this process has read so far, and the experts of this engine."""
        io, paged = io_counters(), self._pager.stats if self._pager else PagerStats()
        return Counters(
            io.bytes_read,
            io.major_faults,
            paged.hits,
            paged.misses,
            paged.wait_seconds,
            paged.prefetched,
            paged.prefetch_hits,
            *(() if self._vram is None else self._vram.counts()),
        )

    def _forward(
        self,
        work: Sequence[tuple[scheduler.Sequence, Sequence[int]]],
        wanted: Literal["none", "last", "all"],
        trace: Trace | None,
    ) -> NDArray[np.float32]:
        """A step; blocks leave a GPU that a context has outgrown."""
        try:
            return scheduler.step(self._model, self._ops, work, wanted, trace)
        except ContextOutgrew as error:
            if self._vram is None or self._vram.trunk is None:
                raise
            self._vram = self._vram.retreat()
            self.notices.append(f"attention goes on on the CPU: {error}")
            return scheduler.step(self._model, self._ops, work, wanted, trace)

    def device_report(self) -> DeviceReport | None:
        """What the model has on a GPU now; None if there is none."""
        return None if self._vram is None else self._vram.report()

    def expert_view(self) -> ExpertView | None:
        """A view of the experts for somebody who watches; None if there are none."""
        if self._pager is None:
            return None

        def in_vram() -> dict[int, NDArray[np.bool_]]:
            offload = None if self._vram is None else self._vram.offload
            return {} if offload is None else offload.resident()

        chosen = self.gguf.int(".expert_used_count", minimum=1)
        return ExpertView(self._pager, chosen, in_vram)

    def _open_vram(self, device: DeviceBackend, store: ExpertStore, context: int) -> Sequence[str]:
        """Open the tier on a device, planned for `context` tokens; what the user should know."""
        from .vramtier import open_vram_tier  # of no use, and 50 ms to import, without a GPU

        try:
            self._vram = open_vram_tier(
                device,
                self._weights,
                self._model,
                store,
                self._ops,
                self.gpu,
                context=context,
                kv_type=self.kv_type,
                pinned=self.memory.pin,
                learn=self.memory.learn,
            )
        except ResourceError as error:
            device.close()
            if self.gpu.demanded:
                raise
            return [f"going on without the GPU: {error}"]
        self._weights.check()  # what was copied to the device must have been whole
        store.offload = self._vram.offload
        return self._vram.notices

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


def _passes(trace: Trace, sequences: int) -> Iterator[Mapping[int, NDArray[np.int64]]]:
    """A step as a trace file has it: a decode step of several replies is one step of each."""
    if sequences == 1:
        yield trace.experts
        return
    for row in range(sequences):
        yield {layer: ids[row : row + 1] for layer, ids in trace.experts.items()}
