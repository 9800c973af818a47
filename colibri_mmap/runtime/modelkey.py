"""What decides about the content of a KV cache, besides the tokens, as one short name."""

from __future__ import annotations

import os
from collections.abc import Sequence

import xxhash

from ..errors import ModelReadError
from ..format.gguf import GGUF
from .kv import LayerShape

_SAMPLE = 256  # bytes of every tensor


def model_key(gguf: GGUF, mode: str, kv_type: str, shapes: Sequence[LayerShape]) -> str:
    """The same for copies of a file; another one for other weights, arithmetic or cache layout.

    Hashed are the headers and the beginning of every tensor: variants of a model may have the same
    size, names and dates, and differ in the attention only.
    """
    digest = xxhash.xxh3_128(repr((mode, kv_type, list(shapes))).encode())
    handles = [os.open(shard.path, os.O_RDONLY | os.O_CLOEXEC) for shard in gguf.shards]
    try:
        for shard, handle in zip(gguf.shards, handles, strict=True):
            digest.update(os.pread(handle, shard.data_offset, 0))
            digest.update(str(shard.size).encode())
        for info in gguf.tensors.values():
            digest.update(os.pread(handles[info.shard], min(info.nbytes, _SAMPLE), info.offset))
    except OSError as error:
        raise ModelReadError(f"{gguf.path}: cannot be read ({error.strerror})") from error
    finally:
        for handle in handles:
            os.close(handle)
    return str(digest.hexdigest())
