"""Byte-level BPE (GPT-2 and descendants): words of printable stand-ins for bytes, merged by rank.

The merging is done by the `tokenizers` library. The byte alphabet is that of Radford et al. 2019,
"Language Models are Unsupervised Multitask Learners", section 2.2.
"""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from colibri_mmap.format.gguf import GGUF
from colibri_mmap.runtime.pretokenizers import PreTokenizer
from colibri_mmap.runtime.vocabulary import TokenType, Vocabulary, key_name, read_strings


def _byte_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for themselves, the other bytes for U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(others))
    return alphabet


BYTE_OF = _byte_alphabet()


def token_bytes(text: str) -> bytes:
    """The bytes that a byte-level token's `text` stands for; other text stands for itself."""
    try:
        return bytes([BYTE_OF[character] for character in text])
    except KeyError:
        return text.encode()


# Bytes that no UTF-8 text has, those of unassigned planes, and control characters but tab, LF, CR.
_NOT_IN_TEXT = {0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100), 0x7F, *range(32)} - {9, 10, 13}


class ByteLevelEncoder:
    """Turns plain text into ids of a byte-level vocabulary; it knows no special tokens."""

    def __init__(self, vocabulary: Vocabulary, pre: PreTokenizer, gguf: GGUF) -> None:
        special = set(vocabulary.ids_of_type(TokenType.CONTROL, TokenType.UNKNOWN))
        ids = {text: i for i, text in enumerate(vocabulary.texts) if text}
        merges = _read_merges(gguf, ids)
        needed = {text for a, b in merges for text in (a, b, a + b)} if special else set()
        for token in special:
            # A word of plain text that spells a control token must not become that token.
            if vocabulary.texts[token] not in needed:
                del ids[vocabulary.texts[token]]
        missing = {BYTE_OF[character] for character in BYTE_OF.keys() - ids.keys()}
        self.missing_bytes = len(missing - _NOT_IN_TEXT)
        self._library = _build(ids, merges, pre)

    def encode(self, text: str) -> list[int]:
        """Ids of `text`."""
        ids: list[int] = self._library.encode(text, add_special_tokens=False).ids
        return ids


def _read_merges(gguf: GGUF, ids: dict[str, int]) -> list[tuple[str, str]]:
    """The pairs of `tokenizer.ggml.merges`, best first; parts and unions must be tokens."""
    merges = []
    for line in read_strings(gguf, "merges"):
        cut = line.find(" ", 1)
        left, right = line[:cut], line[cut + 1 :]
        if cut < 0 or left not in ids or right not in ids or left + right not in ids:
            gguf.fail(key_name("merges"), f"{line!r} does not join two tokens into a third")
        merges.append((left, right))
    return merges


def _build(ids: dict[str, int], merges: list[tuple[str, str]], pre: PreTokenizer) -> Any:
    """The library's tokenizer for these tables."""
    library = LibraryTokenizer(
        models.BPE(vocab=ids, merges=merges, ignore_merges=pre.ignore_merges)
    )
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*cuts, alphabet])
    return library
