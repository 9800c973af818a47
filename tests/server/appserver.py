"""An application served by a thread of the tests, with models that are opened as a test wants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from colibri_mmap import Engine
from colibri_mmap.server.app import Settings, create_app
from colibri_mmap.server.hosting import ModelSpec, Opener, Progress
from colibri_mmap.server.loaded import LoadedModel, Serving
from colibri_mmap.server.running import Server, listen


def opener(
    before: Callable[[str], None] = lambda name: None, serving: Serving | None = None
) -> Opener:
    """Opens models as the command does; `before` is called first, with the model's name."""

    def open_model(spec: ModelSpec, progress: Progress) -> LoadedModel:
        before(spec.name)
        engine = Engine.open(spec.path, threads=1, progress=progress)
        return LoadedModel(spec.name, engine, serving or Serving())

    return open_model


class AppServer(AbstractContextManager["AppServer"]):
    """Serves models by name until the context is left."""

    def __init__(
        self, models: dict[str, Path], opener: Opener, settings: Settings | None = None
    ) -> None:
        specs: Sequence[ModelSpec] = [ModelSpec(path, (n,), 0) for n, path in models.items()]
        self.app = create_app(specs, opener, settings or Settings())
        self._socket = listen("127.0.0.1", 0)
        self.address = self._socket.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self._server = Server(self.app)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        asyncio.run(self._server.serve([self._socket]))

    def end(self) -> None:
        """Tell it to end, as a signal does."""
        self._server.should_exit = True

    def __exit__(self, *_: object) -> None:
        self.end()
        self._thread.join(60)
        assert not self._thread.is_alive()
