"""Write a Mixture-of-Experts GGUF of random weights in the shape and types of a real model.

The default is Qwen3-30B-A3B in Q4_K_M with 12 of its 48 layers, 4.96 GB: to run it reads and
computes what the real one does. Quantised blocks are made as such, one tensor at a time.

How often an expert is chosen follows from `zipf`. With 0 the router's rows are random and use is
nearly uniform. Otherwise all embeddings share a direction, along which the router's row of the
expert of rank r, ranks drawn anew in each layer, adds -zipf * ln r to its logit. The rest of a
logit, which depends on the token, has a standard deviation of 1 either way. What attention and
experts add to the residual stream is small, so that it stays close to the embedding.

Shapes: E experts, C width of the model, F hidden width of an expert, V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer

from colibri_mmap.cli.console import ProgressBar, messages, printable
from colibri_mmap.demo.randomfile import (
    Q4_DEVIATION,
    Q4_MIDDLE,
    SUBBLOCK,
    SUPERBLOCK,
    Floats,
    Progress,
    Tensor,
    add_tokenizer,
    has_more_bits,
    q4_k,
    q6_k,
    random_of,
    write_random,
)
from colibri_mmap.errors import ArgumentError, ColibriError
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.quants import GGMLType

EMBEDDING_DEVIATION, BRANCH_DEVIATION = (
    0.02,
    0.25,
)  # the latter of what a branch adds, in the former
EXPERT_DEVIATION = 0.06  # an expert's output is smaller than its input: the activation is gated


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model; the defaults are Qwen3-30B-A3B's except for the number of layers."""

    layers: int = 12
    width: int = 2048
    experts: int = 128
    top_k: int = 8
    hidden: int = 768
    heads: int = 32
    kv_heads: int = 4
    head_size: int = 128
    vocabulary: int = 151936

    def __post_init__(self) -> None:
        for name in ("width", "hidden"):
            if getattr(self, name) % SUPERBLOCK:
                raise ArgumentError(f"{name} must be a multiple of {SUPERBLOCK}")
        if self.heads * self.head_size % SUPERBLOCK or self.heads % self.kv_heads:
            raise ArgumentError(f"{self.heads} heads of {self.head_size} do not fit the blocks")
        if not 1 <= self.top_k <= self.experts:
            raise ArgumentError(f"top-k must be from 1 to {self.experts}, not {self.top_k}")


# ------------------------------------------------------------------------------ tensors
def router(rng: np.random.Generator, shape: Shape, zipf: float, signs: Floats | None) -> Floats:
    """The rows [E, C] of a layer's router; its input has the length sqrt(C)."""
    rows = rng.standard_normal((shape.experts, shape.width))
    root = math.sqrt(shape.width)
    if signs is None:
        return (rows / root).astype(np.float32)
    direction = np.repeat(signs, SUBBLOCK) / root
    shared = Q4_MIDDLE / math.hypot(Q4_MIDDLE, Q4_DEVIATION)  # an embedding's part along it
    rows -= np.outer(rows @ direction, direction)
    popularity = -zipf * np.log(1 + rng.permutation(shape.experts))
    popularity -= popularity.mean()
    rows /= root * math.sqrt(1 - shared**2)
    rows += np.outer(popularity / (root * shared), direction)
    return rows.astype(np.float32)


def tensors(shape: Shape, zipf: float, signs: Floats | None) -> Iterator[Tensor]:
    """All tensors in the order of the file, with the types that Q4_K_M gives them."""
    c, f, e = shape.width, shape.hidden, shape.experts
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size

    def ones(name: str, n: int) -> Tensor:
        return Tensor(name, GGMLType.F32, (n,), lambda rng: np.ones(n, np.float32))

    def blocks(name: str, type: GGMLType, size: tuple[int, ...], deviation: float) -> Tensor:
        make = {GGMLType.Q4_K: q4_k, GGMLType.Q6_K: q6_k}[type]
        count = math.prod(size) // SUPERBLOCK
        return Tensor(name, type, size, partial(make, count=count, deviation=deviation))

    count = shape.vocabulary * c // SUPERBLOCK
    embeddings = partial(q4_k, count=count, deviation=EMBEDDING_DEVIATION, signs=signs)
    yield Tensor("token_embd.weight", GGMLType.Q4_K, (shape.vocabulary, c), embeddings)
    branch = EMBEDDING_DEVIATION * BRANCH_DEVIATION
    expert = EXPERT_DEVIATION * BRANCH_DEVIATION
    for layer in range(shape.layers):
        in_layer = f"blk.{layer}."
        low = GGMLType.Q4_K
        high = GGMLType.Q6_K if has_more_bits(layer, shape.layers) else low
        yield ones(in_layer + "attn_norm.weight", c)
        yield blocks(in_layer + "attn_q.weight", low, (q, c), c**-0.5)
        yield blocks(in_layer + "attn_k.weight", low, (kv, c), c**-0.5)
        yield blocks(in_layer + "attn_v.weight", high, (kv, c), c**-0.5)
        yield ones(in_layer + "attn_q_norm.weight", shape.head_size)
        yield ones(in_layer + "attn_k_norm.weight", shape.head_size)
        yield blocks(in_layer + "attn_output.weight", low, (c, q), branch * q**-0.5)
        yield ones(in_layer + "ffn_norm.weight", c)
        rows = partial(router, shape=shape, zipf=zipf, signs=signs)
        yield Tensor(in_layer + "ffn_gate_inp.weight", GGMLType.F32, (e, c), rows)
        yield blocks(in_layer + "ffn_gate_exps.weight", low, (e, f, c), c**-0.5)
        yield blocks(in_layer + "ffn_up_exps.weight", low, (e, f, c), c**-0.5)
        yield blocks(in_layer + "ffn_down_exps.weight", high, (e, c, f), expert * f**-0.5)
    yield ones("output_norm.weight", c)
    yield blocks("output.weight", GGMLType.Q6_K, (shape.vocabulary, c), c**-0.5)


# ------------------------------------------------------------------------------ file
def write(
    target: Path,
    tokenizer: GGUF,
    shape: Shape,
    *,
    zipf: float = 0.0,
    seed: int = 1,
    progress: Progress | None = None,
) -> None:
    """Write the model, atomically; its vocabulary is filled up with unused tokens."""
    if zipf < 0:
        raise ArgumentError(f"zipf must not be negative, but is {zipf}")
    signs = None
    if zipf:
        signs = random_of(seed, 0).choice(np.array([1, -1], np.float32), shape.width // SUBBLOCK)
    add_metadata = partial(_add_metadata, tokenizer=tokenizer, shape=shape, zipf=zipf, seed=seed)
    outputs = list(tensors(shape, zipf, signs))
    write_random(target, "qwen3moe", add_metadata, outputs, seed, progress)


def _add_metadata(
    writer: gguf.GGUFWriter, tokenizer: GGUF, shape: Shape, zipf: float, seed: int
) -> None:
    writer.add_name(f"random qwen3moe, {shape.layers} layers, zipf {zipf:g}, seed {seed}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_block_count(shape.layers)
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(8 * shape.hidden)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_size)
    writer.add_value_length(shape.head_size)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.top_k)
    writer.add_expert_feed_forward_length(shape.hidden)
    add_tokenizer(writer, tokenizer, shape.vocabulary)


def main(
    target: Annotated[Path, typer.Argument(help="GGUF to write.")],
    tokenizer: Annotated[Path, typer.Option(help="GGUF with a byte-level BPE tokenizer.")],
    zipf: Annotated[float, typer.Option(help="Skew of the routing; 0: nearly uniform.")] = 0.0,
    layers: Annotated[int, typer.Option(help="Layers; 48 make the whole 18.5 GB.")] = 12,
    experts: Annotated[int, typer.Option(help="Experts per layer.")] = 128,
    top_k: Annotated[int, typer.Option(help="Experts used per token.")] = 8,
    seed: Annotated[int, typer.Option(help="Seed of all weights.")] = 1,
) -> None:
    """Write a Mixture-of-Experts GGUF of random weights, for measurements."""
    try:
        shape = Shape(layers=layers, experts=experts, top_k=top_k)
        with ProgressBar("bytes") as bar:
            source = open_gguf(tokenizer)
            write(target, source, shape, zipf=zipf, seed=seed, progress=partial(bar, "writing"))
    except ColibriError as error:
        messages().print(f"error: {printable(str(error))}", markup=False)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
