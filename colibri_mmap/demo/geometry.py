"""The shapes of real models, as a table, and the GGUF keys that describe them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from colibri_mmap.errors import ArgumentError

SOFTMAX, SIGMOID = 1, 2  # as the key expert_gating_func numbers them
Value = bool | int | float | str | list[bool]


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
    Experts(256, 8, 2048, 1, SIGMOID, scale=2.5, groups=8, groups_used=4),
    *(3, 18432, 1e4, 1e-6, Yarn(40.0, 4096, 0.1)),
)
_GLM_ATTENTION = Latent(2048, 512, 192, 64, 256, Indexer(32, 128, 2048, every=4))
MODELS = {
    "deepseek-v2-lite": Geometry(
        *("deepseek2", 27, 2048, 16, 102400, 163840, Latent(0, 512, 128, 64, 128)),
        Experts(64, 6, 1408, 2, SOFTMAX, normalised=False),
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
        Experts(64, 4, 1536, 1, SIGMOID, scale=1.8),
        *(1, 10240, 1e6, 1e-5),
    ),
    "glm-5.2": Geometry(
        *("glm-dsa", 78, 6144, 64, 154880, 1 << 20, _GLM_ATTENTION),
        Experts(256, 8, 2048, 1, SIGMOID, scale=2.5),
        *(3, 12288, 8e6, 1e-5),
    ),
    "kimi-k2": Geometry(
        *("deepseek2", 61, 7168, 64, 163840, 131072, _V3_ATTENTION),
        Experts(384, 8, 2048, 1, SIGMOID, scale=2.827),
        *(1, 18432, 5e4, 1e-6, Yarn(32.0, 4096, 0.1)),
    ),
    "qwen3-235b-a22b": Geometry(
        *("qwen3moe", 94, 4096, 64, 151936, 40960, Grouped(4, 128)),
        Experts(128, 8, 1536, 0, SOFTMAX),
        *(0, 12288, 1e6, 1e-6),
    ),
}


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
