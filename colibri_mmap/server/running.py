"""Running an application until the process is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from colibri_mmap.errors import ArgumentError

from .service import Service

GRACE_SECONDS = 5  # for running replies, when the server is told to end


def listen(host: str, port: int) -> socket.socket:
    """A socket that waits for clients; ArgumentError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(address[:2], family=family, backlog=256)
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        code = getattr(error, "errno", 0)
        if code in errno.errorcode:  # where Python's own text would repeat the address
            reason = os.strerror(code)
        message = f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
        raise ArgumentError(message) from error


def run(app: FastAPI, listening: socket.socket, *, access_log: bool = False) -> None:
    """Serve until SIGINT or SIGTERM.

    Replies that are being made get some seconds; a second signal ends them at once. If there is
    one model and it cannot be opened, that error is raised.
    """
    server = Server(app, access_log=access_log)
    asyncio.run(server.serve([listening]))
    if server.failure is not None:
        raise server.failure


class Server(uvicorn.Server):
    """uvicorn's server; replies that are cut end with an error, and signals with status 0.

    `failure`: why the only model could not be opened.
    """

    def __init__(self, app: FastAPI, *, access_log: bool = False) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            ws="none",
            log_level="info" if access_log else "warning",
            access_log=access_log,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS + 2,
        )
        super().__init__(config)
        service: Service = app.state.service
        self._hosting, self._observatory = service.hosting, service.observatory
        self.failure: BaseException | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        first, *others = self._hosting.places
        if first.opening is not None and not others:
            first.opening.add_done_callback(self._look_at_opening)

    def _look_at_opening(self, opening: asyncio.Task[None]) -> None:
        error = None if opening.cancelled() else opening.exception()
        if error is not None and not self.should_exit:
            self.failure = error.__cause__ or error
            self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._hosting.refuse()
        self._observatory.close()
        ending = asyncio.create_task(self._end_replies())
        await super().shutdown(sockets)
        ending.cancel()

    async def _end_replies(self) -> None:
        await asyncio.sleep(GRACE_SECONDS)
        await self._hosting.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        numbers = (signal.SIGINT, signal.SIGTERM)
        for number in numbers:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in numbers:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
