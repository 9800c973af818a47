"""Log probabilities of tokens, in the two forms that OpenAI's endpoints give them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from colibri_mmap.runtime.tokenizer import Tokenizer
from colibri_mmap.runtime.tokenwriter import Token

_LOWEST = -9999.0  # stands for minus infinity, which JSON does not know


def chat_logprobs(tokenizer: Tokenizer, tokens: Iterable[Token]) -> dict[str, Any]:
    """Of a chat: every token with its bytes, and the likeliest ones in its place."""
    content = []
    for token in tokens:
        if token.logprobs is not None:
            entry = _chat_entry(tokenizer, token.id, token.logprobs.chosen)
            top = [_chat_entry(tokenizer, *alternative) for alternative in token.logprobs.top]
            content.append({**entry, "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    piece = tokenizer.token_bytes(token)
    return {
        "token": piece.decode("utf-8", "replace"),
        "logprob": max(_LOWEST, logprob),
        "bytes": list(piece),
    }


def completion_logprobs(
    tokenizer: Tokenizer, tokens: Iterable[Token], offset: int = 0
) -> dict[str, Any]:
    """Of a completion: lists side by side; `offset` is where in the text the first token begins."""
    texts: list[str] = []
    logprobs: list[float] = []
    top: list[dict[str, float]] = []
    offsets: list[int] = []
    for token in tokens:
        if token.logprobs is not None:
            texts.append(_text(tokenizer, token.id))
            logprobs.append(max(_LOWEST, token.logprobs.chosen))
            top.append(
                {_text(tokenizer, other): max(_LOWEST, p) for other, p in token.logprobs.top}
            )
            offsets.append(offset)
        offset += len(token.text)
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": top,
        "text_offset": offsets,
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
