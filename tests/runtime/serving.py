"""Clients of a batcher: they submit requests and note all that they are told."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from colibri_mmap import Engine
from colibri_mmap.runtime.batcher import Batcher, Ticket
from colibri_mmap.runtime.events import (
    Event,
    Failed,
    Finished,
    PromptProgress,
    Started,
    TokenEvent,
)
from colibri_mmap.runtime.generation import Request
from colibri_mmap.runtime.tokenwriter import Token

PATIENCE = 120.0  # seconds: other programs may stop this one for a while


@dataclass(frozen=True)
class Said:
    """A reply: its tokens, and why it ended."""

    tokens: tuple[Token, ...]
    reason: str

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Client:
    """The owner of one request; `then` is called with each event, in the batcher's thread."""

    def __init__(
        self,
        batcher: Batcher,
        request: Request,
        then: Callable[[Client, Event], None] = lambda client, event: None,
    ) -> None:
        self.events: list[Event] = []
        self._then = then
        self.has_ticket = threading.Event()
        self.ticket: Ticket = batcher.submit(request, self._note)
        self.has_ticket.set()

    def _note(self, event: Event) -> None:
        self.events.append(event)
        self._then(self, event)

    def cancel(self) -> None:
        assert self.has_ticket.wait(PATIENCE)
        self.ticket.cancel()

    @property
    def tokens(self) -> list[Token]:
        return [event.token for event in self.events if isinstance(event, TokenEvent)]

    def end(self) -> Finished | Failed:
        """The last event; asserts that all came in order, and only one of this kind."""
        assert self.ticket.wait(PATIENCE)
        kinds = [type(event) for event in self.events]
        assert kinds[-1] in (Finished, Failed)
        order = {Started: 0, PromptProgress: 1, TokenEvent: 2, Finished: 3, Failed: 3}
        ranks = [order[kind] for kind in kinds]
        assert ranks == sorted(ranks)
        assert ranks.count(3) == 1
        assert ranks.count(0) <= 1
        progress = [event for event in self.events if isinstance(event, PromptProgress)]
        assert [p.done for p in progress] == sorted({p.done for p in progress})
        last = self.events[-1]
        assert isinstance(last, Finished | Failed)
        return last

    def said(self) -> Said:
        """The reply, which must not have failed."""
        last = self.end()
        assert isinstance(last, Finished), last
        return Said(tuple(self.tokens), last.reason)


def alone(engine: Engine, request: Request) -> Said:
    """What the engine says to a request when there is no other, without what it remembers."""
    reply = engine.prepare(request)
    reply.begin(engine.new_sequence())
    tokens: list[Token] = []
    while not reply.finished:
        for row in engine.run([reply]):
            tokens += reply.advance(row)
    assert reply.reason is not None
    return Said(tuple(tokens), reply.reason)
