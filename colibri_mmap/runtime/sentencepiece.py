"""SentencePiece's BPE: merge the adjacent pair whose union scores highest, then fall back to bytes.

Kudo and Richardson 2018, "SentencePiece"; ties go to the leftmost pair.
"""

from __future__ import annotations

import re
from heapq import heapify, heappop, heappush
from itertools import pairwise

from colibri_mmap.format.gguf import GGUF
from colibri_mmap.runtime.vocabulary import TokenType, Vocabulary, key_name

SPACE = "\u2581"  # how a piece spells a space
_CACHED_WORDS = 10_000
_LONGEST_CACHED = 40  # characters; text without spaces is not worth keeping


class SentencePieceEncoder:
    """Turns plain text into ids of a SentencePiece vocabulary; it knows no special tokens."""

    def __init__(self, vocabulary: Vocabulary, gguf: GGUF) -> None:
        if vocabulary.scores is None:
            gguf.fail(key_name("scores"), "is missing; a SentencePiece vocabulary needs them")
        mergeable = (
            TokenType.NORMAL,
            TokenType.USER_DEFINED,
            TokenType.UNUSED,
            TokenType.UNDEFINED,
        )
        self._ids = {vocabulary.texts[i]: i for i in vocabulary.ids_of_type(*mergeable)}
        self._ranks = {text: -vocabulary.scores[i] for text, i in self._ids.items()}
        self._unused = frozenset(vocabulary.ids_of_type(TokenType.UNUSED))
        self._bytes = _byte_ids(vocabulary, gguf)
        # Where no piece has a space inside, no merge crosses the start of a word.
        words_are_independent = not any(SPACE in text.lstrip(SPACE) for text in self._ids)
        pattern = f"{SPACE}*[^{SPACE}]*" if words_are_independent else r"[\s\S]+"
        self._words = re.compile(pattern)
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; spaces are escaped here, a leading space is not added."""
        ids: list[int] = []
        for word in self._words.findall(text.replace(" ", SPACE)):
            ids += self._cache.get(word) or self._encode_new(word)
        return ids

    def _encode_new(self, word: str) -> list[int]:
        """Encode `word` and remember the result."""
        ids = self._merge(word)
        if len(word) <= _LONGEST_CACHED:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merge(self, word: str) -> list[int]:
        """Merge the characters of `word` until no adjacent pair forms a piece."""
        pieces = list(word)  # a piece swallowed by its left neighbour becomes ""
        following = list(range(1, len(pieces) + 1))
        preceding = list(range(-1, len(pieces) - 1))
        ranks = self._ranks
        halves: dict[str, tuple[str, str]] = {}
        queue = [
            (ranks[pair], left, pair)
            for left, pair in enumerate(map("".join, pairwise(pieces)))
            if pair in ranks
        ]
        heapify(queue)
        while queue:
            _, left, pair = heappop(queue)
            right = following[left]
            if right == len(pieces) or not pieces[left] or pieces[left] + pieces[right] != pair:
                continue  # one of the two was merged with another neighbour meanwhile
            halves[pair] = pieces[left], pieces[right]
            pieces[left], pieces[right] = pair, ""
            after = following[left] = following[right]
            before = preceding[left]
            if after < len(pieces):
                preceding[after] = left
                if (union := pair + pieces[after]) in ranks:
                    heappush(queue, (ranks[union], left, union))
            if before >= 0 and (union := pieces[before] + pair) in ranks:
                heappush(queue, (ranks[union], before, union))
        ids: list[int] = []
        for piece in pieces:
            if piece:
                self._append(piece, halves, ids)
        return ids

    def _append(self, piece: str, halves: dict[str, tuple[str, str]], ids: list[int]) -> None:
        """Append the id of `piece`; an unused piece splits again, an unknown one becomes bytes."""
        token = self._ids.get(piece)
        if token in self._unused and piece in halves:
            for half in halves[piece]:
                self._append(half, halves, ids)
        elif token is not None:
            ids.append(token)
        else:
            ids += [self._bytes[byte] for byte in piece.encode()]


def _byte_ids(vocabulary: Vocabulary, gguf: GGUF) -> list[int]:
    """The id of each byte value; the unknown token stands in where byte pieces are missing."""
    by_text = {vocabulary.texts[i]: i for i in vocabulary.ids_of_type(TokenType.BYTE)}
    unknown = vocabulary.unknown_id
    if unknown is None:
        unknown = next(iter(vocabulary.ids_of_type(TokenType.UNKNOWN)), None)
    ids = [by_text.get(f"<0x{byte:02X}>", unknown) for byte in range(256)]
    complete = [i for i in ids if i is not None]
    if len(complete) != 256:
        gguf.fail(key_name("tokens"), "holds neither all byte pieces nor an unknown token")
    return complete
