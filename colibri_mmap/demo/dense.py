"""A dense llama-type GGUF as the source of an upcycled model.

Shapes: T tokens, C width of the model, F width of the feed-forward layer, D width of a head.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from colibri_mmap.errors import UnsupportedError
from colibri_mmap.format.gguf import TensorInfo, open_gguf

Floats = NDArray[np.float32]

FFN_PARTS = ("ffn_gate", "ffn_up", "ffn_down")


class DenseModel:
    """The mapped weights and the geometry of a dense llama-type model; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.gguf = gguf = open_gguf(path)
        if gguf.architecture != "llama":
            raise UnsupportedError(
                f"{path}: only dense models of architecture llama can be upcycled, "
                f"this one is {gguf.architecture}"
            )
        if gguf.int(".expert_count", 0) > 0:
            raise UnsupportedError(f"{path}: already a Mixture of Experts; give a dense model")
        self.layers: int = gguf.int(".block_count")
        self.width: int = gguf.int(".embedding_length")
        self.heads: int = gguf.int(".attention.head_count")
        self.kv_heads: int = gguf.int(".attention.head_count_kv", self.heads)
        self.head_width: int = gguf.int(".attention.key_length", self.width // self.heads)
        self.epsilon: float = gguf.float(".attention.layer_norm_rms_epsilon")
        self.rope_base: float = gguf.float(".rope.freq_base", 10000.0)
        self._maps: list[mmap.mmap] = []
        for shard in gguf.shards:
            with shard.path.open("rb") as file:
                self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def __enter__(self) -> DenseModel:
        return self

    def __exit__(self, *_: object) -> None:
        for mapped in self._maps:
            mapped.close()

    def raw(self, name: str) -> bytes:
        """A copy of the bytes of tensor `name`."""
        info = self.info(name)
        return self._maps[info.shard][info.offset : info.offset + info.nbytes]

    def info(self, name: str) -> TensorInfo:
        """Place and shape of tensor `name`; FormatError where the file lacks it."""
        info = self.gguf.tensor(name)
        assert info is not None  # only optional tensors may be missing
        return info

    def values(self, name: str, rows: list[int] | None = None) -> Floats:
        """Tensor `name`, or some of its rows, in float32, outer dimension first."""
        info = self.info(name)
        blocks = np.frombuffer(self.raw(name), np.uint8).reshape(*info.shape[:0:-1], -1)
        if rows is not None:
            blocks = blocks[rows]
        weights: Floats = dequantize(blocks, GGMLQuantizationType(int(info.type)))
        return weights.astype(np.float32, copy=False)

    def ffn_inputs(self, ids: list[int]) -> Iterator[Floats]:
        """Run the model over `ids`; yield the normalised input [T, C] of each feed-forward layer.

        A plain float32 forward pass that holds one matrix at a time.
        """
        x = self.values("token_embd.weight", ids)  # [T, C]
        for layer in range(self.layers):
            x = x + self._attention(layer, self._norm(x, f"blk.{layer}.attn_norm.weight"))
            ffn_input = self._norm(x, f"blk.{layer}.ffn_norm.weight")
            yield ffn_input
            gate = ffn_input @ self.values(f"blk.{layer}.ffn_gate.weight").T  # [T, F]
            up = ffn_input @ self.values(f"blk.{layer}.ffn_up.weight").T
            hidden = gate / (1 + np.exp(-np.maximum(gate, -80))) * up
            x = x + hidden @ self.values(f"blk.{layer}.ffn_down.weight").T

    def _norm(self, x: Floats, name: str) -> Floats:
        scale = 1 / np.sqrt(np.mean(np.square(x), axis=-1, keepdims=True) + self.epsilon)
        normalised: Floats = x * scale * self.values(name)
        return normalised

    def _attention(self, layer: int, x: Floats) -> Floats:
        """Causal grouped-query attention over normalised x [T, C], projections included."""

        def project(part: str, heads: int) -> Floats:  # [heads, T, D]
            y = x @ self.values(f"blk.{layer}.attn_{part}.weight").T
            return y.reshape(len(x), heads, -1).transpose(1, 0, 2)

        group = self.heads // self.kv_heads
        query = self._rotate(project("q", self.heads))
        key = np.repeat(self._rotate(project("k", self.kv_heads)), group, axis=0)
        value = np.repeat(project("v", self.kv_heads), group, axis=0)
        scores = query @ key.transpose(0, 2, 1) / np.float32(np.sqrt(self.head_width))
        scores += np.triu(np.full((len(x), len(x)), -np.inf, np.float32), 1)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        mixed: Floats = (scores @ value).transpose(1, 0, 2).reshape(len(x), -1)
        output: Floats = mixed @ self.values(f"blk.{layer}.attn_output.weight").T
        return output

    def _rotate(self, x: Floats) -> Floats:
        """RoPE over adjacent pairs (ggml's NORM order) of x [heads, T, D]."""
        frequency = self.rope_base ** (-np.arange(0, x.shape[-1], 2) / x.shape[-1])
        if "rope_freqs.weight" in self.gguf.tensors:
            frequency = frequency / self.values("rope_freqs.weight")
        angle = np.arange(x.shape[1])[:, None] * frequency
        turn = np.exp(1j * angle).astype(np.complex64)
        pairs = np.ascontiguousarray(x).view(np.complex64)
        rotated: Floats = (pairs * turn).view(np.float32)
        return rotated
