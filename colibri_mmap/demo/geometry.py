"""The shapes of real models, and random tensors in them with the types of Q4_K_M.

What attention and experts add to the residual stream is small, so that it stays close to the
embedding and no activation grows. Shapes: E experts, C width of the model, F hidden width, H heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np

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
from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.gguf import GGUF
from colibri_mmap.format.quants import GGMLType, block_geometry

EMBEDDING_DEVIATION = 0.02
BRANCH_DEVIATION = 0.25  # of what a branch adds, in the former
EXPERT_DEVIATION = 0.06  # an expert's output is smaller than its input: the activation is gated
_MAKERS = {GGMLType.Q4_K: q4_k, GGMLType.Q6_K: q6_k, GGMLType.Q8_0: q8_0}
_SOFTMAX, _SIGMOID = 1, 2


@dataclass(frozen=True, slots=True)
class Indexer:
    """The choice of keys in sparse attention: in the first layers and each `every`-th after."""

    heads: int
    size: int
    chosen: int
    every: int

    def is_in(self, layer: int) -> bool:
        return layer < 3 or (layer - 2) % self.every == 0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention; `q_rank` 0: queries are not compressed."""

    q_rank: int
    rank: int
    plain: int
    rotated: int
    value_size: int
    indexer: Indexer | None = None


@dataclass(frozen=True, slots=True)
class Grouped:
    """Grouped-query attention with norms of the heads of q and k."""

    kv_heads: int
    head_size: int


@dataclass(frozen=True, slots=True)
class Yarn:
    """Rope for `factor` times `original` tokens; `multiplier` as the key yarn_log_multiplier."""

    factor: float
    original: int
    multiplier: float


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed and shared experts, and the router; gating as the key expert_gating_func."""

    count: int
    used: int
    hidden: int
    shared: int
    gating: int
    normalised: bool = True
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1


@dataclass(frozen=True, slots=True)
class Geometry:
    """A model's sizes; the first `dense_layers` have a feed-forward network of `dense_hidden`."""

    architecture: str
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    attention: Latent | Grouped
    experts: Experts
    dense_layers: int
    dense_hidden: int
    rope_base: float
    eps: float
    yarn: Yarn | None = None

    def shortened(self, layers: int | None, dense_layers: int | None) -> Geometry:
        """The model with fewer layers, `dense_layers` of them dense."""
        layers = self.layers if layers is None else layers
        dense = min(self.dense_layers, layers) if dense_layers is None else dense_layers
        if not 1 <= layers <= self.layers:
            raise ArgumentError(f"layers must be from 1 to {self.layers}, not {layers}")
        if not 0 <= dense <= layers:
            raise ArgumentError(f"dense layers must be from 0 to {layers}, not {dense}")
        return replace(self, layers=layers, dense_layers=dense)


_V3_ATTENTION = Latent(1536, 512, 128, 64, 128)
_V3 = Geometry(
    *("deepseek2", 61, 7168, 128, 129280, 163840, _V3_ATTENTION),
    Experts(256, 8, 2048, 1, _SIGMOID, scale=2.5, groups=8, groups_used=4),
    *(3, 18432, 1e4, 1e-6, Yarn(40.0, 4096, 0.1)),
)
_GLM_ATTENTION = Latent(2048, 512, 192, 64, 256, Indexer(32, 128, 2048, every=4))
MODELS = {
    "deepseek-v2-lite": Geometry(
        *("deepseek2", 27, 2048, 16, 102400, 163840, Latent(0, 512, 128, 64, 128)),
        Experts(64, 6, 1408, 2, _SOFTMAX, normalised=False),
        *(1, 10944, 1e4, 1e-6, Yarn(40.0, 4096, 0.0707)),
    ),
    "deepseek-v3": _V3,
    "deepseek-v3.2": replace(
        _V3,
        architecture="deepseek32",
        attention=replace(_V3_ATTENTION, indexer=Indexer(64, 128, 2048, every=1)),
    ),
    "glm-4.7-flash": Geometry(
        *("deepseek2", 47, 2048, 20, 154880, 202752, Latent(768, 512, 192, 64, 256)),
        Experts(64, 4, 1536, 1, _SIGMOID, scale=1.8),
        *(1, 10240, 1e6, 1e-5),
    ),
    "glm-5.2": Geometry(
        *("glm-dsa", 78, 6144, 64, 154880, 1 << 20, _GLM_ATTENTION),
        Experts(256, 8, 2048, 1, _SIGMOID, scale=2.5),
        *(3, 12288, 8e6, 1e-5),
    ),
    "kimi-k2": Geometry(
        *("deepseek2", 61, 7168, 64, 163840, 131072, _V3_ATTENTION),
        Experts(384, 8, 2048, 1, _SIGMOID, scale=2.827),
        *(1, 18432, 5e4, 1e-6, Yarn(32.0, 4096, 0.1)),
    ),
    "qwen3-235b-a22b": Geometry(
        *("qwen3moe", 94, 4096, 64, 151936, 40960, Grouped(4, 128)),
        Experts(128, 8, 1536, 0, _SOFTMAX),
        *(0, 12288, 1e6, 1e-6),
    ),
}


# ------------------------------------------------------------------------------ tensors
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
    if experts.gating == _SIGMOID:
        yield _zeros(f"blk.{layer}.exp_probs_b.bias", experts.count)
    yield from gated("_exps", experts.hidden, experts.count)
    if experts.shared:
        yield from gated("_shexp", experts.shared * experts.hidden)


# ------------------------------------------------------------------------------ file
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


_KINDS = {
    bool: gguf.GGUFValueType.BOOL,
    int: gguf.GGUFValueType.UINT32,
    float: gguf.GGUFValueType.FLOAT32,
    str: gguf.GGUFValueType.STRING,
}
Value = bool | int | float | str | list[bool]


def metadata(model: Geometry) -> dict[str, Value]:
    """The keys that describe a model, without the name of its architecture."""
    experts = model.experts
    keys: dict[str, Value] = {
        "block_count": model.layers,
        "context_length": model.context,
        "embedding_length": model.width,
        "feed_forward_length": model.dense_hidden,
        "attention.head_count": model.heads,
        "attention.layer_norm_rms_epsilon": model.eps,
        "rope.freq_base": model.rope_base,
        "vocab_size": model.vocabulary,
        "leading_dense_block_count": model.dense_layers,
        "expert_count": experts.count,
        "expert_used_count": experts.used,
        "expert_feed_forward_length": experts.hidden,
        "expert_shared_count": experts.shared,
        "expert_gating_func": experts.gating,
        "expert_weights_norm": experts.normalised,
        "expert_weights_scale": experts.scale,
        "expert_group_count": experts.groups,
        "expert_group_used_count": experts.groups_used,
    }
    if model.yarn is not None:
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": model.yarn.factor,
            "rope.scaling.original_context_length": model.yarn.original,
            "rope.scaling.yarn_log_multiplier": model.yarn.multiplier,
        }
    if isinstance(model.attention, Grouped):
        keys["attention.head_count_kv"] = model.attention.kv_heads
        keys["attention.key_length"] = model.attention.head_size
        keys["attention.value_length"] = model.attention.head_size
        return keys
    return keys | _latent_metadata(model.attention, model.layers)


def _latent_metadata(shape: Latent, layers: int) -> dict[str, Value]:
    keys: dict[str, Value] = {
        "attention.head_count_kv": 1,
        "attention.kv_lora_rank": shape.rank,
        "attention.key_length": shape.rank + shape.rotated,
        "attention.value_length": shape.rank,
        "attention.key_length_mla": shape.plain + shape.rotated,
        "attention.value_length_mla": shape.value_size,
        "rope.dimension_count": shape.rotated,
    }
    if shape.q_rank:
        keys["attention.q_lora_rank"] = shape.q_rank
    if shape.indexer is not None:
        keys["attention.indexer.head_count"] = shape.indexer.heads
        keys["attention.indexer.key_length"] = shape.indexer.size
        keys["attention.indexer.top_k"] = shape.indexer.chosen
        keys["attention.indexer.types"] = [shape.indexer.is_in(layer) for layer in range(layers)]
    return keys
