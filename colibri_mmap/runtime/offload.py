"""The routed experts on two processors: those in VRAM on the device, the others on the CPU.

`begin` launches what the device has and says which choices these are; the CPU computes the rest
meanwhile, from mapped pages; `finish` adds the device's sums. Missed experts are offered to the
cache behind it: an upload serves later steps, no step waits for one.

T tokens, k choices of each, G experts in a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import cast

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .device import Address, DeviceBackend, DeviceError, Dimensions, KernelLaunch, Stream
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


class _SingleTables:
    """The tables of one token that uses so many experts, of which addresses and weights change."""

    def __init__(self, groups: int) -> None:
        each, once = np.arange(groups), np.zeros(groups, np.int64)
        none = np.zeros((6, groups), np.int64)
        self.tables = ExpertTables.of(none, each, once, np.zeros(groups, np.float32), 1)
        self.memory = np.empty(self.tables.nbytes, np.uint8)
        self.tables.write(self.memory)
        addresses, *_, downs, _, starts, _, _, _, weights = self.tables.places(0)
        self._addresses = self.memory[addresses:downs].view(np.int64).reshape(6, groups)
        self._downs = self.memory[downs:starts].view(np.int64).reshape(2, groups)
        self._weights = self.memory[weights:].view(np.float32)

    def set(self, parts: NDArray[np.int64], weights: NDArray[np.float32]) -> None:
        """Experts at `parts` [6, G], in router order."""
        self._addresses[:], self._downs[:], self._weights[:] = parts, parts[2::3], weights


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
        self._single: dict[int, _SingleTables] = {}  # by the number of experts
        self._count = reader.numbers.count
        kinds = list(dict.fromkeys(shapes.values()))
        self._kinds = {layer: kinds.index(shape) for layer, shape in shapes.items()}
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
            distinct = numbers[0]
        else:
            distinct, inverse = np.unique(numbers, return_inverse=True)
        addresses = self.cache.use(distinct)
        present: NDArray[np.bool_] = addresses != 0
        found = np.count_nonzero(present)
        if found < len(distinct):
            self._missed = distinct[~present]
            if not found:
                return None
        offsets, exists = self._offsets[layer]
        used = slice(None) if found == len(distinct) else present
        parts = (addresses[used] + offsets) * exists
        try:
            if x.count == 1:
                self._start_one(x, h, on_host, layer, parts, routing.weights[0, used], ops)
                return present[None]
            chosen = present[inverse].reshape(numbers.shape)
            experts = (np.cumsum(present) - 1)[inverse].reshape(numbers.shape)
            self._start(x, h, on_host, shape, parts, chosen, experts, routing.weights, ops)
            return chosen
        finally:
            self.cache.release(distinct[used])

    def finish(self, x: Rows) -> None:
        """The CPU is done with its share: add the device's to x, unless it is there already."""
        if self._reading is not None:
            reading, self._reading = self._reading, None
            self._cpu.add(x, reading.wait()[0])
        if len(self._missed):
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
    def _start_one(
        self,
        x: Rows,
        h: Rows,
        on_host: Rows,
        layer: int,
        parts: NDArray[np.int64],
        weights: NDArray[np.float32],
        ops: Operations,
    ) -> None:
        """Launch experts of one token; `parts` [6, G]: where they are, `weights` [G].

        All that goes to the device goes there at once; the launches are kept, by their addresses.
        """
        groups = len(weights)
        single = self._single.get(groups)
        if single is None:
            single = self._single[groups] = _SingleTables(groups)
        single.set(parts, weights)
        arena, tables = self._arena, single.tables
        with arena.temporaries():
            if ops is self._cpu:
                sums, before = arena.rows(1, x.width), aligned(4 * x.width)
                h = Rows(arena.take(before + tables.nbytes), 1, x.width)
                address = Address(h.address + before)
                self._uploads.upload(h.address, self._cpu.arena.view(on_host), single.memory)
            else:
                sums, address = x, arena.take(tables.nbytes)
                self._uploads.upload(address, single.memory)
            key = (self._kinds[layer], groups, address, h.address, sums.address)
            again = self._again.get(key)
            if again is not None:
                again()
            else:
                launches = self._launch(self._shapes[layer], tables, address, h, sums, sums is x)
                self._again[key] = self._backend.joined(launches)
            if sums is not x:
                self._reading = self._downloads.start(sums)

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
        arena = self._arena
        with arena.temporaries():
            sums = x
            if ops is self._cpu:
                sums, h = arena.rows(x.count, x.width), arena.rows(x.count, x.width)
                self._uploads.upload(h.address, self._cpu.arena.view(on_host))
            step = _tokens_at_once(chosen.shape[1])
            for first in range(0, x.count, step):
                some = slice(first, first + step)
                tables = _tables(parts, chosen[some], experts[some], weights[some])
                rows = (h.part(first, tables.count), sums.part(first, tables.count))
                with arena.temporaries():
                    memory = np.empty(tables.nbytes, np.uint8)
                    tables.write(memory)
                    address = arena.take(tables.nbytes)
                    self._uploads.upload(address, memory)
                    self._launch(shape, tables, address, *rows, sums is x)
            if sums is not x:
                self._reading = self._downloads.start(sums)

    def _launch(
        self,
        shape: ExpertShape,
        tables: ExpertTables,
        address: Address,
        h: Rows,
        sums: Rows,
        add: bool,
    ) -> list[KernelLaunch]:
        """Compute with tables at an address of the device; the launches."""
        arena, kernels = self._arena, self._kernels
        with arena.temporaries():
            packing = arena.take(kernels.packed_bytes(h.count, h.width))
            scratch = arena.take(kernels.experts_bytes(shape, tables.pairs))
            self._recorder.take()  # what was left of a step that was given up
            where = (h.address, h.count, h.width, h.stride // 4)
            packed = kernels.pack(shape.type, *where, packing)
            place = (sums.address, sums.stride // 4)
            kernels.experts(shape, tables, address, packed, scratch, *place, add)
            launches = self._recorder.take()
        for launch in launches:
            self._backend.launch(*launch, self._backend.compute)
        return launches

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


def _offsets(offsets: Mapping[str, int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where gate, up, down and their biases lie in a slot [6, 1], and a 0 for those that do not."""
    exists = np.array([[int(part in offsets)] for part in _PARTS], np.int64)
    return np.array([[offsets.get(part, 0)] for part in _PARTS], np.int64), exists
