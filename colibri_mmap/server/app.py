"""The application: endpoints, what requests pass before them, and what errors become."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from colibri_mmap import __version__
from colibri_mmap.errors import ColibriError
from colibri_mmap.runtime.sampling import Sampling

from . import anthropic, chat, completions, info, page
from .gate import BodyLimit, Bookkeeping, KeyCheck
from .hosting import Hosting, ModelSpec, Opener
from .metrics import Metrics
from .observatory import Observatory
from .problems import ApiError, answer_error, answer_invalid
from .service import Service
from .streaming import Gone


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an application is made of besides its models.

    `keys`: one of them is asked for, if there are any. `origins`: web pages that may ask, "*" for
    all. `timeout` of a reply in seconds. `most_bytes` of a request: a million tokens take 5 MB.
    """

    keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    timeout: float | None = None
    most_loaded: int = 1
    most_bytes: int = 64 << 20
    sampling: Sampling = field(default_factory=Sampling)


def create_app(specs: Sequence[ModelSpec], opener: Opener, settings: Settings) -> FastAPI:
    """The application that serves `specs`; the first is opened as soon as it starts."""
    hosting = Hosting(specs, opener, settings.most_loaded)
    metrics = Metrics(hosting.situation)
    observatory = Observatory(hosting)
    service = Service(hosting, metrics, observatory, settings.timeout, settings.sampling)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        hosting.open(hosting.places[0])
        yield
        await hosting.close()

    app = FastAPI(
        title="colibri-mmap",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,  # its page is fetched from elsewhere
        redoc_url=None,
        middleware=[
            Middleware(Bookkeeping, metrics),
            *_cors(settings.origins),
            Middleware(BodyLimit, settings.most_bytes),
            Middleware(KeyCheck, settings.keys),
        ],
        exception_handlers={
            RequestValidationError: answer_invalid,
            ApiError: answer_error,
            ColibriError: answer_error,
            HTTPException: answer_error,
            Gone: _answer_nobody,
            Exception: answer_error,
        },
    )
    app.state.service = service
    for endpoints in (info, chat, completions, anthropic, page):
        app.include_router(endpoints.router)
    return app


def _cors(origins: Sequence[str]) -> list[Middleware]:
    if not origins:
        return []
    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    ]


async def _answer_nobody(_: Request, _error: Exception) -> Response:
    """For the books: the client went away (nginx' 499)."""
    return Response(status_code=499)
