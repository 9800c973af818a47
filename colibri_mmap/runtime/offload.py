"""The routed experts on two processors: those in VRAM on the device, the others on the CPU.

`begin` launches what the device has and says which choices these are; the CPU computes the rest
meanwhile, from mapped pages; `finish` adds the device's sums. Missed experts are offered to the
cache behind it: an upload serves later steps, no step waits for one.

T tokens, k choices of each, G experts in a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .device import DeviceBackend, DeviceError, Dimensions, KernelLaunch, Stream
from .devicearena import DeviceArena, DeviceReading, Downloads, UploadRing, aligned
from .devicekernels import DeviceKernels, ExpertShape, ExpertTables
from .operations import Operations
from .ops import Ops
from .routing import Routing
from .slots import ExpertReader
from .vram import VramCache

_MOST_PAIRS = 2048  # choices computed at a time: bounds the device memory of prefill
_PARTS = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias")


class _Recorder:
    """In place of a device, for launches that are kept."""

    compute: Stream = None

    def __init__(self) -> None:
        self.launches: list[KernelLaunch] = []

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: Stream,
    ) -> None:
        self.launches.append(KernelLaunch(kernel, grid, block, tuple(arguments)))

    def take(self) -> list[KernelLaunch]:
        """What was recorded since this was last asked."""
        taken, self.launches = self.launches, []
        return taken


class Offload:
    """Computes the experts that a cache has in VRAM; `shapes` has the layers that can be there."""

    def __init__(
        self,
        backend: DeviceBackend,
        cpu: Ops,
        cache: VramCache,
        reader: ExpertReader,
        shapes: Mapping[int, ExpertShape],
        *,
        scratch: int = 0,
    ) -> None:
        """`scratch` bytes of device memory to compute with are taken now, more when needed."""
        self.cache = cache
        self._backend, self._cpu, self._shapes = backend, cpu, shapes
        self._arena, self._uploads = DeviceArena(backend, scratch), UploadRing(backend)
        self._downloads = Downloads(backend, cpu.arena)
        self._recorder = _Recorder()
        self._kernels = DeviceKernels(cast(DeviceBackend, self._recorder))  # it only launches
        self._again: dict[object, Callable[[], None]] = {}  # the launches of one token's experts
        self._single: dict[int, ExpertTables] = {}  # of one token, by the number of experts
        self._count = reader.numbers.count
        self._first = {layer: reader.numbers.first(layer) for layer in shapes}
        self._offsets = {layer: _offsets(reader.layouts[layer].offsets) for layer in shapes}
        self._missed = np.empty(0, np.int64)
        self._reading: DeviceReading | None = None

    @staticmethod
    def scratch_bytes(shapes: Mapping[int, ExpertShape], top_k: int, tokens: int) -> int:
        """Device memory to compute with, in steps of up to `tokens` tokens."""
        at_once = min(tokens, _tokens_at_once(top_k))
        pairs, most = at_once * top_k, tokens * top_k
        tables = ExpertTables.bytes_for(groups=most, pairs=pairs, count=at_once)
        return max(
            2 * aligned(4 * tokens * shape.width)
            + aligned(tables)
            + DeviceKernels.packed_bytes(at_once, shape.width)
            + DeviceKernels.experts_bytes(shape, pairs)
            for shape in shapes.values()
        )

    def begin(
        self, x: Rows, h: Rows, on_host: Rows, layer: int, routing: Routing, ops: Operations
    ) -> NDArray[np.bool_] | None:
        """Launch what is in VRAM; which choices [T, k] that is, None if it is none of them.

        With a device's operations the sums are added to x in its order, else by `finish`.
        """
        self._missed, self._reading = np.empty(0, np.int64), None  # of a step that was given up
        shape = self._shapes.get(layer)
        if shape is None:
            return None
        numbers = self._first[layer] + routing.ids
        if x.count == 1:
            distinct, inverse = numbers[0], np.arange(numbers.size)
        else:
            distinct, inverse = np.unique(numbers, return_inverse=True)
        addresses = self.cache.use(distinct)
        present = addresses != 0
        self._missed = distinct[~present]
        if not present.any():
            return None
        chosen: NDArray[np.bool_] = present[inverse].reshape(numbers.shape)
        experts = (np.cumsum(present) - 1)[inverse].reshape(numbers.shape)
        offsets = self._offsets[layer][:, None]
        parts = np.where(offsets < 0, 0, addresses[present] + offsets)
        try:
            self._start(x, h, on_host, shape, parts, chosen, experts, routing.weights, ops)
        finally:
            self.cache.release(distinct[present])
        return chosen

    def finish(self, x: Rows) -> None:
        """The CPU is done with its share: add the device's to x, unless it is there already."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._cpu.add(x, reading.wait()[0])
        self.cache.offer(self._missed)

    def prefetch(self, layer: int, experts: Sequence[int]) -> None:
        """Upload experts of a layer that are likely to be chosen next, the likeliest first."""
        if layer in self._first:
            self.cache.prefetch(self._first[layer] + expert for expert in experts)

    def resident(self) -> dict[int, NDArray[np.bool_]]:
        """Which experts of each layer are in VRAM or on their way there."""
        everywhere = self.cache.resident()
        return {
            layer: everywhere[first : first + self._count] for layer, first in self._first.items()
        }

    # -------------------------------------------------------------------------- launching
    def _start(
        self,
        x: Rows,
        h: Rows,
        on_host: Rows,
        shape: ExpertShape,
        parts: NDArray[np.int64],
        chosen: NDArray[np.bool_],
        experts: NDArray[np.int64],
        weights: NDArray[np.float32],
        ops: Operations,
    ) -> None:
        """Launch the `chosen` ones; `parts` [6, G]: where they are, `experts` [T, k]: which."""
        with self._arena.temporaries():
            if ops is self._cpu:
                sums, h = self._arena.rows(x.count, x.width), self._upload(on_host)
            else:
                sums = x
            step = _tokens_at_once(chosen.shape[1])
            for first in range(0, x.count, step):
                some = slice(first, first + step)
                if x.count == 1:
                    tables = self._tables_of_one(parts, weights[chosen])
                else:
                    tables = _tables(parts, chosen[some], experts[some], weights[some])
                rows = (h.part(first, tables.count), sums.part(first, tables.count))
                self._launch(shape, tables, *rows, add=sums is x, keep=x.count == 1)
            if sums is not x:
                self._reading = self._downloads.start(sums)

    def _tables_of_one(
        self, parts: NDArray[np.int64], weights: NDArray[np.float32]
    ) -> ExpertTables:
        """For a step of one token, all of whose experts [G] these are."""
        groups = parts.shape[1]
        known = self._single.get(groups)
        if known is None:
            each, once = np.arange(groups), np.zeros(groups, np.int64)
            known = ExpertTables.of(parts, each, once, weights, 1)
            self._single[groups] = known
        return replace(known, addresses=parts, entry_downs=parts[2::3], entry_weights=weights)

    def _launch(
        self,
        shape: ExpertShape,
        tables: ExpertTables,
        h: Rows,
        sums: Rows,
        *,
        add: bool,
        keep: bool,
    ) -> None:
        """`keep`: the same launches will be made again; else they are made anew each time."""
        arena, kernels = self._arena, self._kernels
        with arena.temporaries():
            memory = np.empty(tables.nbytes, np.uint8)
            tables.write(memory)
            address = arena.take(tables.nbytes)
            self._uploads.upload(address, memory)
            packing = arena.take(kernels.packed_bytes(h.count, h.width))
            scratch = arena.take(kernels.experts_bytes(shape, tables.pairs))
            key = (shape, tables.groups, h.address, sums.address, add, address)
            if keep and key in self._again:
                self._again[key]()
                return
            self._recorder.take()  # what was left of a step that was given up
            where = (h.address, h.count, h.width, h.stride // 4)
            packed = kernels.pack(shape.type, *where, packing)
            place = (sums.address, sums.stride // 4)
            kernels.experts(shape, tables, address, packed, scratch, *place, add)
            launches = self._recorder.take()
        for launch in launches:
            self._backend.launch(*launch, self._backend.compute)
        if keep:
            self._again[key] = self._backend.joined(launches)

    def _upload(self, rows: Rows) -> Rows:
        """Rows of the CPU's in the device's memory."""
        copy = self._arena.rows(rows.count, rows.width)
        self._uploads.upload(copy.address, self._cpu.arena.view(rows))
        return copy

    def close(self) -> None:
        """End the uploads and give the memory back, after what was launched."""
        try:
            with suppress(DeviceError):  # it has been told already
                self._backend.synchronize(self._backend.record(self._backend.compute))
        finally:
            self.cache.close()
            self._arena.close()


def _tokens_at_once(top_k: int) -> int:
    return max(1, _MOST_PAIRS // top_k)


def _tables(
    parts: NDArray[np.int64],
    chosen: NDArray[np.bool_],
    experts: NDArray[np.int64],
    weights: NDArray[np.float32],
) -> ExpertTables:
    """For some tokens of a step, which use some of the experts [G]."""
    tokens = np.nonzero(chosen)[0]
    return ExpertTables.of(parts, experts[chosen], tokens, weights[chosen], len(chosen))


def _offsets(offsets: Mapping[str, int]) -> NDArray[np.int64]:
    """Where gate, up, down and their biases lie in a slot [6]; -1: there is none."""
    return np.array([offsets.get(part, -1) for part in _PARTS], np.int64)
