"""Serving several requests with one engine: one thread runs all steps of the model.

It reads a part of one prompt, then lets every reply that is under way go on, by a token in each
step, so that an expert which several of them chose is read once; and so on by turns, which take
equally long. A reply is what it would be if it were the only one.

Prompts that are read at the same time take turns too, part by part: a long one may take minutes,
and a short one should not have to wait for it.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import ArgumentError, ColibriError, QueueFull, ResourceError
from .engine import Engine
from .events import Event, Failed, Finished, PromptProgress, Started, TokenEvent
from .generation import FinishReason, Generation, Request
from .prefixstore import PrefixStore
from .tokenwriter import Token

_SPEED_SECONDS = 10.0  # over which the speed is told
_REPLY_ROOM = 1024  # tokens of a reply that memory is kept for; more is asked for in time


class Ticket:
    """A request that was accepted; `cancel` and `wait` are its owner's, the rest the batcher's."""

    def __init__(
        self, generation: Generation, on_event: Callable[[Event], None], wake: Callable[[], None]
    ) -> None:
        self.generation = generation
        self._on_event, self._wake = on_event, wake
        self._cancelled = False
        self._ended = threading.Event()
        self.number = 0  # in the order in which requests leave the queue
        self.room = (0, 0)  # what is kept for its sequence: tokens, bytes

    def cancel(self) -> None:
        """End the request: in the queue, between the parts of its prompt, or between tokens."""
        self._cancelled = True
        self._wake()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the last event was delivered; whether it was."""
        return self._ended.wait(timeout)

    @property
    def over(self) -> FinishReason | None:
        """Why the request has to end before its reply is complete, if it has to."""
        if self._cancelled:
            return "cancelled"
        deadline = self.generation.request.deadline
        return "timeout" if deadline is not None and time.monotonic() >= deadline else None

    def tell(self, event: Event) -> None:
        """Deliver an event; a request whose owner cannot be told is cancelled."""
        try:
            self._on_event(event)
        except Exception:
            self._cancelled = True
        if isinstance(event, Finished | Failed):
            self._ended.set()


@dataclass(frozen=True, slots=True)
class Status:
    """What is going on, and what has been since the start.

    `finished` counts requests by the reason of their end. `tokens_per_second` is of all replies
    together in the time in which there were any, of the last seconds.
    """

    queued: int
    reading: int
    decoding: int
    tokens_per_second: float
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    finished: dict[FinishReason, int]
    failed: int


class Batcher:
    """Serves requests with an engine that nobody else closes meanwhile; a context manager.

    At most `parallel` requests are worked on, `queue_limit` more may wait. The store is the
    caller's, and used from the batcher's thread only.
    """

    def __init__(
        self, engine: Engine, store: PrefixStore, *, parallel: int = 4, queue_limit: int = 64
    ) -> None:
        if not 1 <= parallel <= 64:
            raise ArgumentError(f"parallel must be 1 to 64, not {parallel}")
        if queue_limit < 0:
            raise ArgumentError(f"the queue must hold at least 0 requests, not {queue_limit}")
        self._engine, self._store = engine, store
        self._parallel, self._queue_limit = parallel, queue_limit
        self._changed = threading.Condition()
        self._queue: deque[Ticket] = deque()
        self._active: list[Ticket] = []  # the prompt whose turn it is comes first
        self._owed = 0.0  # seconds by which replies got less time than prompts
        self._closed = False
        self._spoken: deque[tuple[float, int, float]] = deque()  # of turns: end, tokens, seconds
        self._finished: Counter[FinishReason] = Counter()
        self._begun = 0
        self._failed = self._prompt_tokens = self._cached_tokens = self._generated_tokens = 0
        self._thread = threading.Thread(target=self._serve, name="colibri-batcher", daemon=True)
        self._thread.start()

    # -------------------------------------------------------------------------- for all threads
    def submit(self, request: Request, on_event: Callable[[Event], None]) -> Ticket:
        """Accept a request; mistakes in it, and QueueFull, are raised here.

        `on_event` is called in the batcher's thread, and holds up all replies while it runs.
        """
        ticket = Ticket(self._engine.prepare(request), on_event, self._wake)
        with self._changed:
            if self._closed:
                raise ColibriError("no more requests are accepted: the program is ending")
            if len(self._queue) + len(self._active) >= self._parallel + self._queue_limit:
                raise QueueFull(
                    f"{len(self._active)} requests are being worked on and {len(self._queue)} wait:"
                    " try again later"
                )
            self._queue.append(ticket)
            self._changed.notify()
        return ticket

    def status(self) -> Status:
        """The figures of this moment."""
        with self._changed:
            self._forget_spoken()
            seconds = sum(seconds for _, _, seconds in self._spoken)
            tokens = sum(tokens for _, tokens, _ in self._spoken)
            reading = sum(ticket.generation.pending > 1 for ticket in self._active)
            return Status(
                len(self._queue),
                reading,
                len(self._active) - reading,
                tokens / seconds if seconds else 0.0,
                self._prompt_tokens,
                self._cached_tokens,
                self._generated_tokens,
                dict(self._finished),
                self._failed,
            )

    def close(self) -> None:
        """Cancel all requests and end the thread; may be repeated, not called from `on_event`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def __enter__(self) -> Batcher:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    # -------------------------------------------------------------------------- the thread
    def _serve(self) -> None:
        while self._wait_for_work():
            try:
                self._turn()
            except Exception as error:  # a bug, or no memory: it must not end the others to come
                for ticket in self._active.copy() or self._tickets()[:1]:
                    self._fail(ticket, error)
        for ticket in self._tickets():
            try:
                self._end(ticket, "cancelled")
            except Exception as error:
                self._fail(ticket, error)

    def _wait_for_work(self) -> bool:
        """Wait until there is something to do; False if it is to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._queue or self._active)
            return not self._closed

    def _tickets(self) -> list[Ticket]:
        with self._changed:
            return [*self._active, *self._queue]

    def _turn(self) -> None:
        """A part of one prompt if it is time to, and a token of every reply that is under way."""
        self._sweep()
        self._shrink()
        self._admit()
        self._sweep()
        begun, spoken = time.monotonic(), self._generated_tokens
        waiting = any(ticket.generation.pending == 1 for ticket in self._active)
        if self._owed <= 0:
            self._read_a_part()
            self._sweep()
        started = time.monotonic()
        if not waiting:  # for the part of a prompt
            begun, spoken = started, self._generated_tokens
        decoding = [ticket for ticket in self._active if ticket.generation.pending == 1]
        if decoding:
            self._step(decoding)
            self._owed = max(0.0, self._owed - (time.monotonic() - started))
            self._count_speed(self._generated_tokens - spoken, begun)
        else:
            self._owed = 0.0

    def _sweep(self) -> None:
        """End what was cancelled or is late."""
        for ticket in self._tickets():
            reason = ticket.over
            if reason is not None:
                self._end(ticket, reason)

    def _read_a_part(self) -> None:
        """The next part of the prompt whose turn it is."""
        reading = next((t for t in self._active if t.generation.pending > 1), None)
        if reading is None:
            return
        started = time.monotonic()
        self._step([reading])
        self._owed = time.monotonic() - started
        with self._changed:
            if reading in self._active:
                self._active.remove(reading)
                self._active.append(reading)

    def _step(self, tickets: list[Ticket]) -> None:
        """One step of the model; an error in it fails the requests that took part."""
        try:
            logits = self._engine.run([ticket.generation for ticket in tickets])
        except Exception as error:
            # A disk that failed left the sequences as they were; after a bug, who knows.
            for ticket in tickets:
                self._fail(ticket, error, keep=isinstance(error, ColibriError))
            return
        for ticket in tickets:
            self._note_prompt(ticket)
        spoken = 0
        for ticket, row in zip(tickets, logits, strict=False):
            try:
                tokens = ticket.generation.advance(row)
            except Exception as error:
                self._fail(ticket, error)
                continue
            spoken += 1
            self._tell_tokens(ticket, tokens)
            if ticket.generation.finished:
                self._conclude(ticket)
        with self._changed:
            self._generated_tokens += spoken

    def _note_prompt(self, ticket: Ticket) -> None:
        """Tell how much of a prompt is read, and let the store see it."""
        generation = ticket.generation
        if generation.stats.generated_tokens == 0:
            self._store.checkpoint(generation.sequence)
            known, total = len(generation.sequence.ids), generation.stats.prompt_tokens
            ticket.tell(PromptProgress(known, total))

    def _count_speed(self, tokens: int, begun: float) -> None:
        with self._changed:
            now = time.monotonic()
            self._spoken.append((now, tokens, now - begun))
            self._forget_spoken()

    def _forget_spoken(self) -> None:
        since = time.monotonic() - _SPEED_SECONDS
        while self._spoken and self._spoken[0][0] < since:
            self._spoken.popleft()

    # -------------------------------------------------------------------------- memory
    def _room_for(self, ticket: Ticket) -> int:
        """The bytes that are kept for a sequence: some tokens ahead of what it has."""
        generation, (tokens, nbytes) = ticket.generation, ticket.room
        if tokens < len(generation.ids):
            tokens = min(len(generation.ids) + _REPLY_ROOM, generation.longest)
            nbytes = self._engine.sequence_bytes(tokens)
            ticket.room = tokens, nbytes
        return nbytes

    @property
    def _room(self) -> int:
        """The bytes of all sequences in use: what idle ones leave, at least what was planned."""
        engine = self._engine
        return max(engine.sequence_room - self._store.ram_bytes, engine.memory_plan.kv_bytes)

    def _shrink(self) -> None:
        """Give up the latest requests if the replies outgrow what memory there is."""
        while sum(map(self._room_for, self._active)) > self._room:
            latest = max(self._active, key=lambda ticket: ticket.number)
            self._fail(latest, self._no_memory(latest), keep=True)

    def _no_memory(self, ticket: Ticket) -> ResourceError:
        tokens, nbytes = ticket.room
        return ResourceError(
            f"{tokens} tokens of context take {nbytes / 1e9:.2f} GB, and all requests together can "
            f"have {self._room / 1e9:.2f} GB: shorten the request, or allow more "
            "memory"
        )

    # -------------------------------------------------------------------------- coming and going
    def _admit(self) -> None:
        """Let requests leave the queue, in order, while there is room for them."""
        while self._queue and len(self._active) < self._parallel:
            ticket = self._queue[0]
            taken = sum(map(self._room_for, self._active))
            if taken + self._room_for(ticket) <= self._room:
                self._begin(ticket)
            elif taken:
                return
            else:
                self._fail(ticket, self._no_memory(ticket))

    def _begin(self, ticket: Ticket) -> None:
        generation = ticket.generation
        with self._changed:
            self._queue.remove(ticket)
        try:
            generation.begin(self._store.take(generation.ids))
        except Exception as error:
            self._fail(ticket, error)
            return
        cached = generation.stats.cached_tokens
        with self._changed:
            self._active.append(ticket)
            self._prompt_tokens += generation.stats.prompt_tokens
            self._cached_tokens += cached
            ticket.number = self._begun = self._begun + 1
        ticket.tell(Started(generation.stats.prompt_tokens, cached))

    def _end(self, ticket: Ticket, reason: FinishReason) -> None:
        """End a request whose reply is not complete."""
        self._tell_tokens(ticket, ticket.generation.end(reason))
        self._conclude(ticket)

    def _conclude(self, ticket: Ticket) -> None:
        """The reply has ended."""
        generation = ticket.generation
        reason = generation.reason
        assert reason is not None
        begun = self._remove(ticket)
        with self._changed:
            self._finished[reason] += 1
        ticket.tell(Finished(reason, generation.stats, generation.stop_string))
        if begun:
            self._store.give(generation.sequence)

    def _fail(self, ticket: Ticket, error: Exception, *, keep: bool = False) -> None:
        """There will be no more of a reply; `keep` what its sequence knows, or give it up."""
        begun = self._remove(ticket)
        with self._changed:
            self._failed += 1
        ticket.tell(Failed(error))
        if begun and keep:
            self._store.give(ticket.generation.sequence)

    def _remove(self, ticket: Ticket) -> bool:
        """Forget a request; whether it had left the queue."""
        with self._changed:
            begun = ticket in self._active
            if begun:
                self._active.remove(ticket)
            elif ticket in self._queue:
                self._queue.remove(ticket)
        return begun

    def _tell_tokens(self, ticket: Ticket, tokens: list[Token]) -> None:
        for token in tokens:
            ticket.tell(TokenEvent(token))
