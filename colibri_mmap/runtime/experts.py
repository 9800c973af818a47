"""The routed experts: choosing them, and computing the chosen ones on the mapped weights.

Tokens are grouped by expert, so that each distinct expert of a batch is touched once; the outputs
of a token are summed in router order, whatever the order in which they were computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..format.quants import GGMLType
from .arena import Rows
from .kernels import elementwise
from .ops import Ops, Packed, combine_job, silu_job
from .pool import ARGUMENTS, Job, Launch, job
from .weights import ExpertWeights


@dataclass(frozen=True, slots=True)
class Routing:
    """Chosen experts int64 [T, k], best first, and the float32 [T, k] factors on their outputs."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    ids_address: int
    weights_address: int


def softmax_top_k(ops: Ops, logits: Rows, k: int, *, normalise: bool) -> Routing:
    """The k experts with the largest softmax probability; `normalise`: their weights sum to 1."""
    arena, count = ops.arena, logits.count
    ids_address, weights = arena.take(8 * count * k), arena.rows(count, k)
    words = (logits.address, logits.stride, logits.width, k, ids_address, weights.address)
    key = ("softmax_top_k", count, *words, normalise) if count == 1 else None
    task = elementwise.softmax_top_k
    ops.run(key, lambda: [[job(task, count, 16, *words, int(normalise))]])
    ids = arena.integers(ids_address, count * k).reshape(count, k)
    return Routing(ids, arena.view(weights), ids_address, weights.address)


@dataclass(frozen=True, slots=True)
class _DecodeLaunch:
    """A decode step of one layer: the rows of its job table that get a new address per token."""

    launch: Launch
    gate: slice
    up: slice
    down: slice


class ExpertStore:
    """(layer, chosen ids) -> weighted expert outputs, added to the residual stream."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self._layers: dict[int, ExpertWeights] = {}
        self._decode: dict[object, _DecodeLaunch] = {}
        self._identity = np.arange(1 << 12, dtype=np.int64)

    def add_layer(self, layer: int, experts: ExpertWeights) -> None:
        """Make the experts of a layer known."""
        self._layers[layer] = experts

    @property
    def types(self) -> set[GGMLType]:
        """The weight types of all experts."""
        return {p.type for e in self._layers.values() for p in (e.gate, e.up, e.down)}

    def add_experts(self, x: Rows, h: Rows, layer: int, routing: Routing) -> None:
        """x[t] += sum over j of weights[t, j] * expert ids[t, j] of h[t]."""
        experts = self._layers[layer]
        parts = (experts.gate, experts.up, experts.down)
        with self._ops.temporaries():
            if any(self._ops.kernels(part.type) is None for part in parts):
                self._add_without_kernels(x, h, experts, routing)
            elif h.count == 1:
                self._add_one_token(x, h, experts, layer, routing)
            else:
                self._add_grouped(x, h, experts, routing)

    # -------------------------------------------------------------------------- one token
    def _add_one_token(
        self, x: Rows, h: Rows, experts: ExpertWeights, layer: int, routing: Routing
    ) -> None:
        """A decode step: all chosen experts in one launch, kept and given new weight addresses."""
        key = (layer, x.address, h.address, routing.weights_address)
        step = self._decode.get(key)
        if step is None:
            step = self._decode[key] = self._one_token_launch(x, h, experts, routing)
        chosen, jobs = routing.ids[0], step.launch.jobs
        jobs[step.gate, ARGUMENTS] = experts.gate.addresses[chosen]
        jobs[step.up, ARGUMENTS] = experts.up.addresses[chosen]
        jobs[step.down, ARGUMENTS] = experts.down.addresses[chosen]
        self._ops.pool.run(step.launch)

    def _one_token_launch(
        self, x: Rows, h: Rows, experts: ExpertWeights, routing: Routing
    ) -> _DecodeLaunch:
        ops, k = self._ops, routing.ids.shape[1]
        gate, up = (ops.arena.rows(k, part.rows) for part in (experts.gate, experts.up))
        y = ops.arena.rows(k, x.width)
        wide = [
            (part.matrix(0), out.part(j, 1))
            for part, out in ((experts.gate, gate), (experts.up, up))
            for j in range(k)
        ]
        pack_in, products_in = ops.product_phases(h, wide)
        narrow = [
            ops.product_phases(gate.part(j, 1), [(experts.down.matrix(0), y.part(j, 1))])
            for j in range(k)
        ]
        pack_out = [job for packs, _ in narrow for job in packs]
        products_out = [job for _, products in narrow for job in products]
        identity = self._identity.ctypes.data
        combine = combine_job(x, y, identity, routing.weights_address, k)
        phases = [pack_in, products_in, [silu_job(gate, up)], pack_out, products_out, [combine]]
        first = len(pack_in)
        last = first + 2 * k + 1 + len(pack_out)
        return _DecodeLaunch(
            Launch(phases),
            slice(first, first + k),
            slice(first + k, first + 2 * k),
            slice(last, last + k),
        )

    # -------------------------------------------------------------------------- many tokens
    def _add_grouped(self, x: Rows, h: Rows, experts: ExpertWeights, routing: Routing) -> None:
        """Slots, one per (token, choice), are sorted by expert: its weights serve all of them."""
        ops, k = self._ops, routing.ids.shape[1]
        groups = _group(routing.ids)
        tokens = ops.arena.copy_in(groups.order // k)
        slots = ops.arena.copy_in(groups.slot_of)
        total = len(groups.order)
        gate, up = (ops.arena.rows(total, part.rows) for part in (experts.gate, experts.up))
        y = ops.arena.rows(total, x.width)
        phases: list[list[Job]] = [[], [], [silu_job(gate, up)], [], []]
        for expert, start, stop in groups.ranges:
            count = stop - start
            packed: Packed = {}
            for part, out in ((experts.gate, gate), (experts.up, up)):
                phases[0] += ops.pack_jobs(part.type, h, count, packed, tokens + 8 * start)
                target = out.part(start, count)
                phases[1].append(ops.product_job(part.matrix(expert), packed, target))
            packed = {}
            hidden = gate.part(start, count)
            phases[3] += ops.pack_jobs(experts.down.type, hidden, count, packed)
            target = y.part(start, count)
            phases[4].append(ops.product_job(experts.down.matrix(expert), packed, target))
        phases.append([combine_job(x, y, slots, routing.weights_address, k)])
        ops.run(None, lambda: phases)

    def _add_without_kernels(
        self, x: Rows, h: Rows, experts: ExpertWeights, routing: Routing
    ) -> None:
        """The slow, exact way for weight types without kernels: expert by expert, part by part."""
        ops, k = self._ops, routing.ids.shape[1]
        groups = _group(routing.ids)
        y = ops.arena.rows(len(groups.order), x.width)
        for expert, start, stop in groups.ranges:
            with ops.temporaries():
                rows = ops.select(h, groups.order[start:stop] // k)
                gate, up = ops.linears(rows, experts.gate.matrix(expert), experts.up.matrix(expert))
                out = ops.linear(ops.silu_mul(gate, up), experts.down.matrix(expert))
                ops.arena.view(y)[start:stop] = ops.arena.view(out)
        slots = ops.arena.copy_in(groups.slot_of)
        ops.run(None, lambda: [[combine_job(x, y, slots, routing.weights_address, k)]])


@dataclass(frozen=True, slots=True)
class _Groups:
    """Choices sorted by expert: `order` [T * k] their numbers t * k + j, `slot_of` the inverse,
    `ranges` (expert, first slot, last slot + 1)."""

    order: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    ranges: list[tuple[int, int, int]]


def _group(ids: NDArray[np.int64]) -> _Groups:
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    slot_of = np.empty_like(order)
    slot_of[order] = np.arange(len(order))
    experts, starts = np.unique(flat[order], return_index=True)
    stops = [*starts[1:].tolist(), len(order)]
    return _Groups(order, slot_of, list(zip(experts.tolist(), starts.tolist(), stops, strict=True)))
