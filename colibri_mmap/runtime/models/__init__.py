"""Model families: one file per `general.architecture`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Protocol, cast

from ...errors import UnsupportedError
from ..arena import Rows
from ..experts import ExpertStore
from ..kv import Batch, LayerShape
from ..ops import Ops
from ..weights import Weights

_MODULES = {
    "llama": "llama",
    "olmoe": "olmoe",
    "qwen2moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3moe",
}
ARCHITECTURES = tuple(_MODULES)


class Model(Protocol):
    """A loaded model: what a cache has to hold, and the forward pass."""

    context_length: int  # 0: the file does not say
    vocabulary: int
    kv_shapes: Sequence[LayerShape]  # of every layer

    def forward(self, batch: Batch) -> Rows:
        """Logits [wanted, V] of a batch, whose tokens are appended to their caches."""
        ...


def load_model(weights: Weights, ops: Ops, store: ExpertStore) -> Model:
    """The model of the file's architecture, whose routed experts `store` computes.

    UnsupportedError names the supported architectures.
    """
    name = weights.gguf.architecture
    if name not in _MODULES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"{weights.gguf.path}: architecture {name!r} is not supported; supported: {supported}"
        )
    return cast(Model, import_module(f".{_MODULES[name]}", __package__).load(weights, ops, store))
