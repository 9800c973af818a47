"""Random weights in the geometry of a real model, with the types of Q4_K_M.

What attention and experts add to the residual stream is small, so that it stays close to the
embedding and no activation grows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import gguf
import numpy as np

from colibri_mmap.demo.geometry import SIGMOID, Geometry, Grouped, Latent, metadata
from colibri_mmap.demo.randomfile import (
    SUPERBLOCK,
    Floats,
    Progress,
    Tensor,
    add_tokenizer,
    has_more_bits,
    q4_k,
    q6_k,
    q8_0,
    write_random,
)
from colibri_mmap.format.gguf import GGUF
from colibri_mmap.format.quants import GGMLType, block_geometry

EMBEDDING_DEVIATION = 0.02
BRANCH_DEVIATION = 0.25  # of what a branch adds, in the former
EXPERT_DEVIATION = 0.06  # an expert's output is smaller than its input: the activation is gated
_MAKERS = {GGMLType.Q4_K: q4_k, GGMLType.Q6_K: q6_k, GGMLType.Q8_0: q8_0}
_KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}


def _ones(name: str, n: int) -> Tensor:
    return Tensor(name, GGMLType.F32, (n,), lambda rng: np.ones(n, np.float32))


def _zeros(name: str, n: int) -> Tensor:
    return Tensor(name, GGMLType.F32, (n,), lambda rng: np.zeros(n, np.float32))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Floats:
    return (rng.standard_normal(shape, np.float32) * np.float32(deviation)).astype(np.float32)


def _matrix(
    name: str, shape: tuple[int, ...], *, more_bits: bool = False, size: float = 1.0
) -> Tensor:
    """Weights that keep the length of what they multiply, times `size`."""
    columns = shape[-1]
    kind = GGMLType.Q6_K if more_bits else GGMLType.Q4_K
    if columns % SUPERBLOCK:
        kind = GGMLType.Q8_0
    pieces = shape[0] if len(shape) == 3 else 1
    count = math.prod(shape) // pieces // block_geometry(kind)[0]
    make = partial(_MAKERS[kind], count=count, deviation=size * columns**-0.5)
    return Tensor(name, kind, shape, make, pieces)


def tensors(model: Geometry) -> Iterator[Tensor]:
    """All tensors in the order of the file."""
    c = model.width
    embedded = EMBEDDING_DEVIATION * c**0.5
    yield _matrix("token_embd.weight", (model.vocabulary, c), size=embedded)
    for layer in range(model.layers):
        yield _ones(f"blk.{layer}.attn_norm.weight", c)
        if isinstance(model.attention, Latent):
            yield from _latent_attention(model, model.attention, layer)
        else:
            yield from _grouped_attention(model, model.attention, layer)
        yield _ones(f"blk.{layer}.ffn_norm.weight", c)
        yield from _feed_forward(model, layer)
    yield _ones("output_norm.weight", c)
    yield _matrix("output.weight", (model.vocabulary, c), more_bits=True)


def _latent_attention(model: Geometry, shape: Latent, layer: int) -> Iterator[Tensor]:
    c, h = model.width, model.heads
    prefix = f"blk.{layer}."
    q_rows = h * (shape.plain + shape.rotated)
    if shape.q_rank:
        yield _matrix(prefix + "attn_q_a.weight", (shape.q_rank, c))
        yield _ones(prefix + "attn_q_a_norm.weight", shape.q_rank)
        yield _matrix(prefix + "attn_q_b.weight", (q_rows, shape.q_rank))
    else:
        yield _matrix(prefix + "attn_q.weight", (q_rows, c))
    yield _matrix(prefix + "attn_kv_a_mqa.weight", (shape.rank + shape.rotated, c))
    yield _ones(prefix + "attn_kv_a_norm.weight", shape.rank)
    yield _matrix(prefix + "attn_k_b.weight", (h, shape.rank, shape.plain))
    yield _matrix(prefix + "attn_v_b.weight", (h, shape.value_size, shape.rank))
    size = EMBEDDING_DEVIATION * BRANCH_DEVIATION
    yield _matrix(prefix + "attn_output.weight", (c, h * shape.value_size), size=size)
    if shape.indexer is not None and shape.indexer.is_in(layer):
        indexer = shape.indexer
        prefix += "indexer."
        yield _matrix(prefix + "attn_q_b.weight", (indexer.heads * indexer.size, shape.q_rank))
        yield _matrix(prefix + "attn_k.weight", (indexer.size, c))
        yield _ones(prefix + "k_norm.weight", indexer.size)
        yield _zeros(prefix + "k_norm.bias", indexer.size)
        rows = partial(_normal, shape=(indexer.heads, c), deviation=c**-0.5)
        yield Tensor(prefix + "proj.weight", GGMLType.F32, (indexer.heads, c), rows)


def _grouped_attention(model: Geometry, shape: Grouped, layer: int) -> Iterator[Tensor]:
    c, prefix = model.width, f"blk.{layer}."
    q, kv = model.heads * shape.head_size, shape.kv_heads * shape.head_size
    more_bits = has_more_bits(layer, model.layers)
    yield _matrix(prefix + "attn_q.weight", (q, c))
    yield _matrix(prefix + "attn_k.weight", (kv, c))
    yield _matrix(prefix + "attn_v.weight", (kv, c), more_bits=more_bits)
    yield _ones(prefix + "attn_q_norm.weight", shape.head_size)
    yield _ones(prefix + "attn_k_norm.weight", shape.head_size)
    size = EMBEDDING_DEVIATION * BRANCH_DEVIATION
    yield _matrix(prefix + "attn_output.weight", (c, q), size=size)


def _feed_forward(model: Geometry, layer: int) -> Iterator[Tensor]:
    c, experts, prefix = model.width, model.experts, f"blk.{layer}.ffn_"
    more_bits = has_more_bits(layer, model.layers)
    size = EXPERT_DEVIATION * BRANCH_DEVIATION

    def gated(suffix: str, hidden: int, *stack: int) -> Iterator[Tensor]:
        yield _matrix(f"{prefix}gate{suffix}.weight", (*stack, hidden, c))
        yield _matrix(f"{prefix}up{suffix}.weight", (*stack, hidden, c))
        down = f"{prefix}down{suffix}.weight"
        yield _matrix(down, (*stack, c, hidden), more_bits=more_bits, size=size)

    if layer < model.dense_layers:
        yield from gated("", model.dense_hidden)
        return
    rows = partial(_normal, shape=(experts.count, c), deviation=c**-0.5)
    yield Tensor(prefix + "gate_inp.weight", GGMLType.F32, (experts.count, c), rows)
    if experts.gating == SIGMOID:
        yield _zeros(f"blk.{layer}.exp_probs_b.bias", experts.count)
    yield from gated("_exps", experts.hidden, experts.count)
    if experts.shared:
        yield from gated("_shexp", experts.shared * experts.hidden)


def write_model(
    target: Path,
    tokenizer: GGUF,
    model: Geometry,
    *,
    seed: int = 1,
    sparse: bool = False,
    progress: Progress | None = None,
) -> None:
    """Write the model with the tokenizer of another file, filled up with unused tokens."""

    def add_metadata(writer: gguf.GGUFWriter) -> None:
        writer.add_name(f"random {model.architecture}, {model.layers} layers, seed {seed}")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for key, value in metadata(model).items():
            if isinstance(value, list):
                writer.add_array(f"{model.architecture}.{key}", value)
            else:
                kind = _KINDS[type(value)]
                writer.add_key_value(f"{model.architecture}.{key}", value, kind)
        add_tokenizer(writer, tokenizer, model.vocabulary)

    outputs = list(tensors(model))
    write_random(target, model.architecture, add_metadata, outputs, seed, progress, sparse=sparse)
