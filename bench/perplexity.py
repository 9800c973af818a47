"""Perplexity of a model on a text, for this engine or, with --peer, for llama.cpp.

The first --bytes of the text are tokenised without special tokens and cut into windows of 512; the
rest is dropped. Each window is one forward pass from an empty state, and tokens 1 to 511 are scored
given those before them in the window: exp of the mean negative log-likelihood over all windows.

    .venv/bin/python bench/perplexity.py MODEL.gguf TEXT --mode int8
    PEER/bin/python bench/perplexity.py MODEL.gguf TEXT --peer
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Logits = Callable[[list[int]], NDArray[np.float32]]


def negative_log_likelihoods(logits: NDArray[np.float32], ids: list[int]) -> NDArray[np.float64]:
    """-log p of ids[1:], given logits [len(ids), n_vocab]."""
    scores = logits[:-1].astype(np.float64)
    highest = scores.max(axis=1, keepdims=True)
    log_total = highest[:, 0] + np.log(np.exp(scores - highest).sum(axis=1))
    return log_total - scores[np.arange(len(ids) - 1), ids[1:]]


def perplexity(ids: list[int], window: int, logits: Logits) -> dict[str, float | int | str]:
    """Perplexity over the full windows of `ids`, its standard error, and what was scored."""
    starts = range(0, len(ids) - window + 1, window)
    windows = [ids[start : start + window] for start in starts]
    scores = np.concatenate([negative_log_likelihoods(logits(w), w) for w in windows])
    value = float(np.exp(scores.mean()))
    return {
        "perplexity": value,
        "standard_error": value * float(scores.std() / np.sqrt(len(scores))),
        "scored_tokens": len(scores),
        "windows": len(windows),
        "text_tokens": len(ids),
        "ids_sha256": hashlib.sha256(np.array(ids, "<i4").tobytes()).hexdigest()[:16],
    }


def ours(arguments: argparse.Namespace, text: str) -> dict[str, float | int | str]:
    from colibri_mmap import Engine

    with Engine.open(arguments.model, mode=arguments.mode, threads=arguments.threads) as engine:
        ids = engine.tokenizer.encode(text, add_special=False, parse_special=False)
        result = perplexity(ids, arguments.window, engine.logits)
    return {"engine": f"colibri-mmap {arguments.mode}"} | result


def peers(arguments: argparse.Namespace, text: str) -> dict[str, float | int | str]:
    import llama_cpp
    from peer import Peer

    def logits(ids: list[int]) -> NDArray[np.float32]:
        peer.reset()
        return peer.decode(ids, every_position=True)

    setting = {"threads": arguments.threads, "repack": arguments.repack, "ctx": arguments.window}
    with Peer(arguments.model, **setting) as peer:
        result = perplexity(peer.tokenize(text), arguments.window, logits)
    engine = f"llama-cpp-python {llama_cpp.__version__}"
    return {"engine": engine, "repack": arguments.repack} | result


def main() -> None:
    parser = argparse.ArgumentParser(description="Perplexity of a GGUF on a text file.")
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--bytes", type=int, default=20 * 1024, help="how much of the text")
    parser.add_argument("--window", type=int, default=512, help="tokens per window, at most 512")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", default="int8", help="arithmetic of this engine")
    parser.add_argument("--peer", action="store_true", help="measure llama.cpp instead")
    parser.add_argument("--repack", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    text = arguments.text.read_bytes()[: arguments.bytes].decode("utf-8", "ignore")
    result = (peers if arguments.peer else ours)(arguments, text)
    print(json.dumps({"model": arguments.model.name} | result, indent=2))


if __name__ == "__main__":
    main()
