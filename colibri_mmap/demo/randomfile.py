"""GGUF files of random weights: quantised blocks made as such, written piece by piece."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import ArgumentError, FormatError, ResourceError
from colibri_mmap.format.experts import is_expert_tensor
from colibri_mmap.format.gguf import GGUF
from colibri_mmap.format.quants import GGMLType, block_geometry, row_bytes

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in total."""

SUPERBLOCK = 256  # weights of a Q4_K or Q6_K block
SUBBLOCK = 32  # weights of a Q4_K block that share a scale and a minimum, or of a Q8_0 block
Q4_MIDDLE, Q4_DEVIATION = 7.5, math.sqrt((16**2 - 1) / 12)  # of a uniform 4-bit number
_Q6_DEVIATION = math.sqrt((64**2 - 1) / 12)
_Q8_DEVIATION = math.sqrt((256**2 - 1) / 12)
_SCALES = (16, 48)  # of a block's quantised scales, from and below
_ALIGNMENT = 32  # of tensors in the file
_EVEN_SCALE = 28  # of blocks with a shared direction, whose minima are 0 or twice that


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor to write: `shape` with rows last but one, `make` draws one of its equal `pieces`."""

    name: str
    type: GGMLType
    shape: tuple[int, ...]
    make: Callable[[np.random.Generator], Bytes | Floats]
    pieces: int = 1

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
        scales = rng.integers(*_SCALES, (count, 8), np.uint8)
        minima = scales
    else:
        scales = np.full((count, 8), _EVEN_SCALE, np.uint8)
        per_row = _EVEN_SCALE * (1 - signs).astype(np.uint8).reshape(-1, 8)
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
    scales = rng.integers(*_SCALES, (count, 16), np.int8)
    scales[rng.random(scales.shape, np.float32) < 0.5] *= -1
    blocks[:, :192] = _random(rng, count, 192)
    blocks[:, 192:208] = scales.view(np.uint8)
    factor = deviation / (_Q6_DEVIATION * _root_mean_square(scales))
    blocks[:, 208:] = _half(_factors(rng, count, factor))
    return blocks


def q8_0(rng: np.random.Generator, count: int, deviation: float) -> Bytes:
    """`count` Q8_0 blocks, uint8 [count, 34], of weights scale * q with random q."""
    blocks = np.empty((count, block_geometry(GGMLType.Q8_0)[1]), np.uint8)
    blocks[:, :2] = _half(_factors(rng, count, deviation / _Q8_DEVIATION))
    blocks[:, 2:] = _random(rng, count, SUBBLOCK)
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


# ------------------------------------------------------------------------------ file
def write_random(
    target: Path,
    architecture: str,
    add_metadata: Callable[[gguf.GGUFWriter], None],
    tensors: Sequence[Tensor],
    seed: int,
    progress: Progress | None = None,
    *,
    sparse: bool = False,
) -> None:
    """Write a model, atomically; the same seed draws the same weights.

    In a `sparse` file routed experts take no space: they read as zeros, which are valid blocks.
    """
    if not target.parent.is_dir():
        raise ArgumentError(f"{target.parent}: no such directory; create it first")
    written = [tensor for tensor in tensors if not (sparse and is_expert_tensor(tensor.name))]
    total = sum(tensor.nbytes for tensor in written)
    free = shutil.disk_usage(target.parent).free
    if total > free:
        raise ResourceError(
            f"{target}: needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; "
            "free some space or name another disk"
        )
    unfinished = target.with_name(f".{target.name}.partial")
    writer = gguf.GGUFWriter(unfinished, architecture)
    try:
        add_metadata(writer)
        for tensor in tensors:
            _add_info(writer, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        done = 0
        with unfinished.open("r+b") as file:
            file.seek(0, os.SEEK_END)
            for number, tensor in enumerate(tensors, 1):
                start = -(-file.tell() // _ALIGNMENT) * _ALIGNMENT
                file.seek(start)
                if tensor in written:
                    rng = random_of(seed, number)
                    for _ in range(tensor.pieces):
                        done += file.write(tensor.make(rng).data)
                        if progress is not None:
                            progress(done, total)
                file.seek(start + tensor.nbytes)
            file.truncate(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
        unfinished.replace(target)
    except OSError as error:
        raise ResourceError(f"{target}: writing failed: {error.strerror}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def random_of(*seeds: int) -> np.random.Generator:
    """The random numbers that belong to these seeds."""
    return np.random.Generator(np.random.SFC64(seeds))


def _add_info(writer: gguf.GGUFWriter, tensor: Tensor) -> None:
    if tensor.type is GGMLType.F32:
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.nbytes)
        return
    bytes_shape = (*tensor.shape[:-1], row_bytes(tensor.type, tensor.shape[-1]))
    kind = gguf.GGMLQuantizationType(int(tensor.type))
    writer.add_tensor_info(tensor.name, bytes_shape, np.dtype(np.uint8), tensor.nbytes, kind)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: GGUF, vocabulary: int) -> None:
    """The byte-level tokenizer of a file, filled up with unused tokens."""
    if tokenizer.str("tokenizer.ggml.model") != "gpt2":
        reason = "is not byte-level BPE (gpt2), as Qwen's is; take the tokenizer of another model"
        raise FormatError(tokenizer.path, "tokenizer", reason)
    texts = tokenizer.strs("tokenizer.ggml.tokens")
    types = tokenizer.ints("tokenizer.ggml.token_type", len(texts))
    missing = vocabulary - len(texts)
    if missing < 0:
        raise ArgumentError(f"the tokenizer has {len(texts)} tokens, more than {vocabulary}")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(tokenizer.str("tokenizer.ggml.pre"))
    writer.add_token_list([*texts, *(f"[PAD{n}]" for n in range(len(texts), vocabulary))])
    writer.add_token_types([*types, *[gguf.TokenType.UNUSED] * missing])
    writer.add_token_merges(tokenizer.strs("tokenizer.ggml.merges"))
    for name in ("bos", "eos", "padding"):
        key = f"tokenizer.ggml.{name}_token_id"
        if key in tokenizer.metadata:
            writer.add_uint32(key, tokenizer.int(key))
    writer.add_add_bos_token(False)


def has_more_bits(layer: int, layers: int) -> bool:
    """Whether attn_v and ffn_down are Q6_K in Q4_K_M: use_more_bits of llama-quant.cpp."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2
