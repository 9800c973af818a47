"""The open VRAM tier of a model: what lives on the GPU beside what the CPU keeps.

What every token uses comes first: as many of the last blocks as fit, with their part of the
context. The rest of the memory holds experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..errors import ResourceError
from ..format.gguf import GGUF
from .device import DeviceBackend
from .devicekernels import CLAMPED_SWIGLU, SILU, ExpertShape
from .experts import ExpertStore
from .kernels import elementwise
from .kv import STEP_TOKENS, cache_bytes
from .layers import Decoder
from .models import Model, load_model
from .offload import Offload
from .ops import Ops
from .placement import (
    PlacedTrunk,
    place_trunk,
    scratch_bytes,
    supported_layers,
    trunk_bytes,
    weight_types,
)
from .policy import Key
from .pool import Pool
from .slots import ExpertReader
from .sources import ExpertNumbers
from .usage import Usage, load_usage
from .vram import VramCache
from .vramplan import VramPlan, plan_vram
from .vrampolicy import SlotPolicy
from .vramsettings import VramSettings
from .weights import Weights

_ACTIVATIONS = {elementwise.silu_mul: SILU, elementwise.clamped_swiglu: CLAMPED_SWIGLU}


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """What a model has on a device: the blocks and experts that are there, and the plan.

    `shares`: by layer that has experts the part of them, 0 to 1.
    """

    name: str
    total_bytes: int
    layers: int
    experts: int
    experts_in_all: int
    shares: tuple[float, ...]
    plan: VramPlan


class DevicePlan(NamedTuple):
    """What a model would have on a device: the last `layers` of its `blocks`, and what takes room.

    `obstacle`: why more blocks cannot run there, whatever the room; empty if all can.
    """

    plan: VramPlan
    layers: int
    blocks: int
    obstacle: str


@dataclass(frozen=True, slots=True)
class VramTier:
    """What a model has on a device; `trunk` None: all blocks are the CPU's, `offload` None: so are
    all experts."""

    backend: DeviceBackend
    plan: VramPlan
    trunk: PlacedTrunk | None
    offload: Offload | None
    notices: tuple[str, ...]

    def counts(self) -> tuple[int, int, int, int]:
        """Chosen experts that were in VRAM and that were not; uploaded ones, and their bytes."""
        if self.offload is None:
            return 0, 0, 0, 0
        stats = self.offload.cache.stats
        return stats.hits, stats.misses, stats.uploads, stats.upload_bytes

    def report(self) -> DeviceReport:
        """What is on the device now."""
        resident = {} if self.offload is None else self.offload.resident()
        return DeviceReport(
            name=self.backend.name,
            total_bytes=self.backend.memory_info()[1],
            layers=0 if self.trunk is None else len(self.trunk.layers),
            experts=sum(int(np.count_nonzero(layer)) for layer in resident.values()),
            experts_in_all=sum(len(layer) for layer in resident.values()),
            shares=tuple(float(layer.mean()) for layer in resident.values()),
            plan=self.plan,
        )

    def retreat(self) -> VramTier:
        """The tier without blocks: they and the context go on on the CPU."""
        assert self.trunk is not None
        self.trunk.retreat()
        return replace(self, trunk=None)

    def close(self) -> None:
        """Give the memory back, after what is being computed."""
        if self.offload is not None:
            self.offload.close()
        if self.trunk is not None:
            self.trunk.close()
        self.backend.close()


def open_vram_tier(
    backend: DeviceBackend,
    weights: Weights,
    model: Model,
    store: ExpertStore,
    ops: Ops,
    settings: VramSettings,
    *,
    context: int,
    kv_type: str,
    pinned: Sequence[Key] = (),
    learn: bool = True,
) -> VramTier:
    """Plan, upload what always stays, and start to upload experts; ResourceError.

    `context` tokens are planned for; `pinned`: (layer, expert) that stay; `learn`: begin with the
    experts that were used most so far.
    """
    shapes = _expert_shapes(store)
    reader = _reader(weights, store, shapes)
    demand = _Demand.of(weights, model, shapes, reader, context, kv_type)
    plan, layers = _divide(*backend.memory_info(), demand, settings)
    trunk, offload = None, None
    try:
        if layers:
            assert demand.model is not None
            trunk = place_trunk(demand.model, backend, layers, head=demand.with_head(layers))
        if reader is not None and plan.expert_budget >= int(reader.sizes.max()):
            usage = load_usage(weights.gguf) if learn else None
            cache = _open_cache(backend, reader, plan.expert_budget, usage, pinned)
            try:
                offload = Offload(backend, ops, cache, reader, shapes, scratch=demand.scratch)
            except BaseException:
                cache.close()
                raise
        backend.prepare(demand.kernels(layers, shapes))
    except BaseException:
        if offload is not None:
            offload.close()
        if trunk is not None:
            trunk.close()
        raise
    return VramTier(backend, plan, trunk, offload, plan.notices)


def _open_cache(
    backend: DeviceBackend,
    reader: ExpertReader,
    budget: int,
    usage: Usage | None,
    pinned: Sequence[Key],
) -> VramCache:
    """The cache of experts; the pinned ones and the most used so far are on their way into it."""
    numbers = reader.numbers
    rates = None if usage is None else usage.rates()[list(numbers.layers)].reshape(-1)
    policy = SlotPolicy(reader.sizes, budget, layers=len(numbers.layers), rates=rates)
    cache = VramCache(backend, policy, reader.fill)
    cache.pin(numbers.first(n) + expert for n, expert in pinned if n in numbers.layers)
    cache.warm()
    return cache


def plan_device(
    gguf: GGUF, free: int, total: int, settings: VramSettings, *, context: int, kv_type: str
) -> DevicePlan:
    """What `open_vram_tier` would do with a device of which `free` of `total` bytes are not in use.

    No weights are read. ResourceError where it would fail, UnsupportedError for the model.
    """
    with closing(Weights(gguf)) as weights, closing(Pool(1)) as pool:
        ops = Ops(pool, "int8")
        store = ExpertStore(ops)
        model = load_model(weights, ops, store)
        shapes = _expert_shapes(store)
        reader = _reader(weights, store, shapes)
        demand = _Demand.of(weights, model, shapes, reader, context, kv_type)
        plan, layers = _divide(free, total, demand, settings)
        return DevicePlan(plan, layers, len(model.kv_shapes), demand.obstacle)


@dataclass(frozen=True, slots=True)
class _Demand:
    """What a model could use of a device; bytes but for `context`."""

    model: Decoder | None
    experts: int
    scratch: int
    context: int
    kv_type: str

    @classmethod
    def of(
        cls,
        weights: Weights,
        model: Model,
        shapes: Mapping[int, ExpertShape],
        reader: ExpertReader | None,
        context: int,
        kv_type: str,
    ) -> _Demand:
        """What a model could use whose experts of these shapes the device can compute."""
        return cls(
            model=model if isinstance(model, Decoder) else None,
            experts=0 if reader is None else int(reader.sizes.sum()),
            scratch=_offload_scratch(weights, shapes),
            context=context,
            kv_type=kv_type,
        )

    @property
    def layers(self) -> int:
        """How many of the last blocks the device can run."""
        return 0 if self.model is None else supported_layers(self.model).layers

    @property
    def obstacle(self) -> str:
        """Why it cannot run more of them; empty if it can run all."""
        if self.model is None:
            return "this architecture runs on the CPU only"
        return supported_layers(self.model).reason

    def why_not(self, layers: int) -> str:
        """Why it cannot run that many."""
        blocks = 0 if self.model is None else len(self.model.blk)
        reason = self.obstacle and f" ({self.obstacle})"
        return f"--gpu-layers {layers}: {self.layers} of {blocks} layers run on the GPU{reason}"

    def kernels(self, layers: int, shapes: Mapping[int, ExpertShape]) -> Iterator[str]:
        """One kernel of every module that is needed with `layers` blocks on the device."""
        types = {kind for shape in shapes.values() for kind in (shape.type, shape.down_type)}
        if layers and self.model is not None:
            types |= weight_types(self.model, layers, head=self.with_head(layers))
            yield "rms_norm"
        yield "quantise_q8"
        yield from (f"matvec_{kind.name.lower()}_c1" for kind in types)

    def with_head(self, layers: int) -> bool:
        return self.model is not None and layers == len(self.model.blk)

    def trunk(self, layers: int) -> tuple[int, int, int]:
        """What the last `layers` blocks need: weights, context, room to compute in."""
        if not layers or self.model is None:
            return 0, 0, 0
        needed = trunk_bytes(self.model, layers)
        shapes = self.model.kv_shapes[-layers:]
        head = needed.head if self.with_head(layers) else 0
        kv = cache_bytes(shapes, self.context, self.kv_type)
        return needed.weights + head, kv, scratch_bytes(self.model, layers)


def _divide(free: int, total: int, demand: _Demand, settings: VramSettings) -> tuple[VramPlan, int]:
    """The plan and the number of blocks: as many as were asked for, or as fit."""
    most = demand.layers
    if settings.gpu_layers is not None:
        most = min(most, settings.gpu_layers)
    least = most if settings.gpu_layers is not None else 0
    for layers in range(most, least - 1, -1):
        weights, kv, scratch = demand.trunk(layers)
        try:
            plan = plan_vram(
                free=free,
                total=total,
                trunk_bytes=weights,
                kv_bytes=kv,
                scratch_bytes=scratch + demand.scratch,
                expert_bytes=demand.experts,
                vram=settings.limit(total),
            )
        except ResourceError:
            if layers == least:
                raise
        else:
            if settings.gpu_layers is not None and layers < settings.gpu_layers:
                why = demand.why_not(settings.gpu_layers)
                plan = replace(plan, notices=(*plan.notices, why))
            return plan, layers
    raise AssertionError("the last plan was made or raised")


def _reader(
    weights: Weights, store: ExpertStore, shapes: Mapping[int, ExpertShape]
) -> ExpertReader | None:
    """What reads the experts of these layers; None if there are none."""
    if not shapes:
        return None
    numbers = ExpertNumbers(tuple(shapes), max(store.layers[n].count for n in shapes))
    places = {layer: weights.expert_layers[layer] for layer in shapes}
    return ExpertReader(numbers, places, [file.fd for file in weights.files])


def _expert_shapes(store: ExpertStore) -> dict[int, ExpertShape]:
    """The layers whose experts the device can compute."""
    shapes = {}
    for layer, experts in store.layers.items():
        activation = _ACTIVATIONS.get(store.activations[layer])
        if activation is None or experts.gate.type != experts.up.type:
            continue
        shape = ExpertShape(
            experts.gate.type,
            experts.down.type,
            experts.gate.columns,
            experts.gate.rows,
            activation,
        )
        if shape.supported:
            shapes[layer] = shape
    return shapes


def _offload_scratch(weights: Weights, shapes: Mapping[int, ExpertShape]) -> int:
    if not shapes:
        return 0
    top_k = weights.gguf.int(".expert_used_count", minimum=1)
    return Offload.scratch_bytes(shapes, top_k, STEP_TOKENS)
