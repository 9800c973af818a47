"""What every request passes before it reaches an endpoint: size, key, and the books."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .metrics import Metrics
from .problems import ApiError

OPEN_PATHS = frozenset({"/", "/health"})  # need no key: they tell nothing of what was said


class BodyLimit:
    """Refuses bodies above `most` bytes with 413, announced or not, before they fill memory."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._most:
            await self._too_large().response(scope["path"])(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._most:
                raise HTTPException(413, self._too_large().message)
            return message

        await self._app(scope, counted, send)

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._most >> 20} MiB"
        return ApiError(413, message, code="body_too_large")


class KeyCheck:
    """Asks for one of `keys`, as a bearer token or an x-api-key; without keys all may enter."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._admits(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "the API key is missing or wrong", code="invalid_api_key")
        await error.response(scope["path"])(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        if not self._keys or scope["path"] in OPEN_PATHS:
            return True
        headers = Headers(scope=scope)
        kind, _, token = headers.get("authorization", "").partition(" ")
        shown = token.strip() if kind.lower() == "bearer" else headers.get("x-api-key", "")
        given = shown.encode("latin-1", "replace")
        matches = [hmac.compare_digest(given, key) for key in self._keys]  # how many tells nothing
        return any(matches)


class Bookkeeping:
    """Counts requests by endpoint and status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 500

        async def noticed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noticed)
        finally:
            # Only paths that exist are told apart: the others would be labels without end.
            endpoint = getattr(scope.get("route"), "path", "other")
            self._metrics.count_request(endpoint, status)
