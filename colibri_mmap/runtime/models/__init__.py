"""Model families: one file per `general.architecture`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol, cast

from ...errors import UnsupportedError
from ...format.gguf import GGUF
from ..arena import Rows
from ..experts import ExpertStore
from ..kernels import attention, elementwise, recurrent, routing
from ..kv import Batch, LayerShape
from ..mla import latent_tasks, sparse_tasks
from ..ops import Ops
from ..task import Task
from ..weights import Weights


def _attention(kv_type: str) -> list[Task]:
    names = (f"append_kv_{kv_type}", f"attention_{kv_type}")
    return [getattr(attention, name) for name in names]


def _attention_and(*more: Task) -> Callable[[str], list[Task]]:
    return lambda kv_type: [*_attention(kv_type), *more]


_DELTA_RULE = [
    recurrent.convolution_silu,
    recurrent.l2_norm,
    recurrent.decays,
    recurrent.sigmoids,
    recurrent.delta_rule,
    elementwise.sigmoid_mul,
]


@dataclass(frozen=True, slots=True)
class Family:
    """The module of an architecture, and by KV type the kernels that are not every model's."""

    module: str
    tasks: Callable[[str], list[Task]] = _attention


FAMILIES = {
    "dbrx": Family("dbrx", _attention_and(elementwise.layer_norm, elementwise.clamp_rows)),
    "deepseek2": Family("deepseek2", latent_tasks),
    "deepseek32": Family("deepseek32", sparse_tasks),
    "dots1": Family("dots1"),
    "ernie4_5-moe": Family("ernie4_5_moe"),
    "glm-dsa": Family("glm_dsa", sparse_tasks),
    "glm4moe": Family("glm4moe"),
    "gpt-oss": Family("gpt_oss", _attention_and(elementwise.clamped_swiglu)),
    "granitemoe": Family("granitemoe", _attention_and(elementwise.scale_rows)),
    "hunyuan-moe": Family("hunyuan_moe"),
    "kimi-linear": Family("kimi_linear", lambda kv: [*latent_tasks(kv), *_DELTA_RULE]),
    "lfm2moe": Family("lfm2moe", _attention_and(recurrent.convolution_gated)),
    "llama": Family("llama"),
    "llama4": Family("llama4", _attention_and(elementwise.scale_rows)),
    "minimax-m2": Family("minimax_m2"),
    "olmoe": Family("olmoe"),
    "phimoe": Family("phimoe", _attention_and(elementwise.layer_norm, routing.route_sparsemixer)),
    "qwen2moe": Family("qwen2moe", _attention_and(elementwise.add_gated)),
    "qwen3": Family("qwen3"),
    "qwen35moe": Family("qwen35moe", _attention_and(*_DELTA_RULE, elementwise.add_gated)),
    "qwen3moe": Family("qwen3moe"),
    "qwen3next": Family("qwen3next", _attention_and(*_DELTA_RULE, elementwise.add_gated)),
}
ARCHITECTURES = tuple(FAMILIES)


class Model(Protocol):
    """A loaded model: what a cache has to hold, and the forward pass."""

    context_length: int  # 0: the file does not say
    vocabulary: int
    kv_shapes: Sequence[LayerShape]  # of every layer
    length_limit: int  # longer sequences are computed otherwise, from their start; 0: none is

    def forward(self, batch: Batch) -> Rows:
        """Logits [wanted, V] of a batch, whose tokens are appended to their caches."""
        ...


def load_model(weights: Weights, ops: Ops, store: ExpertStore) -> Model:
    """The model of the file's architecture, whose routed experts `store` computes."""
    module = import_module(f".{family_of(weights.gguf).module}", __package__)
    return cast(Model, module.load(weights, ops, store))


def family_of(gguf: GGUF) -> Family:
    """The family of a file; UnsupportedError names the supported architectures."""
    name = gguf.architecture
    if name not in FAMILIES:
        supported = ", ".join(ARCHITECTURES)
        raise UnsupportedError(
            f"{gguf.path}: architecture {name!r} is not supported; supported: {supported}"
        )
    return FAMILIES[name]
