"""What a model file holds, as plain data that can be printed or written as JSON."""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from colibri_mmap.errors import FormatError
from colibri_mmap.format.container import (
    ALIGN_KEY,
    PADDING_TENSOR,
    SLAB_TENSOR,
    VERSION_KEY,
    slab_layers,
)
from colibri_mmap.format.experts import (
    ExpertLayer,
    expert_layers,
    is_expert_tensor,
    skipped_blocks,
)
from colibri_mmap.format.gguf import GGUF


def describe(gguf: GGUF) -> dict[str, Any]:
    """A summary for people and scripts; a value that the file does not tell is None.

    Blocks that guess tokens ahead count in the bytes only: a forward pass leaves them out.
    """
    layers = expert_layers(gguf)
    skipped = tuple(f"blk.{number}." for number in skipped_blocks(gguf))
    top_k = _optional_int(gguf, ".expert_used_count")
    trunk = [
        info
        for name, info in gguf.tensors.items()
        if not is_expert_tensor(name) and name != PADDING_TENSOR and not name.startswith(skipped)
    ]
    types: Counter[str] = Counter()
    for info in trunk:
        types[info.type.name] += info.nbytes
    for layer in layers.values():
        for part in layer.parts.values():
            types[part.type.name] += part.nbytes * layer.n_experts
    trunk_parameters = sum(prod(info.shape) for info in trunk)
    routed = sum(_parameters(layer) * layer.n_experts for layer in layers.values())
    active = sum(_parameters(layer) * (top_k or 0) for layer in layers.values())
    expert_bytes = sorted({layer.expert_bytes for layer in layers.values()})
    return {
        "files": [{"path": str(shard.path), "bytes": shard.size} for shard in gguf.shards],
        "bytes": sum(shard.size for shard in gguf.shards),
        "version": gguf.shards[0].version,
        "name": _optional_text(gguf, "general.name"),
        "architecture": gguf.architecture,
        "layers": _layers(gguf),
        "moe_layers": len(layers),
        "experts": max((layer.n_experts for layer in layers.values()), default=0),
        "experts_per_token": top_k,
        "context_length": _optional_int(gguf, ".context_length"),
        "tensors": len(gguf.tensors),
        "bytes_by_type": dict(types.most_common()),
        "parameters": trunk_parameters + routed,
        "active_parameters": trunk_parameters + active,
        "trunk_bytes": sum(info.nbytes for info in trunk),
        "expert_bytes": expert_bytes,
        "experts_bytes": sum(layer.expert_bytes * layer.n_experts for layer in layers.values()),
        "reads_per_expert": max((len(layer.extents(0)) for layer in layers.values()), default=0),
        "kv": _kv_geometry(gguf),
        "container": _container(gguf),
    }


def _parameters(layer: ExpertLayer) -> int:
    """Weights of one expert."""
    return sum(prod(part.shape) for part in layer.parts.values())


def _layers(gguf: GGUF) -> int | None:
    """How many layers a forward pass has."""
    blocks = _optional_int(gguf, ".block_count")
    return None if blocks is None else blocks - len(skipped_blocks(gguf))


def _kv_geometry(gguf: GGUF) -> dict[str, Any] | None:
    """Cached values per token, over all layers; None where the metadata do not tell."""
    layers = _layers(gguf)
    heads = _optional_int(gguf, ".attention.head_count")
    width = _optional_int(gguf, ".embedding_length")
    if not layers or not heads or not width:
        return None
    latent = _optional_int(gguf, ".attention.kv_lora_rank")
    if latent is not None:
        rotary = _optional_int(gguf, ".rope.dimension_count") or 0
        index_key = _optional_int(gguf, ".attention.indexer.key_length") or 0
        indexed = [f"blk.{n}.indexer.attn_k.weight" in gguf.tensors for n in range(layers)]
        return {
            "latent": latent,
            "rotary": rotary,
            "index_key": index_key,
            "values_per_token": layers * (latent + rotary) + sum(indexed) * index_key,
        }
    try:
        kv_heads = gguf.ints(".attention.head_count_kv", layers, None)
        if kv_heads is None:
            kv_heads = gguf.ints(".attention.head_count", layers)
    except FormatError:
        return None
    key = _optional_int(gguf, ".attention.key_length") or width // heads
    value = _optional_int(gguf, ".attention.value_length") or width // heads
    return {
        "heads": max(kv_heads),
        "key_length": key,
        "value_length": value,
        "values_per_token": sum(kv_heads) * (key + value),
    }


def _container(gguf: GGUF) -> dict[str, Any] | None:
    """The layout of a packed container; None for any other file."""
    if VERSION_KEY not in gguf.metadata:
        return None
    slabs = slab_layers(gguf)
    first = [info.offset for name, info in gguf.tensors.items() if SLAB_TENSOR.fullmatch(name)]
    return {
        "version": gguf.int(VERSION_KEY),
        "align": gguf.int(ALIGN_KEY),
        "sources": list(gguf.strs("colibri.source.names", ())),
        "trunk_start": gguf.shards[0].data_offset,
        "slabs_start": min(first, default=None),
        "slab_bytes": sorted({c.stride for layer in slabs.values() for c in layer.classes}),
        "slabs": sum(c.count for layer in slabs.values() for c in layer.classes),
    }


def _optional_int(gguf: GGUF, key: str) -> int | None:
    """An integer if the file gives a plain one."""
    try:
        return gguf.int(key, None)
    except FormatError:
        return None


def _optional_text(gguf: GGUF, key: str) -> str | None:
    try:
        return gguf.str(key, None)
    except FormatError:
        return None
