"""llama.cpp through llama-cpp-python's C API: the peer of every comparison.

As a program it measures prefill and decode speed of one model in one run and prints JSON. It needs
an interpreter with numpy and llama-cpp-python, but not this package:

    PEER/bin/python bench/peer.py MODEL.gguf --text "Once upon a time" --threads 2 --no-repack
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray


@llama_cpp.llama_log_callback
def _silent(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    """llama.cpp's log goes nowhere."""


class Peer:
    """A mapped model and one context of llama.cpp; a context manager."""

    def __init__(self, path: Path, *, threads: int, repack: bool, ctx: int) -> None:
        llama_cpp.llama_log_set(_silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.load_mode = llama_cpp.LLAMA_LOAD_MODE_MMAP
        model_params.use_extra_bufts = repack
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        if not self.model:
            raise SystemExit(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = ctx
        params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.vocabulary = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocabulary)
        self.position = 0

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str) -> list[int]:
        """Ids of `text`: no special tokens added, none parsed."""
        data = text.encode()
        ids = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocabulary, data, len(data), ids, len(ids), False, False)
        return list(ids[:n])

    def reset(self) -> None:
        """Forget all tokens."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        self.position = 0

    def decode(self, ids: list[int], *, every_position: bool = False) -> NDArray[np.float32]:
        """Append at most 512 tokens; logits of the last one, or of every position, [n, n_vocab]."""
        n = len(ids)
        batch = llama_cpp.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for i, token in enumerate(ids):
            batch.token[i] = token
            batch.pos[i] = self.position + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = every_position or i == n - 1
        status = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if status:
            raise SystemExit(f"llama_decode failed with status {status}")
        self.position += n
        rows = n if every_position else 1
        address = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(address, (rows, self.n_vocab)).copy()


def measure(peer: Peer, ids: list[int], decode: int) -> dict[str, float]:
    """Tokens per second of the prompt `ids` and of greedy decoding after it, once warmed up."""
    peer.decode(ids[:8])
    peer.decode(ids[:1])
    peer.reset()
    start = time.perf_counter()
    for first in range(0, len(ids), 512):
        logits = peer.decode(ids[first : first + 512])
    prefill_seconds = time.perf_counter() - start
    start = time.perf_counter()
    for _ in range(decode):
        logits = peer.decode([int(logits[-1].argmax())])
    decode_seconds = time.perf_counter() - start
    return {
        "prefill_tokens_per_second": len(ids) / prefill_seconds,
        "decode_tokens_per_second": decode / decode_seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure llama.cpp on one model.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True, help="text of the prompt, repeated as needed")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repack", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--prompt", type=int, default=512, help="prompt tokens")
    parser.add_argument("--decode", type=int, default=64, help="decoded tokens")
    arguments = parser.parse_args()
    ctx = arguments.prompt + arguments.decode
    with Peer(arguments.model, threads=arguments.threads, repack=arguments.repack, ctx=ctx) as peer:
        repeats = arguments.prompt // len(peer.tokenize(arguments.text)) + 2
        ids = peer.tokenize(arguments.text * repeats)[: arguments.prompt]
        result = measure(peer, ids, arguments.decode)
    setting = {
        "engine": f"llama-cpp-python {llama_cpp.__version__}",
        "threads": arguments.threads,
        "repack": arguments.repack,
        "prompt": arguments.prompt,
        "decode": arguments.decode,
    }
    print(json.dumps(setting | result))


if __name__ == "__main__":
    main()
