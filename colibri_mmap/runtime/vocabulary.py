"""The tokens of a model file, read from its `tokenizer.ggml.*` keys and validated completely."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np

from colibri_mmap.errors import FormatError

_PREFIX = "tokenizer.ggml."


class TokenType(IntEnum):
    """Values of `tokenizer.ggml.token_type`."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Structure inside a reply of the harmony format (gpt-oss): readers of the reply need to see it, so
# these count as user-defined although files mark them as control tokens (as llama.cpp does).
_HARMONY_STRUCTURE = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>")
_HARMONY_ENDS = ("<|return|>", "<|call|>")


def is_harmony(texts: Container[str]) -> bool:
    """Whether a vocabulary with these texts speaks the harmony format."""
    return all(end in texts for end in _HARMONY_ENDS)


class TokenizerKeys:
    """Typed look-ups of `tokenizer.ggml.*`; a wrong value is a `FormatError` naming its key."""

    def __init__(self, metadata: Mapping[str, Any], path: Path) -> None:
        self._metadata = metadata
        self._path = path

    def error(self, key: str, reason: str) -> FormatError:
        """The error to raise about `key`."""
        return FormatError(self._path, _PREFIX + key, reason)

    def value(self, key: str, kind: type) -> Any:
        """The value of `key`, which must be of type `kind`, or None where the key is absent."""
        value = self._metadata.get(_PREFIX + key)
        if value is not None and type(value) is not kind:
            raise self.error(key, f"expected {kind.__name__}, found {type(value).__name__}")
        return value

    def strings(self, key: str) -> list[str]:
        """An array of strings; a missing or empty one is an error."""
        array = self._metadata.get(_PREFIX + key)
        if array is None:
            raise self.error(key, "missing; convert the model again")
        values = array.tolist() if hasattr(array, "tolist") else None
        if not values:
            raise self.error(key, "expected an array with at least one string")
        if not all(type(value) is str for value in values):
            raise self.error(key, "expected strings only")
        return list(values)

    def numbers(self, key: str, count: int) -> np.ndarray[Any, np.dtype[Any]] | None:
        """An array of `count` numbers, or None where the key is absent."""
        array = self._metadata.get(_PREFIX + key)
        if array is None:
            return None
        if not hasattr(array, "numpy"):
            raise self.error(key, "expected an array of numbers")
        values: np.ndarray[Any, np.dtype[Any]] = np.asarray(array.numpy())
        if values.dtype.kind not in "iuf":
            raise self.error(key, "expected an array of numbers")
        if len(values) != count:
            raise self.error(key, f"has {len(values)} entries for {count} tokens")
        return values

    def token_id(self, key: str, vocab_size: int) -> int | None:
        """A token id below `vocab_size`, or None where the key is absent."""
        value: int | None = self.value(key, int)
        if value is not None and not 0 <= value < vocab_size:
            raise self.error(key, f"{value} is not a token id; there are {vocab_size} tokens")
        return value


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Texts, types and scores by token id, and the ids with a role."""

    texts: list[str]
    types: list[int]
    scores: list[float] | None
    bos_id: int | None
    eos_id: int | None
    eot_id: int | None
    eom_id: int | None
    unknown_id: int | None

    @classmethod
    def read(cls, keys: TokenizerKeys) -> Vocabulary:
        """Read and check the vocabulary; tokens without text are accepted and never produced."""
        texts = keys.strings("tokens")
        size = len(texts)
        scores = keys.numbers("scores", size)
        if scores is not None and np.isnan(scores).any():
            raise keys.error("scores", "contains NaN")
        _check_unique(texts, keys)
        return cls(
            texts=texts,
            types=_read_types(texts, keys),
            scores=None if scores is None else scores.astype(float).tolist(),
            bos_id=keys.token_id("bos_token_id", size),
            eos_id=keys.token_id("eos_token_id", size),
            eot_id=keys.token_id("eot_token_id", size),
            eom_id=keys.token_id("eom_token_id", size),
            unknown_id=keys.token_id("unknown_token_id", size),
        )

    def ids_of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens with text and one of `types`, ascending."""
        wanted = set(types)
        return [i for i, kind in enumerate(self.types) if kind in wanted and self.texts[i]]


def _read_types(texts: list[str], keys: TokenizerKeys) -> list[int]:
    """A type for each text; all are normal where the file does not say."""
    stored = keys.numbers("token_type", len(texts))
    if stored is None:
        return [int(TokenType.NORMAL)] * len(texts)
    types: list[int] = stored.astype(int).tolist()
    ends = {text for text in _HARMONY_ENDS if text in texts}
    if is_harmony(ends):
        for text in _HARMONY_STRUCTURE:
            if text in texts:
                types[texts.index(text)] = TokenType.USER_DEFINED
    return types


def _check_unique(texts: list[str], keys: TokenizerKeys) -> None:
    """A text must not stand for two ids (an empty text stands for none)."""
    if len(set(texts)) >= len(texts) - max(texts.count("") - 1, 0):
        return
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text and seen.setdefault(text, token) != token:
            raise keys.error("tokens", f"{text!r} is both token {seen[text]} and token {token}")
