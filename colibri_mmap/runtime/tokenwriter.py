"""Generated tokens with their text, ready to be shown."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from .sampling import Logprobs, StopMatcher
from .tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token; `text` is what it completes, so pieces can be printed as they come."""

    id: int
    text: str
    logprobs: Logprobs | None = None


class TokenWriter:
    """Tokens to text: whole characters only, and nothing of a stop string.

    A token is held back while its text is incomplete, so that what remains at the end can be added.
    """

    def __init__(
        self, tokenizer: Tokenizer, stops: tuple[str, ...], shown: Collection[int] = ()
    ) -> None:
        """Of control tokens only those in `shown` have a text."""
        self._stream = tokenizer.stream(skip_special=True, at_start=False, shown=shown)
        self._matcher = StopMatcher(stops)
        self._held: Token | None = None
        self.stopped = False

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met."""
        return self._matcher.met

    def push(self, token: int, logprobs: Logprobs | None = None) -> Iterator[Token]:
        if self._held is not None:
            yield self._held
        text, self.stopped = self._matcher.push(self._stream.push(token))
        self._held = Token(token, text, logprobs)
        if not (self._stream.pending or self._matcher.pending or self.stopped):
            yield self._held
            self._held = None

    def finish(self) -> Iterator[Token]:
        if self._held is not None:
            rest = ""
            if not self.stopped:
                text, self.stopped = self._matcher.push(self._stream.flush())
                rest = text + ("" if self.stopped else self._matcher.flush())
            yield replace(self._held, text=self._held.text + rest)
