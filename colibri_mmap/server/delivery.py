"""Replies on their way from the thread that runs the model to the event loop.

A request asks for one reply or several (choices). Its `Delivery` submits them all and tells what
happens to them; leaving the context cancels what is still going on.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeAlias

from colibri_mmap.runtime import events
from colibri_mmap.runtime.batcher import Batcher, Ticket
from colibri_mmap.runtime.generation import Request
from colibri_mmap.runtime.replies.pieces import (
    Content,
    Piece,
    Reasoning,
    ToolCallArguments,
    ToolCallStart,
)
from colibri_mmap.runtime.stats import Stats
from colibri_mmap.runtime.tokenwriter import Token

from .metrics import Metrics
from .problems import ApiError, as_api_error

WAITING_SECONDS = 10.0  # without news, after which a client is told that there is none


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing has happened for a while: proxies and clients end connections that are silent."""


@dataclass(frozen=True, slots=True)
class Started:
    """A reply's turn has come; `cached` tokens of its prompt are known from before."""

    choice: int
    cached: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` tokens of the prompt are read."""

    choice: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Said:
    """A piece of a reply; calls of tools have ids. `tokens` are those of a piece of content."""

    choice: int
    piece: Piece
    tokens: tuple[Token, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """A reply is complete: "stop", "length" or "tool_calls"; the stop string that ended it."""

    choice: int
    reason: str
    stop_string: str | None
    stats: Stats


News: TypeAlias = Waiting | Started | Progress | Said | Ended


class Parser(Protocol):
    """Takes a reply apart."""

    def push(self, text: str) -> Sequence[Piece]:
        """What more of the text is known to be."""
        ...

    def finish(self) -> Sequence[Piece]:
        """The rest, once the reply is complete."""
        ...


class PlainText:
    """The parser of a reply that is all content."""

    def push(self, text: str) -> Sequence[Piece]:
        return [Content(text)] if text else []

    def finish(self) -> Sequence[Piece]:
        return []


@dataclass(slots=True)
class _Choice:
    """What is known of one reply so far; `tokens` belong to pieces that have not come yet."""

    parser: Parser
    tokens: list[Token] = field(default_factory=list)
    calls: int = 0
    last_token: float | None = None


class Delivery(AbstractContextManager["Delivery"]):
    """An asynchronous iterator over the news of one request.

    It ends when each choice has `Ended`. What cannot be answered is an `ApiError`, here when it
    is refused at once.
    """

    def __init__(
        self,
        batcher: Batcher,
        requests: Sequence[Request],
        parsers: Sequence[Parser],
        metrics: Metrics,
    ) -> None:
        self._metrics, self._began = metrics, time.perf_counter()
        self._choices = [_Choice(parser) for parser in parsers]
        self._left = len(requests)
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, events.Event]] = asyncio.Queue()
        self._news: deque[News] = deque()
        self._tickets: list[Ticket] = []
        try:
            for choice, request in enumerate(requests):
                self._tickets.append(batcher.submit(request, partial(self._post, choice)))
        except Exception as error:
            self._cancel()
            raise as_api_error(error) from error

    def __exit__(self, *_: object) -> None:
        self._cancel()

    def _cancel(self) -> None:
        for ticket in self._tickets:
            ticket.cancel()

    def __aiter__(self) -> Delivery:
        return self

    async def __anext__(self) -> News:
        while not self._news:
            if not self._left:
                raise StopAsyncIteration
            try:
                async with asyncio.timeout(WAITING_SECONDS):
                    choice, event = await self._events.get()
            except TimeoutError:
                return Waiting()
            self._take(choice, event)
        return self._news.popleft()

    # -------------------------------------------------------------------------- events
    def _post(self, choice: int, event: events.Event) -> None:
        """Hand an event over; called in the batcher's thread, also after the loop has ended."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._events.put_nowait, (choice, event))

    def _take(self, number: int, event: events.Event) -> None:
        choice = self._choices[number]
        match event:
            case events.Started():
                self._news.append(Started(number, event.cached_tokens))
            case events.PromptProgress():
                self._news.append(Progress(number, event.done, event.total))
            case events.TokenEvent():
                self._count(choice)
                choice.tokens.append(event.token)
                self._say(number, choice.parser.push(event.token.text))
            case events.Finished():
                self._finish(number, event)
            case events.Failed():
                raise as_api_error(event.error)

    def _finish(self, number: int, event: events.Finished) -> None:
        if event.reason == "timeout":
            raise ApiError(504, "the reply took longer than the server allows", code="timeout")
        if event.reason == "cancelled":
            raise ApiError(503, "the server is ending", code="server_ending")
        choice = self._choices[number]
        self._say(number, choice.parser.finish())
        reason = "stop" if event.reason == "stop" else "length"
        if choice.calls and reason == "stop":
            reason = "tool_calls"
        self._news.append(Ended(number, reason, event.stop_string, event.stats))
        self._left -= 1

    def _say(self, number: int, pieces: Sequence[Piece]) -> None:
        choice = self._choices[number]
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                choice.calls += 1
                piece = replace(piece, id=piece.id or f"call_{uuid.uuid4().hex[:24]}")
            tokens, choice.tokens = choice.tokens, []
            self._news.append(
                Said(number, piece, tuple(tokens) if isinstance(piece, Content) else ())
            )

    def _count(self, choice: _Choice) -> None:
        now, before = time.perf_counter(), choice.last_token
        choice.last_token = now
        if before is None:
            self._metrics.count_first_token(now - self._began)
        else:
            self._metrics.count_token(now - before)


# ------------------------------------------------------------------------------ as a whole
@dataclass(slots=True)
class Call:
    """A tool call of a reply; `arguments` as the model wrote them, JSON if all went well."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Reply:
    """One complete reply."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    end: Ended | None = None

    @property
    def stats(self) -> Stats:
        assert self.end is not None
        return self.end.stats

    @property
    def reason(self) -> str:
        assert self.end is not None
        return self.end.reason

    def add(self, said: Said) -> None:
        match said.piece:
            case Content(text):
                self.content += text
            case Reasoning(text):
                self.reasoning += text
            case ToolCallStart(index, name, call_id):
                self.calls[index] = Call(call_id or "", name)
            case ToolCallArguments(index, text):
                self.calls[index].arguments += text
        self.tokens += said.tokens


async def collected(delivery: Delivery, count: int) -> list[Reply]:
    """All `count` replies of a request, once they are complete."""
    replies = [Reply() for _ in range(count)]
    async for news in delivery:
        if isinstance(news, Said):
            replies[news.choice].add(news)
        elif isinstance(news, Ended):
            replies[news.choice].end = news
    return replies
