"""The routed experts: computing the chosen ones on the mapped weights.

Tokens are grouped by expert, so that each distinct expert of a batch is touched once; the outputs
of a token are summed in router order, whatever the order in which they were computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .operations import Operations
from .ops import (
    BIAS,
    BIAS_OUT,
    BIAS_X,
    PRODUCT_OUT,
    Ops,
    Packed,
    activation_job,
    bias_job,
    combine_job,
)
from .pager import ExpertPager
from .pool import ARGUMENTS, Job, Launch
from .predict import RouterPredictor
from .routing import Routing
from .task import Task
from .weights import ExpertPartWeights, ExpertWeights, Matrix

if TYPE_CHECKING:
    from .offload import Offload

_WAVE_SLOTS = 1024  # (token, choice) pairs computed at a time: bounds the memory of prefill
_ALL_USED = 16  # choices per expert from which on nearly all of a layer's experts are used


class ExpertStore:
    """(layer, chosen ids) -> weighted expert outputs, added to the residual stream.

    `pager` brings the experts into memory, `offload` computes those on a device, if there is one;
    they are set once all layers are known.
    """

    pager: ExpertPager
    offload: Offload | None = None

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.layers: dict[int, ExpertWeights] = {}
        self.routers: dict[int, Matrix] = {}
        self.activations: dict[int, Task] = {}
        self.predictor: RouterPredictor | None = None
        self._steps: dict[object, _DecodeStep] = {}

    def add_layer(
        self, layer: int, experts: ExpertWeights, router: Matrix, activation: Task
    ) -> None:
        """Make the experts of a layer known; layers come in the order of the forward pass.

        `activation` joins gate and up: `silu_mul` or a task with the same arguments.
        """
        self.layers[layer], self.routers[layer] = experts, router
        self.activations[layer] = activation

    def add_experts(
        self, x: Rows, h: Rows, on_host: Rows, layer: int, routing: Routing, ops: Operations
    ) -> None:
        """x[t] += sum over j of weights[t, j] * expert ids[t, j] of h[t].

        x and h are rows of `ops`; `on_host` is h as rows of the CPU's, where `routing` lies too.
        """
        elsewhere, offload = None, self.offload
        if offload is not None:
            elsewhere = offload.begin(x, h, on_host, layer, routing, ops)
        if elsewhere is not None and (h.count == 1 or self._ops.alone):
            used = routing.ids[elsewhere]
            self.pager.note_elsewhere(layer, used if h.count == 1 else np.unique(used))
        if ops is self._ops:
            self._add_on_cpu(x, on_host, layer, routing, elsewhere)
        elif elsewhere is None or not elsewhere.all():
            with ops.temporaries():
                y = self._ops.zeros(x.count, x.width)
                self._add_on_cpu(y, on_host, layer, routing, elsewhere)
                ops.add(x, ops.from_host(y))
        if offload is not None:
            offload.finish(x)
        if self.predictor is not None and h.count == 1:
            upcoming, guess = self._next_layer(layer), self.predictor.guess(on_host, layer)
            self.pager.prefetch(upcoming, guess)
            if offload is not None and guess:
                offload.prefetch(self.pager.numbers.name(upcoming.start)[0], guess)

    def _add_on_cpu(
        self,
        x: Rows,
        h: Rows,
        layer: int,
        routing: Routing,
        elsewhere: NDArray[np.bool_] | None,
    ) -> None:
        """Add the experts of all choices but those [T, k] that are computed elsewhere."""
        if elsewhere is not None and elsewhere.all():
            return
        experts = self.layers[layer]
        with self._ops.temporaries():
            if h.count == 1 and all(self._ops.kernels(part.type) for part in experts.parts):
                self._add_one_token(x, h, experts, layer, routing, elsewhere)
            else:
                self._add_grouped(x, h, experts, layer, routing, elsewhere)

    def _address(self, part: str, layer: int, expert: int) -> int:
        chosen = np.array([expert], np.int64)
        return int(self.pager.source.addresses(part, layer, chosen)[0])

    def _matrix(self, part: ExpertPartWeights, layer: int, expert: int) -> Matrix:
        return part.at(self._address(part.name, layer, expert))

    # -------------------------------------------------------------------------- one token
    def _add_one_token(
        self,
        x: Rows,
        h: Rows,
        experts: ExpertWeights,
        layer: int,
        routing: Routing,
        elsewhere: NDArray[np.bool_] | None,
    ) -> None:
        """A decode step: groups of chosen experts are computed as the pager delivers them."""
        key = (layer, x.address, h.address, routing.weights_address)
        step = self._steps.get(key)
        if step is None:
            activation = self.activations[layer]
            step = self._steps[key] = _DecodeStep(self._ops, x, h, experts, routing, activation)
        here = step.here(None if elsewhere is None else elsewhere[0])
        chosen, source, run = routing.ids[0, here], self.pager.source, self._ops.pool.run
        run(step.pack)
        for positions in self.pager.fetch(layer, chosen):
            group = chosen[positions]
            run(
                step.group(
                    here[positions],
                    [source.addresses(name, layer, group) for name in experts.part_names],
                )
            )
        run(step.combine)

    # -------------------------------------------------------------------------- many tokens
    def _add_grouped(
        self,
        x: Rows,
        h: Rows,
        experts: ExpertWeights,
        layer: int,
        routing: Routing,
        elsewhere: NDArray[np.bool_] | None,
    ) -> None:
        """Slots, one per (token, choice), are sorted by expert: its weights serve all of them."""
        ops, k = self._ops, routing.ids.shape[1]
        groups = _group(routing.ids, elsewhere)
        slots = ops.arena.copy_in(groups.slot_of)
        y = ops.arena.rows(len(groups.order), x.width)
        many = len(groups.order) >= _ALL_USED * experts.count
        upcoming = self._next_layer(layer) if many else ()
        native = all(ops.kernels(part.type) for part in experts.parts)
        delivered = (
            self.pager.fetch(layer, groups.experts, k)
            if ops.alone
            else self.pager.stream(layer, groups.experts, upcoming)
        )
        for positions in delivered:
            for wave in _waves(positions, groups):
                with ops.temporaries():
                    if native:
                        self._run_wave(h, y, experts, layer, groups, wave, k)
                    else:
                        self._run_wave_without_kernels(h, y, experts, layer, groups, wave, k)
        combine = combine_job(x, y, slots, routing.weights_address, k)
        ops.run(None, lambda: [[combine]])

    def _next_layer(self, layer: int) -> range:
        """The numbers of the next layer's experts."""
        numbers = self.pager.numbers
        after = numbers.layers.index(layer) + 1
        return range(after * numbers.count, min(after + 1, len(numbers.layers)) * numbers.count)

    def _run_wave(
        self,
        h: Rows,
        y: Rows,
        experts: ExpertWeights,
        layer: int,
        groups: _Groups,
        wave: NDArray[np.int64],
        k: int,
    ) -> None:
        """Some experts of a layer in one launch, each on all of its tokens."""
        ops, source, chosen = self._ops, self.pager.source, groups.experts[wave]
        at = {n: source.addresses(n, layer, chosen).tolist() for n in experts.part_names}
        total = int((groups.stops[wave] - groups.starts[wave]).sum())
        gate, up = (ops.arena.rows(total, part.rows) for part in (experts.gate, experts.up))
        activation = [activation_job(self.activations[layer], gate, up)]
        phases: list[list[Job]] = [[], [], [], activation, [], [], []]
        first = 0
        for number, index in enumerate(wave.tolist()):
            start, count = (
                int(groups.starts[index]),
                int(groups.stops[index] - groups.starts[index]),
            )
            tokens = ops.arena.copy_in(groups.order[start : start + count] // k)
            packed: Packed = {}
            outs = (gate.part(first, count), up.part(first, count), y.part(start, count))
            for part, out in zip(experts.parts[:2], outs[:2], strict=True):
                phases[0] += ops.pack_jobs(part.type, h, count, packed, tokens)
                matrix = part.at(at[part.name][number])
                phases[1].append(ops.product_job(matrix, packed, out))
            packed = {}
            phases[4] += ops.pack_jobs(experts.down.type, outs[0], count, packed)
            matrix = experts.down.at(at[experts.down.name][number])
            phases[5].append(ops.product_job(matrix, packed, outs[2]))
            for name, out, phase in zip(experts.bias_names, outs, (2, 2, 6), strict=False):
                phases[phase].append(bias_job(out, at[name][number]))
            first += count
        ops.run(None, lambda: phases)

    def _run_wave_without_kernels(
        self,
        h: Rows,
        y: Rows,
        experts: ExpertWeights,
        layer: int,
        groups: _Groups,
        wave: NDArray[np.int64],
        k: int,
    ) -> None:
        """The slow, exact way for weight types without kernels: expert by expert, part by part."""
        ops = self._ops
        for index in wave.tolist():
            start, stop = int(groups.starts[index]), int(groups.stops[index])
            expert = int(groups.experts[index])
            gate, up, down = (self._matrix(part, layer, expert) for part in experts.parts)
            with ops.temporaries():
                rows = ops.select(h, groups.order[start:stop] // k)
                hidden, other = ops.linears(rows, gate, up)
                biases = [self._address(name, layer, expert) for name in experts.bias_names]
                parts = zip((hidden, other), biases, strict=False)
                joined = activation_job(self.activations[layer], hidden, other)
                ops.pool.run(Launch([[bias_job(*part) for part in parts], [joined]]))
                out = ops.linear(hidden, down)
                ops.pool.run(Launch([[bias_job(out, bias) for bias in biases[2:]]]))
                ops.arena.view(y)[start:stop] = ops.arena.view(out)


class _DecodeStep:
    """The launches of one layer's experts for one token; kept, they get new addresses per token."""

    def __init__(
        self,
        ops: Ops,
        x: Rows,
        h: Rows,
        experts: ExpertWeights,
        routing: Routing,
        activation: Task,
    ) -> None:
        self._ops, self._experts, self._activation = ops, experts, activation
        k = routing.ids.shape[1]
        self._gate, self._up, self._y = (
            ops.arena.rows(k, part.rows) for part in (experts.gate, experts.up, experts.down)
        )
        self._packed: Packed = {}
        packs = [
            job
            for part in (experts.gate, experts.up)
            for job in ops.pack_jobs(part.type, h, 1, self._packed)
        ]
        self.pack = Launch([packs])
        self._hidden: list[Packed] = [{} for _ in range(k)]
        self._hidden_packs = [
            ops.pack_jobs(experts.down.type, self._gate.part(j, 1), 1, self._hidden[j])
            for j in range(k)
        ]
        self._all = np.arange(k, dtype=np.int64)
        self._slots = self._all.copy()
        slots, weights = self._slots.ctypes.data, routing.weights_address
        self.combine = Launch([[combine_job(x, self._y, slots, weights, k)]])
        self._groups: dict[int, Launch] = {}

    def here(self, elsewhere: NDArray[np.bool_] | None) -> NDArray[np.int64]:
        """The positions of the choice that are computed here: those `combine` will take."""
        if elsewhere is None:
            self._slots[:] = self._all
            return self._all
        self._slots[:] = np.where(elsewhere, -1, self._all)
        return np.flatnonzero(~elsewhere)

    def group(self, positions: NDArray[np.int64], addresses: list[NDArray[np.int64]]) -> Launch:
        """The launch for the experts at `positions` of the choice; `addresses` of their parts."""
        n = len(positions)
        launch = self._groups.get(n)
        if launch is None:
            launch = self._groups[n] = self._build(n)
        jobs, out = launch.jobs, self._y.address + positions * self._y.stride
        gate, up, down, *biases = addresses
        jobs[:n, ARGUMENTS], jobs[n : 2 * n, ARGUMENTS] = gate, up
        narrow = jobs[-2 * n : -n] if biases else jobs[-n:]
        narrow[:, ARGUMENTS], narrow[:, ARGUMENTS + PRODUCT_OUT] = down, out
        if biases:
            wide_biases = slice(2 * n, 4 * n)
            jobs[wide_biases, ARGUMENTS + BIAS] = np.concatenate(biases[:2])
            jobs[-n:, ARGUMENTS + BIAS] = biases[2]
            jobs[-n:, ARGUMENTS + BIAS_X] = jobs[-n:, ARGUMENTS + BIAS_OUT] = out
        return launch

    def _build(self, n: int) -> Launch:
        ops, experts = self._ops, self._experts
        gate, up, y = ([r.part(j, 1) for j in range(n)] for r in (self._gate, self._up, self._y))
        wide = [
            ops.product_job(part.at(0), self._packed, out)
            for part, outs in ((experts.gate, gate), (experts.up, up))
            for out in outs
        ]
        activation = activation_job(self._activation, self._gate.part(0, n), self._up.part(0, n))
        packs = [job for packs in self._hidden_packs[:n] for job in packs]
        down = experts.down.at(0)
        narrow = [ops.product_job(down, self._hidden[j], y[j]) for j in range(n)]
        if not experts.bias_names:
            return Launch([wide, [activation], packs, narrow])
        wide_biases, biases = ([bias_job(out, 0) for out in outs] for outs in (gate + up, y))
        return Launch([wide, wide_biases, [activation], packs, narrow, biases])


@dataclass(frozen=True, slots=True)
class _Groups:
    """Choices sorted by expert.

    `order`: their numbers t * k + j; `slot_of` [T * k]: its inverse, -1 for those that are computed
    elsewhere; `experts`: the distinct ones, whose choices are order[start:stop].
    """

    order: NDArray[np.int64]
    slot_of: NDArray[np.int64]
    experts: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]


def _group(ids: NDArray[np.int64], elsewhere: NDArray[np.bool_] | None) -> _Groups:
    """The choices sorted by expert, without those that are computed elsewhere."""
    flat = ids.ravel()
    order = np.argsort(flat, kind="stable")
    if elsewhere is not None:
        order = order[~elsewhere.ravel()[order]]
    slot_of = np.full_like(flat, -1)
    slot_of[order] = np.arange(len(order))
    experts, starts = np.unique(flat[order], return_index=True)
    return _Groups(order, slot_of, experts, starts, np.append(starts[1:], len(order)))


def _waves(positions: NDArray[np.int64], groups: _Groups) -> Iterator[NDArray[np.int64]]:
    """Positions cut where their choices exceed what is computed at a time."""
    ends = np.cumsum(groups.stops[positions] - groups.starts[positions])
    start = 0
    while start < len(positions):
        before = ends[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _WAVE_SLOTS, side="right")))
        yield positions[start:stop]
        start = stop
