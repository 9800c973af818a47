"""What was said, as the tokens that it was generated with.

A reply whose text is tokenised again may come out as other tokens, and would be computed again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MOST_CHARACTERS = 8_000_000


class Transcripts:
    """The ids of the latest chats by their text; may be used from any thread."""

    def __init__(self, most_characters: int = _MOST_CHARACTERS) -> None:
        self._ids: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._most, self._characters = most_characters, 0
        self._lock = threading.Lock()

    def keep(self, text: str, ids: Sequence[int]) -> None:
        """Know from now on that `text` is `ids`; what was of use least recently is forgotten."""
        with self._lock:
            if text in self._ids:
                self._characters -= len(text)
            self._ids[text] = np.array(ids, np.int32)
            self._ids.move_to_end(text)
            self._characters += len(text)
            while self._characters > self._most:
                forgotten, _ = self._ids.popitem(last=False)
                self._characters -= len(forgotten)

    def longest(self, text: str) -> tuple[str, list[int]]:
        """The longest known beginning of a text, and its ids; empty if there is none."""
        with self._lock:
            known = max(filter(text.startswith, self._ids), key=len, default=None)
            if known is None:
                return "", []
            self._ids.move_to_end(known)
            return known, self._ids[known].tolist()

    def latest(self) -> tuple[str, list[int]]:
        """What was kept or found last."""
        with self._lock:
            text = next(reversed(self._ids), "")
            return text, self._ids[text].tolist() if text else []
