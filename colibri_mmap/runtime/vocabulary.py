"""The tokens of a model file, read from its `tokenizer.ggml.*` keys and validated completely."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.format.gguf import GGUF, GGUFArray


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


def key_name(name: str) -> str:
    """The metadata key of a tokenizer setting."""
    return f"tokenizer.ggml.{name}"


def read_strings(gguf: GGUF, name: str) -> list[str]:
    """An array of strings; a missing or empty one is an error."""
    key = key_name(name)
    array = gguf.metadata.get(key)
    if array is None:
        gguf.fail(key, "is missing; convert the model again")
    values = array.tolist() if isinstance(array, GGUFArray) else []
    if not values or type(values[0]) is not str:
        gguf.fail(key, "must be an array with at least one string")
    return values


def _read_numbers(gguf: GGUF, name: str, count: int) -> NDArray[Any] | None:
    """An array of `count` numbers, or None where the key is absent."""
    key = key_name(name)
    array = gguf.metadata.get(key)
    if array is None:
        return None
    if not isinstance(array, GGUFArray):
        gguf.fail(key, "must be an array of numbers")
    if len(array) != count:
        gguf.fail(key, f"has {len(array)} entries for {count} tokens")
    return array.numpy()


def _read_id(gguf: GGUF, name: str, vocab_size: int) -> int | None:
    """A token id, or None where the key is absent."""
    return gguf.int(key_name(name), None, minimum=0, maximum=vocab_size - 1)


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
    def read(cls, gguf: GGUF) -> Vocabulary:
        """Read and check the vocabulary; tokens without text are accepted and never produced."""
        texts = read_strings(gguf, "tokens")
        size = len(texts)
        scores = _read_numbers(gguf, "scores", size)
        if scores is not None and np.isnan(scores).any():
            gguf.fail(key_name("scores"), "contains NaN")
        _check_unique(texts, gguf)
        return cls(
            texts=texts,
            types=_read_types(texts, gguf),
            scores=None if scores is None else scores.astype(float).tolist(),
            bos_id=_read_id(gguf, "bos_token_id", size),
            eos_id=_read_id(gguf, "eos_token_id", size),
            eot_id=_read_id(gguf, "eot_token_id", size),
            eom_id=_read_id(gguf, "eom_token_id", size),
            unknown_id=_read_id(gguf, "unknown_token_id", size),
        )

    def ids_of_type(self, *types: TokenType) -> list[int]:
        """Ids of all tokens with text and one of `types`, ascending."""
        wanted = set(types)
        return [i for i, kind in enumerate(self.types) if kind in wanted and self.texts[i]]


def _read_types(texts: list[str], gguf: GGUF) -> list[int]:
    """A type for each text; all are normal where the file does not say."""
    stored = _read_numbers(gguf, "token_type", len(texts))
    if stored is None:
        return [int(TokenType.NORMAL)] * len(texts)
    types: list[int] = stored.astype(int).tolist()
    ends = {text for text in _HARMONY_ENDS if text in texts}
    if is_harmony(ends):
        for text in _HARMONY_STRUCTURE:
            if text in texts:
                types[texts.index(text)] = TokenType.USER_DEFINED
    return types


def _check_unique(texts: list[str], gguf: GGUF) -> None:
    """A text must not stand for two ids (an empty text stands for none)."""
    if len(set(texts)) >= len(texts) - max(texts.count("") - 1, 0):
        return
    seen: dict[str, int] = {}
    for token, text in enumerate(texts):
        if text and seen.setdefault(text, token) != token:
            gguf.fail(key_name("tokens"), f"{text!r} is both token {seen[text]} and token {token}")
