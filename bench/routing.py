"""What a routing needs from disk: the sizes of a model, and what an LRU cache would read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import GGUF
from colibri_mmap.runtime.replay import replay
from colibri_mmap.runtime.tracefile import read_trace


@dataclass(frozen=True, slots=True)
class ModelBytes:
    """Sizes in bytes of all files and of the resident trunk.

    The trunk is what every token needs: all but the experts and, where the output has a matrix of
    its own, the embeddings, of which a token needs one row.
    """

    total: int
    resident_trunk: int

    @classmethod
    def of(cls, gguf: GGUF) -> ModelBytes:
        experts = sum(
            layer.expert_bytes * layer.n_experts for layer in expert_layers(gguf).values()
        )
        trunk = sum(tensor.nbytes for tensor in gguf.tensors.values()) - experts
        if "output.weight" in gguf.tensors:
            trunk -= gguf.tensors["token_embd.weight"].nbytes
        return cls(sum(shard.size for shard in gguf.shards), trunk)


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that a routing needs: distinct experts of the prompt, and by token behind it."""

    prompt_experts: int
    lru_per_token: float

    @classmethod
    def of(cls, path: Path, budget: int) -> Needs:
        """Of a trace whose first pass is the prompt, with `budget` bytes of memory for experts."""
        trace = read_trace(path)
        prompt = sum(
            nbytes * len(np.unique(experts))
            for nbytes, experts in zip(trace.header.expert_bytes, trace.passes[0], strict=True)
        )
        return cls(prompt, replay(trace, max(0, budget), "lru", skip_passes=1).bytes_per_token)
