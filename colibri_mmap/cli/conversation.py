"""A conversation: the system prompt, the messages, and its JSON file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colibri_mmap.errors import ArgumentError

FORMAT = "colibri-mmap conversation"
ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Conversation:
    """An optional system prompt, and the messages of the user and the assistant in order."""

    system: str | None = None
    turns: Sequence[dict[str, str]] = ()

    def messages(self) -> list[dict[str, str]]:
        """What the chat template receives."""
        return [*([_message("system", self.system)] if self.system else []), *self.turns]

    def asking(self, text: str) -> Conversation:
        """This conversation with a new message of the user."""
        return Conversation(self.system, [*self.turns, _message("user", text)])

    def answered(self, text: str) -> Conversation:
        """This conversation with a reply to its last message."""
        return Conversation(self.system, [*self.turns, _message("assistant", text)])

    def unanswered(self) -> Conversation:
        """This conversation without the reply to its last message, if it has one."""
        replied = self.turns and self.turns[-1]["role"] == "assistant"
        return Conversation(self.system, self.turns[:-1] if replied else self.turns)

    def save(self, path: Path, **more: object) -> None:
        """Write the conversation to `path`, whole or not at all; only a saved one is replaced.

        `more` is kept in the file besides.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except ArgumentError:
                raise ArgumentError(
                    f"{path}: exists and is not a saved conversation: choose another name"
                ) from None
        document = {"format": FORMAT, "messages": self.messages(), **more}
        text = json.dumps(document, ensure_ascii=False, indent=2) + "\n"
        try:
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name[:50]}.", delete=False
            ) as file:
                temporary = Path(file.name)
                try:
                    file.write(text)
                    file.flush()
                    os.fsync(file.fileno())
                    temporary.replace(path)
                except OSError:
                    temporary.unlink(missing_ok=True)
                    raise
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be written: {error.strerror}") from None

    @staticmethod
    def load(path: Path) -> Conversation:
        """Read what `save` wrote, or a plain JSON list of messages."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError:  # neither UTF-8 nor JSON
            raise ArgumentError(f"{path}: not a saved conversation") from None
        messages = document.get("messages") if isinstance(document, dict) else document
        if not isinstance(messages, list):
            raise ArgumentError(f"{path}: not a saved conversation")
        for number, message in enumerate(messages, 1):
            _check(path, number, message)
        if messages and messages[0]["role"] == "system":
            return Conversation(messages[0]["content"], [_copy(m) for m in messages[1:]])
        return Conversation(None, [_copy(m) for m in messages])


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _copy(message: dict[str, str]) -> dict[str, str]:
    return _message(message["role"], message["content"])


def _check(path: Path, number: int, message: object) -> None:
    """Refuse a message that is not one of ours, or a system prompt that does not come first."""
    fits = (
        isinstance(message, dict)
        and message.get("role") in ROLES[0 if number == 1 else 1 :]
        and isinstance(message.get("content"), str)
    )
    if not fits:
        raise ArgumentError(f"{path}: message {number} is not a text message of a known role")
