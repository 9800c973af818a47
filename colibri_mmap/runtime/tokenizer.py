"""Text to token ids and back, as the model file's `tokenizer.ggml.*` keys define it.

Two kinds: `gpt2` (byte-level BPE) and `llama` (SentencePiece with scores and byte fallback).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING

from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.gguf import GGUF
from colibri_mmap.runtime.bytelevel import ByteLevelEncoder, token_bytes
from colibri_mmap.runtime.detokenizer import TokenStream
from colibri_mmap.runtime.pretokenizers import DEFAULT, PRETOKENIZERS, PreTokenizer
from colibri_mmap.runtime.sentencepiece import SPACE, SentencePieceEncoder
from colibri_mmap.runtime.vocabulary import TokenType, Vocabulary, is_harmony, key_name

if TYPE_CHECKING:
    from colibri_mmap.runtime.grammar import GrammarVocabulary

_END_OF_TURN = frozenset(
    (
        "<|im_end|>",
        "<|eot_id|>",
        "<|eot|>",
        "<|eom_id|>",
        "<|eom|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<end_of_turn>",
        "<turn|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<end_of_utterance>",
        "<EOT>",
        "[EOT]",
        "[EOS]",
        "[e~[",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
    )
)
_HIDDEN = (TokenType.CONTROL, TokenType.UNKNOWN)


class Tokenizer:
    """Encodes, decodes, and knows which tokens mean something; `notices` says what was assumed."""

    def __init__(self, gguf: GGUF) -> None:
        model = gguf.str(key_name("model"), None)
        if model not in ("gpt2", "llama"):
            described = "names none" if model in (None, "none") else f"names {model!r}"
            gguf.fail(
                key_name("model"),
                f"{described}; supported are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece)",
            )
        self.notices: list[str] = []
        self._vocabulary = Vocabulary.read(gguf)
        self.is_sentencepiece = model == "llama"
        self._encoder: SentencePieceEncoder | ByteLevelEncoder
        if self.is_sentencepiece:
            self._encoder = SentencePieceEncoder(self._vocabulary, gguf)
            add_bos = True
        else:
            pre = self._pretokenizer(gguf.str(key_name("pre"), None))
            self._encoder = self._byte_level(pre, gguf)
            add_bos = pre.add_bos
        self._add_space = gguf.bool(key_name("add_space_prefix"), self.is_sentencepiece)
        template = gguf.str("tokenizer.chat_template", "")
        self.chat_template = template if template.strip() else None
        self.bos_id = self._vocabulary.bos_id
        self.eos_id = self._vocabulary.eos_id
        self._add_bos = self._adds(gguf, "add_bos_token", add_bos, self.bos_id)
        self._add_eos = self._adds(gguf, "add_eos_token", False, self.eos_id)
        self.end_ids = self._find_end_ids()
        self._user_defined = self._splitter(TokenType.USER_DEFINED)
        self._specials = self._splitter(TokenType.USER_DEFINED, *_HIDDEN)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> Tokenizer:
        """The tokenizer of an open model file; `FormatError` names a malformed key."""
        return cls(gguf)

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return len(self._vocabulary.texts)

    def encode(
        self,
        text: str,
        add_special: bool = True,
        parse_special: bool = False,
        *,
        at_start: bool = True,
    ) -> list[int]:
        """Ids of `text`.

        `add_special` adds the begin and end tokens the model wants, unless they are there already.
        `parse_special` recognises control tokens spelled out in `text`, as it always does with
        user-defined ones. `at_start`: a SentencePiece model wants a space before the text; pass
        False for text that continues other text.
        """
        text = text.encode("utf-8", "replace").decode()  # lone surrogates are no text
        ids: list[int] = []
        after_special = at_start
        splitter, special_ids = self._specials if parse_special else self._user_defined
        for fragment in splitter.split(text) if splitter else [text]:
            if not fragment:
                continue
            special = special_ids.get(fragment)
            if special is not None:
                ids.append(special)
            else:
                prefix = " " if self._add_space and after_special else ""
                ids += self._encoder.encode(prefix + fragment)
            after_special = special is not None
        return self._with_ends(ids) if add_special else ids

    def decode(
        self, ids: Iterable[int], skip_special: bool = False, *, at_start: bool = True
    ) -> str:
        """Text of `ids`, without control tokens if `skip_special`.

        `at_start`: the ids begin a text, so the space that encoding put before it is dropped; pass
        False for ids that continue a prompt.
        """
        stream = self.stream(skip_special, at_start=at_start)
        return "".join([stream.push(token) for token in ids]) + stream.flush()

    def stream(
        self, skip_special: bool = False, *, at_start: bool = True, shown: Collection[int] = ()
    ) -> TokenStream:
        """An incremental `decode` with the same arguments; control tokens in `shown` are kept."""

        def visible(token: int) -> bytes:
            return b"" if self.is_control(token) and token not in shown else self.token_bytes(token)

        piece = visible if skip_special else self.token_bytes
        return TokenStream(piece, strip_first_space=at_start and self._add_space)

    def token_text(self, token: int) -> str:
        """The token as the vocabulary spells it."""
        self._check_id(token)
        return self._vocabulary.texts[token]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that `token` stands for; a control token stands for its name."""
        piece = self._pieces.get(token)
        if piece is None:
            self._check_id(token)
            piece = self._pieces[token] = self._make_piece(token)
        return piece

    def is_unused(self, token: int) -> bool:
        """Whether the token only fills a row of the vocabulary."""
        self._check_id(token)
        return self._vocabulary.types[token] in (TokenType.UNDEFINED, TokenType.UNUSED)

    def is_control(self, token: int) -> bool:
        """Whether the token steers the model instead of standing for text."""
        self._check_id(token)
        return self._vocabulary.types[token] in _HIDDEN

    def find(self, text: str) -> int | None:
        """The id of the control or user-defined token spelled `text`."""
        return self._specials[1].get(text)

    @cached_property
    def grammar_vocabulary(self) -> GrammarVocabulary:
        """The tokens as grammars need them; half a second of work for 150,000, and done once."""
        from colibri_mmap.runtime.grammar import GrammarVocabulary

        return GrammarVocabulary(self)

    def _pretokenizer(self, name: str | None) -> PreTokenizer:
        """The word patterns called `name`; a missing or unknown name is noticed, not refused."""
        if name in PRETOKENIZERS:
            return PRETOKENIZERS[name]
        described = "is missing" if name is None else f"{name!r} is unknown"
        self.notices.append(
            f"tokenizer.ggml.pre {described}; the default word splitting is used and answers may"
            " suffer"
        )
        return DEFAULT

    def _byte_level(self, pre: PreTokenizer, gguf: GGUF) -> ByteLevelEncoder:
        encoder = ByteLevelEncoder(self._vocabulary, pre, gguf)
        if encoder.missing_bytes:
            self.notices.append(
                f"the vocabulary lacks {encoder.missing_bytes} of 256 bytes; text with them is lost"
            )
        return encoder

    def _adds(self, gguf: GGUF, key: str, default: bool, token: int | None) -> bool:
        """Whether `encode` adds `token`; wanting one that the file does not name is noticed."""
        wanted = gguf.bool(key_name(key), default)
        if wanted and token is None:
            self.notices.append(f"{key_name(key)} holds, but the file names no such token")
        return wanted and token is not None

    def _find_end_ids(self) -> frozenset[int]:
        """Tokens that end a reply: by key, or by a well-known name."""
        vocabulary = self._vocabulary
        candidates = vocabulary.ids_of_type(TokenType.CONTROL, TokenType.USER_DEFINED)
        named = {vocabulary.texts[i]: i for i in candidates if vocabulary.texts[i] in _END_OF_TURN}
        if is_harmony(named):
            named.pop("<|end|>", None)  # ends a message inside a turn
        by_key = (vocabulary.eos_id, vocabulary.eot_id, vocabulary.eom_id)
        return frozenset(named.values()) | {i for i in by_key if i is not None}

    def _splitter(self, *types: TokenType) -> tuple[re.Pattern[str] | None, dict[str, int]]:
        """A pattern that cuts out special tokens, the longest first, and their ids by text."""
        texts = self._vocabulary.texts
        ids = {texts[i]: i for i in self._vocabulary.ids_of_type(*types)}
        if not ids:
            return None, ids
        longest_first = sorted(ids, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})"), ids

    def _with_ends(self, ids: list[int]) -> list[int]:
        """`ids` between begin and end tokens, neither of them doubled."""
        if self._add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        if self._add_eos and self.eos_id is not None and ids[-1:] != [self.eos_id]:
            ids = [*ids, self.eos_id]
        return ids

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise ArgumentError(f"{token} is not a token id; there are {self.vocab_size} tokens")

    def _make_piece(self, token: int) -> bytes:
        text = self._vocabulary.texts[token]
        kind = self._vocabulary.types[token]
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED):
            return text.encode()
        if kind == TokenType.BYTE and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes.fromhex(text[3:5])
        return text.replace(SPACE, " ").encode() if self.is_sentencepiece else token_bytes(text)
