"""An open model, ready to reply to several requests at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from colibri_mmap.runtime.batcher import Batcher, FreshSequences
from colibri_mmap.runtime.engine import Engine
from colibri_mmap.runtime.template import ChatTemplate


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """How an open model is shared.

    parallel: replies made at the same time; queue: requests that may wait besides. cache_ram and
    session_disk: bytes for what idle conversations are kept in, the latter in session_dir.
    """

    parallel: int = 4
    queue: int = 64
    cache_ram: int = 0
    session_dir: Path | None = None
    session_disk: int = 0


class LoadedModel:
    """An engine, the thread that runs it, and what is kept of earlier conversations."""

    def __init__(
        self, name: str, engine: Engine, serving: Serving, template: ChatTemplate | None = None
    ) -> None:
        """Takes over the engine; `template` replaces the model's own."""
        self.name, self.engine = name, engine
        self.template = template or engine.template
        self.batcher = Batcher(
            engine,
            FreshSequences(engine.new_sequence),
            parallel=serving.parallel,
            queue_limit=serving.queue,
        )

    def close(self) -> None:
        """End all requests, keep what can be kept of them, and unmap the model."""
        self.batcher.close()
        self.engine.close()
