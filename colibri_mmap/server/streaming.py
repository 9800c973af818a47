"""Replies as they are made, and clients that go away before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import AbstractContextManager, aclosing, suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from .problems import ApiError, encode_json

SILENCE = b": waiting\n\n"  # a comment, which clients skip
DONE = b"data: [DONE]\n\n"
STALLED_SECONDS = 60.0  # a client that takes nothing for so long is gone

_Result = TypeVar("_Result")


class Gone(Exception):
    """The client is not there any more: nobody reads what is answered."""


class EventStream(Response):
    """Server-sent events; `reply` is left when they end, or when the client goes away.

    A client is noticed to go even while there is nothing to send.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], reply: AbstractContextManager[object]
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events, self._reply = events, reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._reply, suppress(Gone, TimeoutError):
            await unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async with aclosing(self._events) as events:
            async for event in events:
                await _send_body(send, event, more=True)
                await asyncio.sleep(0)  # for others, and for the news that the client is gone
        await _send_body(send, b"", more=False)


def as_event(document: Any) -> bytes:
    """One event of OpenAI's kind."""
    return b"data: " + encode_json(document) + b"\n\n"


async def with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """The events; an error among them is the last one, as OpenAI's clients understand it."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except ApiError as error:
            yield as_event(error.as_openai())


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    async with asyncio.timeout(STALLED_SECONDS):
        await send({"type": "http.response.body", "body": body, "more_body": more})


async def answer(request: Request, work: Awaitable[_Result]) -> _Result:
    """What `work` gives; it is cancelled when the client goes away, which is a `Gone`."""
    return await unless_gone(request.receive, work)


async def unless_gone(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """What `work` gives, unless the client disconnects before; the body was read."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Gone
        return working.result()
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
