"""Where the bytes of an expert come from: mapped pages, or plain reads into a bounded buffer.

An expert is a dense number, layer by layer; a source knows its extents and gives the addresses of
its parts while it is loaded.
"""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError
from ..format.experts import ExpertLayer, Extent
from .pages import PAGE, MappedFile, Reservation

IoMode = Literal["mmap", "pread", "direct"]
IO_MODES: tuple[IoMode, ...] = get_args(IoMode)
_SPARE_SLOTS = 64
_READ_BYTES = 1 << 20  # of one plain read: big enough for the disk, small enough to queue several


@dataclass(frozen=True, slots=True)
class ExpertNumbers:
    """(layer, expert) <-> dense number: `layers` in order, `count` experts in each."""

    layers: tuple[int, ...]
    count: int

    @property
    def total(self) -> int:
        return len(self.layers) * self.count

    def first(self, layer: int) -> int:
        return self.layers.index(layer) * self.count

    def name(self, number: int) -> tuple[int, int]:
        """Layer and expert of a number."""
        return self.layers[number // self.count], number % self.count


class ExpertSource(Protocol):
    """Loads, evicts and locates experts; every method may be called from any thread.

    `sizes` int64 [experts]: the bytes of memory that each takes.
    """

    sizes: NDArray[np.int64]
    is_buffer: bool

    def announce(self, number: int) -> None:
        """Start reading an expert, without waiting."""
        ...

    def load(self, number: int) -> None:
        """Wait until an expert is in memory; OSError if it cannot be read."""
        ...

    def evict(self, number: int) -> None:
        """Give an expert's memory back."""
        ...

    def addresses(self, part: str, layer: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where a part of these experts lies; valid while they are loaded."""
        ...

    def resident(self, number: int) -> float:
        """The share of an expert's bytes that is in memory, as the system tells."""
        ...

    def path(self, number: int) -> Path:
        """The file that holds the first byte of an expert."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class _Layout:
    """What all sources know: the extents of every expert, found when first asked for."""

    def __init__(
        self, numbers: ExpertNumbers, layers: dict[int, ExpertLayer], files: list[MappedFile]
    ) -> None:
        self.numbers, self.layers, self._files = numbers, layers, files
        self._extents: dict[int, tuple[Extent, ...]] = {}

    def extents(self, number: int) -> tuple[Extent, ...]:
        found = self._extents.get(number)
        if found is None:
            layer, expert = self.numbers.name(number)
            found = self._extents[number] = self.layers[layer].extents(expert)
        return found

    def path(self, number: int) -> Path:
        return self._files[self.extents(number)[0].shard].path


class MappedExperts(_Layout):
    """Experts in the mapped files themselves: the page cache holds them, nothing is copied."""

    is_buffer = False

    def __init__(
        self, numbers: ExpertNumbers, layers: dict[int, ExpertLayer], files: list[MappedFile]
    ) -> None:
        super().__init__(numbers, layers, files)
        per_layer = [layers[layer].expert_bytes for layer in numbers.layers]
        self.sizes = np.repeat(np.array(per_layer, np.int64), numbers.count)
        bases = np.array([file.address for file in files], np.int64)
        self._addresses = {
            (name, layer): bases[part.shards] + part.offsets
            for layer, experts in layers.items()
            for name, part in experts.parts.items()
        }

    def announce(self, number: int) -> None:
        for extent in self.extents(number):
            self._files[extent.shard].announce(extent.offset, extent.nbytes)

    def load(self, number: int) -> None:
        for extent in self.extents(number):
            self._files[extent.shard].populate(extent.offset, extent.nbytes)

    def evict(self, number: int) -> None:
        for extent in self.extents(number):
            self._files[extent.shard].evict(extent.offset, extent.nbytes)

    def resident(self, number: int) -> float:
        """The share of an expert's bytes that the page cache holds."""
        extents = self.extents(number)
        inside = sum(self._files[e.shard].resident_bytes(e.offset, e.nbytes) for e in extents)
        return min(1.0, inside / sum(e.nbytes for e in extents))

    def close(self) -> None:
        """The files belong to the model's weights, which close them."""

    def addresses(self, part: str, layer: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._addresses[part, layer][experts]


class BufferedExperts(_Layout):
    """Experts read into slots of anonymous memory; `direct` reads past the page cache (O_DIRECT).

    A slot holds one expert of any layer.
    """

    is_buffer = True

    def __init__(
        self,
        numbers: ExpertNumbers,
        layers: dict[int, ExpertLayer],
        files: list[MappedFile],
        budget: int,
        *,
        direct: bool,
    ) -> None:
        """`budget` bytes of slots, and some more for what is being read."""
        super().__init__(numbers, layers, files)
        flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fds: list[int] = []
        try:
            for file in files:  # the very file that is mapped, whatever has its name by now
                self._fds.append(os.open(f"/proc/self/fd/{file.fd}", flags))
        except OSError as error:
            self.close()
            raise ArgumentError(
                f"{file.path}: plain reads are not possible here ({error.strerror}); use --io mmap"
            ) from error
        # An expert whose parts all lie apart takes the most: each may begin and end within a page.
        self._slot_bytes = max(
            sum(-(-part.nbytes // PAGE) * PAGE + PAGE for part in layer.parts.values())
            for layer in layers.values()
        )
        self.sizes = np.full(numbers.total, self._slot_bytes, np.int64)
        everything = sum(layer.expert_bytes * layer.n_experts for layer in layers.values())
        fits = budget >= everything  # then nothing will be evicted
        slots = numbers.total if fits else budget // self._slot_bytes + _SPARE_SLOTS
        self._memory = Reservation(slots * self._slot_bytes, "experts that are read")
        self._free = list(range(slots - 1, -1, -1))
        self._changed = threading.Condition()
        self._slot_of = np.full(numbers.total, -1, np.int64)
        self._within: dict[tuple[str, int], NDArray[np.int64]] = {}

    def announce(self, number: int) -> None:
        """Plain reads are started by `load`."""

    def load(self, number: int) -> None:
        if self._slot_of[number] >= 0:
            return  # its eviction was overtaken
        with self._changed:
            self._changed.wait_for(lambda: self._free)
            slot = self._free.pop()
        try:
            self._read(number, slot * self._slot_bytes)
        except OSError:
            self._release(slot)
            raise
        self._slot_of[number] = slot

    def _read(self, number: int, at: int) -> None:
        memory = memoryview(self._memory.buffer)
        for extent in self.extents(number):
            start = extent.offset // PAGE * PAGE
            end = -(-(extent.offset + extent.nbytes) // PAGE) * PAGE
            done = start
            while done < extent.offset + extent.nbytes:
                length = min(_READ_BYTES, end - done)
                target = memory[at + done - start : at + done - start + length]
                count = os.preadv(self._fds[extent.shard], [target], done)
                done += count
                if count < length and done < extent.offset + extent.nbytes:
                    raise OSError(errno.EIO, "the file ends early")
            at += end - start

    def evict(self, number: int) -> None:
        slot = int(self._slot_of[number])
        if slot >= 0:  # else it was evicted twice, with a load overtaken in between
            self._slot_of[number] = -1
            self._release(slot)

    def _release(self, slot: int) -> None:
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

    def addresses(self, part: str, layer: int, experts: NDArray[np.int64]) -> NDArray[np.int64]:
        if (part, layer) not in self._within:
            self._within[part, layer] = self._offsets(part, layer)
        slots = self._slot_of[self.numbers.first(layer) + experts]
        assert (slots >= 0).all()
        base = self._memory.address + slots * self._slot_bytes
        return base + self._within[part, layer][experts]

    def _offsets(self, name: str, layer: int) -> NDArray[np.int64]:
        """Where a part of each expert lies in a slot."""
        part = self.layers[layer].parts[name]
        result = np.empty(self.numbers.count, np.int64)
        for expert in range(self.numbers.count):
            at, offset = 0, int(part.offsets[expert])
            for extent in self.extents(self.numbers.first(layer) + expert):
                start = extent.offset // PAGE * PAGE
                inside = extent.offset <= offset < extent.offset + extent.nbytes
                if extent.shard == part.shards[expert] and inside:
                    result[expert] = at + offset - start
                    break
                at += -(-(extent.offset + extent.nbytes) // PAGE) * PAGE - start
        return result

    def resident(self, number: int) -> float:
        return 1.0

    def check_integrity(self) -> None:
        """Assert that no slot is used twice or lost, while nothing is being read."""
        used = self._slot_of[self._slot_of >= 0].tolist()
        assert sorted(used + self._free) == list(range(len(used) + len(self._free)))
        assert (len(used) + len(self._free)) * self._slot_bytes == self._memory.bytes.size

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds = []
