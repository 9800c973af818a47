"""One reply of the model: streamed, interruptible, with a line of numbers below it."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from types import FrameType
from typing import TYPE_CHECKING

from colibri_mmap.cli.console import ProgressBar, silent_keyboard
from colibri_mmap.errors import ContextLengthError
from colibri_mmap.runtime.generation import Request
from colibri_mmap.runtime.replies import Content, Piece, Reasoning, ReplyFormat, ReplyParser

if TYPE_CHECKING:
    from colibri_mmap.runtime.engine import Engine
    from colibri_mmap.runtime.grammar import Grammar
    from colibri_mmap.runtime.sampling import Sampling
    from colibri_mmap.runtime.stats import Stats
    from colibri_mmap.runtime.template import ChatTemplate


@dataclass(frozen=True, slots=True)
class ReplySettings:
    """What every reply of a conversation has in common; `None` leaves the choice to the engine."""

    sampling: Sampling
    max_tokens: int | None = None
    template: ChatTemplate | None = None
    grammar: Grammar | None = None

    def again(self, attempt: int) -> ReplySettings:
        """The settings of a repeated reply: a fixed seed moves on, or it would not differ."""
        if self.sampling.seed is None:
            return self
        return replace(self, sampling=replace(self.sampling, seed=self.sampling.seed + attempt))


class Interrupt(AbstractContextManager["Interrupt"]):
    """Ctrl-C as a request that is honoured between two steps; a second one raises at once.

    A first one that raised anywhere could leave the engine in the middle of a change; after the
    second the engine must not be used again. `on_request` is called once.
    """

    def __init__(self, on_request: Callable[[], None]) -> None:
        self.requested = False
        self.urgent = False
        self._on_request = on_request

    def __enter__(self) -> Interrupt:
        self._previous = signal.signal(signal.SIGINT, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _request(self, _signal: int, _frame: FrameType | None) -> None:
        if self.requested:
            self.urgent = True
            raise KeyboardInterrupt
        self.requested = True
        self._on_request()

    def check(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self.requested:
            raise KeyboardInterrupt


@dataclass(frozen=True, slots=True)
class Reply:
    """The text so far, the reasoning before it, and whether Ctrl-C ended it."""

    text: str
    reasoning: str
    interrupted: bool


class _Writing:
    """Takes the text of a reply apart, and passes it on."""

    def __init__(self, parser: ReplyParser, write: Callable[[str, bool], None]) -> None:
        self._parser, self._write = parser, write
        self._text: list[str] = []
        self._reasoning: list[str] = []

    def push(self, text: str) -> None:
        self._pass_on(self._parser.push(text))

    def ended(self, *, interrupted: bool) -> Reply:
        self._pass_on(self._parser.finish())
        return Reply("".join(self._text), "".join(self._reasoning), interrupted)

    def _pass_on(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, Reasoning):
                self._reasoning.append(piece.text)
                self._write(piece.text, True)
            elif isinstance(piece, Content):
                if self._reasoning and not self._text:
                    self._write("\n\n", True)
                self._text.append(piece.text)
                self._write(piece.text, False)


def stream_reply(
    engine: Engine,
    messages: list[dict[str, str]],
    settings: ReplySettings,
    write: Callable[[str, bool], None],
) -> Reply:
    """Pass the reply to `write` piece by piece, and whether a piece is reasoning.

    Ctrl-C ends it after the token, or the part of the prompt, that is being worked on; a second one
    raises KeyboardInterrupt.
    """
    template, grammar = settings.template or engine.template, settings.grammar
    prompt = template.render(messages, add_generation_prompt=True)
    reply_format = ReplyFormat.of(template.source, engine.tokenizer)
    parser = reply_format.parser(prompt)
    request = Request(
        ids=engine.prompt_ids(prompt),
        max_tokens=settings.max_tokens,
        sampling=settings.sampling,
        chat_prompt=prompt,
        shown=parser.shown,
        grammar=reply_format.content_grammar(grammar, prompt) if grammar else None,
    )
    writing = _Writing(parser, write)
    bar = ProgressBar()
    interrupt = Interrupt(lambda: bar("stopping (Ctrl-C again leaves at once)", 0, 0))

    def report_prompt(done: int, total: int) -> None:
        interrupt.check()
        bar("reading the prompt", done, total)

    with silent_keyboard(), interrupt, bar:
        try:
            tokens = engine.reply(request, report_prompt)
            with closing(tokens):
                for token in tokens:
                    bar.stop()
                    writing.push(token.text)
                    interrupt.check()
        except ContextLengthError as error:
            raise ContextLengthError(f"{error} (-c)") from None
        except KeyboardInterrupt:
            if interrupt.urgent:
                raise
            return writing.ended(interrupted=True)
        return writing.ended(interrupted=False)


def summary(engine: Engine) -> str:
    """The last reply in one line: speed, time to the first token, memory, tokens, context."""
    stats = engine.stats
    used = stats.prompt_tokens + stats.generated_tokens
    return " · ".join(
        (
            f"{stats.decode_tokens_per_second:.1f} tok/s",
            f"TTFT {stats.ttft_seconds:.2f} s",
            *_memory_figures(stats),
            f"{stats.generated_tokens} tokens",
            f"context {used}/{engine.context_length}",
        )
    )


def progress_line(engine: Engine) -> str:
    """The reply so far in one line."""
    stats = engine.update_stats()
    speed = f"{stats.decode_tokens_per_second:.1f} tok/s"
    return " · ".join((speed, *_memory_figures(stats), f"{stats.generated_tokens} tokens"))


def _memory_figures(stats: Stats) -> Iterator[str]:
    """Per token of the reply: experts that were on the GPU, of the others those in memory, bytes
    from disk, time waited for it."""
    if stats.vram_hits + stats.vram_misses:
        yield f"VRAM {stats.vram_hit_rate:.0%}"
        if stats.vram_uploads:
            yield f"{stats.vram_uploads_per_token:.1f} uploads/token"
    if stats.expert_hits + stats.expert_misses:
        yield f"hits {stats.expert_hit_rate:.0%}"
    yield f"{stats.bytes_read_per_token / 1e9:.2f} GB read/token"
    if stats.expert_misses:
        yield f"waiting {stats.wait_share:.0%}"


def full_context_hint(engine: Engine) -> str:
    """What to do when the context is full."""
    return f"the context of {engine.context_length} tokens is full: start with a larger -c"
