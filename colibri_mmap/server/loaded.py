"""An open model, ready to reply to several requests at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_mmap.runtime.batcher import Batcher
from colibri_mmap.runtime.engine import Engine
from colibri_mmap.runtime.replies.format import ReplyFormat
from colibri_mmap.runtime.template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How an open model is shared.

    parallel: replies made at the same time; queue: requests that may wait besides. cache_ram and
    session_disk: bytes for what idle conversations are kept in, the latter in session_dir.
    """

    parallel: int = 4
    queue: int = 64
    cache_ram: int = 1 << 30
    session_dir: Path | None = None
    session_disk: int = 10 << 30


class LoadedModel:
    """An engine, the thread that runs it, and what is kept of earlier conversations."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        serving: Serving,
        template: str | None = None,
        notify: Callable[[str], None] = lambda notice: None,
    ) -> None:
        """Takes over the engine, also when an error is raised.

        `template`, in Jinja, replaces the model's own. `notify` gets notices, from any thread.
        """
        self.name, self.engine = name, engine
        try:
            self.template = engine.template
            if template is not None:
                self.template = ChatTemplate.of(engine.tokenizer, template)
            self.format = ReplyFormat.of(self.template.source, engine.tokenizer)
            self._store = engine.prefix_store(
                ram_bytes=serving.cache_ram,
                directory=serving.session_dir,
                disk_bytes=serving.session_disk,
                notify=notify,
            )
            self.batcher = Batcher(
                engine, self._store, parallel=serving.parallel, queue_limit=serving.queue
            )
        except BaseException:
            engine.close()
            raise

    def close(self) -> None:
        """End all requests, keep what is to be kept of them, and unmap the model."""
        self.batcher.close()
        self._store.close()
        self.engine.close()
