"""Models by name: opened when they are first asked for, closed when others need their place."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from colibri_mmap.errors import ColibriError

from .loaded import LoadedModel
from .metrics import Load, Situation, Totals
from .problems import ApiError

State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]
Progress: TypeAlias = Callable[[str, int, int], None]
Opener: TypeAlias = Callable[["ModelSpec", Progress], LoadedModel]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model file and the names it answers to; the first one is shown."""

    path: Path
    names: tuple[str, ...]
    created: int  # seconds since 1970, for OpenAI's list

    @property
    def name(self) -> str:
        return self.names[0]


class _Closing(ColibriError):
    """The server ends while a model is being opened."""


class Place:
    """What is known of one model; `users` are the requests that have it or wait for it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.state: State = "unloaded"
        self.progress = ""  # what opening it is at
        self.error = ""  # why opening it failed the last time
        self.model: LoadedModel | None = None
        self.opening: asyncio.Task[None] | None = None
        self.users = 0
        self.used_at = 0.0
        self.idle = asyncio.Event()
        self.settled = asyncio.Event()  # not on its way out
        self.idle.set()
        self.settled.set()

    def enter(self) -> None:
        self.users += 1
        self.idle.clear()

    def leave(self) -> None:
        self.users -= 1
        self.used_at = time.monotonic()
        if self.users == 0:
            self.idle.set()


class Hosting:
    """The models of a server; all methods are for its event loop.

    At most `most_loaded` are open. Opening and closing happen in threads, one at a time; requests
    that ask for the same model wait for the same opening.
    """

    def __init__(self, specs: Sequence[ModelSpec], opener: Opener, most_loaded: int) -> None:
        self.places = [Place(spec) for spec in specs]
        self._opener, self._most_loaded = opener, most_loaded
        self._changing = asyncio.Lock()
        self._closing = False
        self._past = Totals()  # of models that are not open any more
        self.ready = False  # a model could be opened

    def place(self, name: str) -> Place:
        """The model of this name, the first one without a name; 404 if there is none."""
        if not name:
            return self.places[0]
        for place in self.places:
            if name in place.spec.names:
                return place
        known = ", ".join(place.spec.name for place in self.places)
        message = f"there is no model {name!r}; there are: {known}"
        raise ApiError(404, message, code="model_not_found", param="model")

    async def use(self, name: str) -> AbstractContextManager[LoadedModel]:
        """The model for one request, opened if it is not; it stays until the context is left."""
        place = self.place(name)
        while not place.settled.is_set():
            await place.settled.wait()
        if self._closing:
            raise ApiError(503, "the server is ending", code="server_ending")
        place.enter()
        try:
            if place.model is None:
                await asyncio.shield(self.open(place))
        except BaseException:
            place.leave()
            raise
        assert place.model is not None
        return _lease(place, place.model)

    def open(self, place: Place) -> asyncio.Task[None]:
        """The opening that is going on, or a new one; its error is an ApiError."""
        if place.opening is None:
            place.opening = asyncio.create_task(self._open(place))
            place.opening.add_done_callback(_look_at_error)
        return place.opening

    def situation(self) -> Situation:
        """What the models do now and have done, for the books."""
        loads, totals = [], deepcopy(self._past)
        for place in self.places:
            if place.model is not None:
                status = place.model.batcher.status()
                active = status.reading + status.decoding
                load = Load(place.spec.name, status.queued, active, status.tokens_per_second)
                loads.append(load)
                totals.add(status, place.model.engine.counters())
        return Situation(tuple(loads), totals)

    def refuse(self) -> None:
        """No more models are opened and no more requests accepted from now on."""
        self._closing = True

    async def close(self) -> None:
        """Close all models; requests still running end as cancelled. May be repeated."""
        self.refuse()
        for place in self.places:
            if place.model is not None:
                await asyncio.to_thread(place.model.batcher.close)
        openings = [place.opening for place in self.places if place.opening is not None]
        await asyncio.gather(*openings, return_exceptions=True)
        async with self._changing:
            for place in self.places:
                if place.model is not None:
                    await asyncio.to_thread(place.model.close)
                    place.model, place.state = None, "unloaded"

    # -------------------------------------------------------------------------- changes
    async def _open(self, place: Place) -> None:
        try:
            async with self._changing:
                await self._make_room()
                if self._closing:
                    raise _Closing("the server is ending")
                place.state, place.error = "loading", ""
                place.model = await asyncio.to_thread(self._opener, place.spec, self._report(place))
                place.state = "loaded"
                self.ready = True
        except (ColibriError, OSError, MemoryError) as error:
            place.state, place.error = "failed", str(error) or type(error).__name__
            message = f"the model {place.spec.name} cannot be opened: {place.error}"
            raise ApiError(503, message, code="model_load_failed", param="model") from error
        finally:
            place.opening = None

    async def _make_room(self) -> None:
        """Close models until one more may be open: idle ones first, the longest unused first."""
        while True:
            loaded = [place for place in self.places if place.model is not None]
            if len(loaded) < self._most_loaded or self._closing:
                return
            victim = min(loaded, key=lambda place: (place.users > 0, place.used_at))
            await self._unload(victim)

    async def _unload(self, place: Place) -> None:
        """Close a model after the requests that use it; later ones wait, and open it again."""
        assert place.model is not None
        place.state = "unloading"
        place.settled.clear()
        try:
            await place.idle.wait()
            model, place.model = place.model, None
            await asyncio.to_thread(model.close)
            self._past.add(model.batcher.status(), model.engine.counters())
        finally:
            place.state = "unloaded" if place.model is None else "loaded"
            place.settled.set()

    def _report(self, place: Place) -> Progress:
        def report(stage: str, done: int, total: int) -> None:
            if self._closing:
                raise _Closing("the server is ending")
            place.progress = f"{stage} {done}/{total}" if total else stage

        return report


@contextmanager
def _lease(place: Place, model: LoadedModel) -> Iterator[LoadedModel]:
    try:
        yield model
    finally:
        place.leave()


def _look_at_error(opening: asyncio.Task[None]) -> None:
    """An opening that nobody waits for any more is no error of the program."""
    if not opening.cancelled():
        opening.exception()
