"""Ids back to text, all at once or as they arrive."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class TokenStream:
    """Decodes ids one by one; the concatenated pieces equal decoding all ids together.

    A character whose bytes are spread over several tokens is given out with the last of them.
    """

    def __init__(self, piece: Callable[[int], bytes], *, strip_first_space: bool) -> None:
        """`piece` gives the bytes of a token; `strip_first_space` undoes an added space prefix."""
        self._piece = piece
        self._strip = strip_first_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that `token` completes, perhaps empty."""
        return self._decoder.decode(self._bytes(token))

    @property
    def pending(self) -> bool:
        """Whether an incomplete character is held back."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """What remains of an incomplete character, as U+FFFD; the stream starts anew after it."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest

    def _bytes(self, token: int) -> bytes:
        piece = self._piece(token)
        if self._strip and piece:
            self._strip = False
            return piece.removeprefix(b" ")
        return piece
