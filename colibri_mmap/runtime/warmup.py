"""Which kernels a model needs, and compiling them before the first token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..format.experts import expert_layers, is_expert_tensor
from ..format.gguf import GGUF
from ..format.quants import GGMLType
from .kernels import elementwise, routing
from .kernels.registry import ACTIVATIONS, Mode, dequantise_task, weight_kernels
from .models import FAMILIES, family_of
from .task import Task, compile_all

Progress = Callable[[str, int, int], None]

_COMMON = (
    elementwise.rms_norm,
    elementwise.rope,
    elementwise.silu_mul,
    elementwise.add_rows,
    elementwise.combine_experts,
    routing.route_top_k,
)


def model_tasks(gguf: GGUF, mode: Mode, kv_type: str) -> list[Task]:
    """The kernels that this model runs."""
    matrices = {
        info.type
        for name, info in gguf.tensors.items()
        if len(info.shape) > 1 and name != "token_embd.weight" and not is_expert_tensor(name)
    }
    if "output.weight" not in gguf.tensors:
        matrices.add(gguf.tensor("token_embd.weight").type)
    for layer in expert_layers(gguf).values():
        matrices |= {part.type for name, part in layer.parts.items() if not name.endswith("_bias")}
    tasks = [*_COMMON, *family_of(gguf).tasks(kv_type), *_matrix_tasks(matrices, mode)]
    embedding = dequantise_task(gguf.tensor("token_embd.weight").type)
    return tasks if embedding is None else [*tasks, embedding]


def all_tasks() -> list[Task]:
    """Every kernel there is, for any model."""
    types = list(GGMLType)
    tasks = list(_COMMON)
    for family in FAMILIES.values():
        tasks += [*family.tasks("f16"), *family.tasks("f32")]
    tasks += [*_matrix_tasks(types, "int8"), *_matrix_tasks(types, "exact")]
    tasks += [task for kind in types if (task := dequantise_task(kind)) is not None]
    return list(dict.fromkeys(tasks))


def compile_tasks(tasks: list[Task], progress: Progress | None) -> int:
    """Compile what the cache lacks; progress is told of it only if that takes a while."""

    def tell(name: str, done: int, total: int) -> None:
        if progress is not None:
            progress("compiling kernels for this CPU", done, total)

    return compile_all(tasks, tell)


def _matrix_tasks(types: Iterable[GGMLType], mode: Mode) -> list[Task]:
    tasks: dict[Task, None] = {}
    for kind in sorted(types):
        kernels = weight_kernels(kind, mode) or weight_kernels(GGMLType.F32, mode)
        assert kernels is not None
        activation = ACTIVATIONS[kernels.activation]
        tasks |= dict.fromkeys(
            (activation.pack_columns, activation.pack_lanes, kernels.matvec, kernels.matmul)
        )
    return list(tasks)
