"""Every error a user can meet, as one small tree.

    ColibriError
    ├── FormatError          the file is not a valid model: names file, place and reason
    ├── UnsupportedError     a valid model this version cannot run: names what is missing
    ├── ModelReadError       reading weights failed: names shard, layer and expert
    ├── ContextLengthError   more tokens than the context holds
    ├── TemplateError        the chat template refused or failed to render the messages
    ├── ArgumentError        a setting or input that makes no sense
    ├── QueueFull            too many requests wait already
    └── ResourceError        not enough disk space or memory, or a missing tool

Each message is one line and says what to do next. The CLI prints it and exits with status 1.
"""

from __future__ import annotations

from pathlib import Path


class ColibriError(Exception):
    """Base of all errors caused by the world rather than by a bug."""


class FormatError(ColibriError):
    """A file that is not a valid model; `path` is the file, `place` where in it, `reason` why."""

    def __init__(self, path: str | Path, place: str, reason: str) -> None:
        self.path = Path(path)
        self.place = place
        self.reason = reason
        super().__init__(f"{path}: {place}: {reason}")


class UnsupportedError(ColibriError):
    """A valid model that this version cannot run."""


class ModelReadError(ColibriError):
    """Reading weights failed after the model was opened."""


class ContextLengthError(ColibriError):
    """More tokens were asked for than the context holds."""


class TemplateError(ColibriError):
    """The chat template refused the messages or could not be rendered."""


class ArgumentError(ColibriError):
    """A setting or an input that makes no sense."""


class QueueFull(ColibriError):
    """More requests wait than the queue holds."""


class ResourceError(ColibriError):
    """Not enough disk space or memory, or something the machine lacks."""
