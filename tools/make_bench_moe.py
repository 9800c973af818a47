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
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import gguf
import numpy as np
import typer
from numpy.typing import NDArray

from colibri_mmap.cli.console import ProgressBar, messages, printable
from colibri_mmap.errors import ArgumentError, ColibriError, FormatError, ResourceError
from colibri_mmap.format.gguf import GGUF, open_gguf
from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

SUPERBLOCK = 256  # weights of a Q4_K or Q6_K block
SUBBLOCK = 32  # weights of a Q4_K block that share a scale and a minimum
Q4_MIDDLE, Q4_DEVIATION = 7.5, math.sqrt((16**2 - 1) / 12)  # of a uniform 4-bit number
Q6_DEVIATION = math.sqrt((64**2 - 1) / 12)
SCALES = (16, 48)  # of a block's quantised scales, from and below
EVEN_SCALE = 28  # of blocks with a shared direction, whose minima are 0 or twice that
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


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `shape` with rows last but one, `make` draws its bytes or floats."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    make: Callable[[np.random.Generator], Bytes | Floats]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * row_bytes(self.type, self.shape[-1])


# ------------------------------------------------------------------------------ blocks
def q4_k(
    rng: np.random.Generator, count: int, deviation: float, signs: Floats | None = None
) -> Bytes:
    """`count` Q4_K blocks, uint8 [count, 144], of weights scale * (q - 7.5) with random q.

    `signs`, one of +1 and -1 for each subblock of a row, moves the mean of its weights from 0 to
    +-7.5 scale: every row of the matrix then has a part along that direction.
    """
    blocks = np.empty((count, block_geometry(GGMLType.Q4_K)[1]), np.uint8)
    if signs is None:
        scales = rng.integers(*SCALES, (count, 8), np.uint8)
        minima = scales
    else:
        scales = np.full((count, 8), EVEN_SCALE, np.uint8)
        per_row = EVEN_SCALE * (1 - signs).astype(np.uint8).reshape(-1, 8)
        minima = np.tile(per_row, (count // len(per_row), 1))
    factors = _factors(rng, count, deviation / (Q4_DEVIATION * _root_mean_square(scales)))
    blocks[:, 0:2] = _half(factors)
    blocks[:, 2:4] = _half(Q4_MIDDLE * factors)
    blocks[:, 4:8] = (scales[:, :4] & 63) | (scales[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = (minima[:, :4] & 63) | (minima[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
    blocks[:, 16:] = _random(rng, count, 128)
    return blocks


def q6_k(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    """`count` Q6_K blocks, uint8 [count, 210], of weights scale * (q - 32) with random q."""
    blocks = np.empty((count, block_geometry(GGMLType.Q6_K)[1]), np.uint8)
    scales = rng.integers(*SCALES, (count, 16), np.int8)
    scales[rng.random(scales.shape, np.float32) < 0.5] *= -1
    blocks[:, :192] = _random(rng, count, 192)
    blocks[:, 192:208] = scales.view(np.uint8)
    factor = deviation / (Q6_DEVIATION * _root_mean_square(scales))
    blocks[:, 208:] = _half(_factors(rng, count, factor))
    return blocks


def _random(rng: np.random.Generator, rows: int, columns: int) -> Bytes:
    return np.frombuffer(rng.bytes(rows * columns), np.uint8).reshape(rows, columns)


def _factors(rng: np.random.Generator, count: int, mean: float) -> Floats:
    """Block scales that differ as in a real model."""
    return mean * rng.uniform(0.8, 1.2, count).astype(np.float32)


def _half(values: Floats) -> Bytes:
    """float16 bytes [n, 2]."""
    return values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _root_mean_square(values: NDArray[np.integer]) -> float:
    return float(np.sqrt(np.mean(values.astype(np.float64) ** 2)))


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


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down are Q6_K in Q4_K_M: use_more_bits of llama-quant.cpp."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


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
    if not target.parent.is_dir():
        raise ArgumentError(f"{target.parent}: no such directory; create it first")
    signs = None
    if zipf:
        signs = _rng(seed, 0).choice(np.array([1, -1], np.float32), shape.width // SUBBLOCK)
    outputs = list(tensors(shape, zipf, signs))
    total = sum(tensor.nbytes for tensor in outputs)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise ResourceError(
            f"{target}: needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
            "free some space or name another disk"
        )
    unfinished = target.with_name(f".{target.name}.partial")
    writer = gguf.GGUFWriter(unfinished, "qwen3moe")
    try:
        _add_metadata(writer, tokenizer, shape, zipf, seed)
        for tensor in outputs:
            _add_info(writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        done = 0
        for number, tensor in enumerate(outputs, 1):
            writer.write_tensor_data(tensor.make(_rng(seed, number)))
            done += tensor.nbytes
            if progress is not None:
                progress(done, total)
        writer.close()
        unfinished.replace(target)
    except OSError as error:
        raise ResourceError(f"{target}: writing failed: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _rng(*seeds: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(seeds))


def _add_info(writer: gguf.GGUFWriter, tensor: Tensor) -> None:
    if tensor.type is GGMLType.F32:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes)
        return
    bytes_shape = (*tensor.shape[:-1], row_bytes(tensor.type, tensor.shape[-1]))
    kind = gguf.GGMLQuantizationType(int(tensor.type))
    writer.add_tensor_info(tensor.name, bytes_shape, np.dtype(np.uint8), tensor.nbytes, kind)


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
    if tokenizer.str("tokenizer.ggml.model") != "gpt2":
        reason = "is not byte-level BPE (gpt2), as Qwen's is; take the tokenizer of another model"
        raise FormatError(tokenizer.path, "tokenizer", reason)
    texts = tokenizer.strs("tokenizer.ggml.tokens")
    types = tokenizer.ints("tokenizer.ggml.token_type", len(texts))
    missing = shape.vocabulary - len(texts)
    if missing < 0:
        raise ArgumentError(f"the tokenizer has {len(texts)} tokens, more than {shape.vocabulary}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.str("tokenizer.ggml.pre"))
    writer.add_token_list([*texts, *(f"[PAD{n}]" for n in range(len(texts), shape.vocabulary))])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * missing])
    writer.add_token_merges(tokenizer.strs("tokenizer.ggml.merges"))
    for name in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in tokenizer.metadata:
            writer.add_uint32(key, tokenizer.int(key))
    writer.add_add_bos_token(False)


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
