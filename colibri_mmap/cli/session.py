"""A conversation with a name, kept between runs: what was said, and what the model knows of it."""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from colibri_mmap.cli.console import messages, printable
from colibri_mmap.cli.conversation import Conversation
from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.state import state_directory

if TYPE_CHECKING:
    from colibri_mmap.runtime.engine import Engine
    from colibri_mmap.runtime.prefixstore import PrefixStore

_NAME = re.compile(r"\w[\w.-]{0,49}")
_DISK_BYTES = 10 << 30  # of what models know of all sessions


class Session:
    """The session of a name, which one process at a time can have open.

    Its file is a saved conversation that also has the tokens of it, for the model it was held with.
    """

    def __init__(self, name: str) -> None:
        """Read the session, or begin it; ArgumentError if that is not possible."""
        if not _NAME.fullmatch(name):
            raise ArgumentError(
                f"--session {name!r}: a name has up to 50 letters, digits, '_', '-' and '.', and "
                "begins with a letter or digit"
            )
        directory = state_directory("sessions")
        self._path = directory / f"{name}.json"
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / f"{name}.lock", os.O_CREAT | os.O_RDWR, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise ArgumentError(
                f"the session {name!r} is open in another terminal: choose another name"
            ) from None
        except OSError as error:
            raise ArgumentError(f"{directory}: cannot be used: {error.strerror}") from None
        try:
            found = self._path.exists()
            self.conversation = Conversation.load(self._path) if found else Conversation()
        except ArgumentError:
            self.close()
            raise
        self._engine: Engine | None = None
        self._store: PrefixStore | None = None
        self._notices: list[str] = []

    @contextmanager
    def attached(self, engine: Engine) -> Iterator[None]:
        """The engine goes on where the session was; at the end the rest is written to disk."""
        self._store = engine.prefix_store(
            ram_bytes=0,
            keep_latest=True,
            directory=self._path.parent,
            disk_bytes=_DISK_BYTES,
            notify=self._notices.append,
        )
        self._engine, engine.store = engine, self._store
        text, ids = self._tokens()
        if ids:
            engine.transcripts.keep(text, ids)
        try:
            yield
        finally:
            self._store.close()
            engine.store = None
            self.close()
            for notice in self.take_notices():
                messages().print(printable(f"note: {notice}"), style="dim", markup=False)

    def keep(self, conversation: Conversation) -> None:
        """Write the session as it is now; ArgumentError if that fails."""
        self.conversation = conversation
        assert self._engine is not None
        assert self._store is not None
        text, ids = self._engine.transcripts.latest()
        tokens = {"model": self._store.model, "text": text, "ids": ids}
        conversation.save(self._path, tokens=tokens if conversation.turns else None)

    def close(self) -> None:
        """Let other processes have the session."""
        os.close(self._lock)

    def take_notices(self) -> list[str]:
        """What there was to note since the last time."""
        notices, self._notices[:] = self._notices.copy(), []
        return notices

    def _tokens(self) -> tuple[str, list[int]]:
        """The text of the conversation as the model had it, and its tokens; empty if not ours."""
        assert self._engine is not None
        assert self._store is not None
        try:
            tokens = json.loads(self._path.read_text(encoding="utf-8"))["tokens"]
            model, text, ids = tokens["model"], tokens["text"], tokens["ids"]
        except (OSError, ValueError, KeyError, TypeError):
            return "", []
        vocabulary = range(self._engine.tokenizer.vocab_size)
        sound = isinstance(text, str) and isinstance(ids, list)
        if (
            model != self._store.model
            or not sound
            or not all(type(token) is int and token in vocabulary for token in ids)
        ):
            return "", []
        return text, ids
