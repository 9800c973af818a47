"""How an expert lies in a slot of VRAM, and how it gets from the file to a staging buffer."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..format.experts import ExpertLayer
from .sources import ExpertNumbers

ALIGNMENT = 256  # bytes: of slots, and of the parts in them


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The parts of an expert one after another: their offsets and sizes in bytes."""

    offsets: Mapping[str, int]
    sizes: Mapping[str, int]
    nbytes: int

    @classmethod
    def of(cls, layer: ExpertLayer) -> SlotLayout:
        offsets, sizes, end = {}, {}, 0
        for name, part in layer.parts.items():
            offsets[name], sizes[name] = end, part.nbytes
            end += -(-part.nbytes // ALIGNMENT) * ALIGNMENT
        return cls(offsets, sizes, end)


class ExpertReader:
    """Reads experts into staging buffers, through the page cache; from any thread.

    `sizes` int64 [experts]: the bytes of their slots. Plain reads are as fast as copying from the
    mapping, and tell of a failing disk by an error.
    """

    def __init__(
        self, numbers: ExpertNumbers, layers: Mapping[int, ExpertLayer], fds: Sequence[int]
    ) -> None:
        """`fds`: of the shards, open while this is used."""
        self.numbers, self._layers, self._fds = numbers, layers, fds
        self.layouts = {number: SlotLayout.of(layers[number]) for number in numbers.layers}
        per_layer = [self.layouts[layer].nbytes for layer in numbers.layers]
        self.sizes = np.repeat(np.array(per_layer, np.int64), numbers.count)

    def fill(self, number: int, start: int, staging: NDArray[np.uint8]) -> None:
        """Bring what an expert's slot has from byte `start` on into `staging`; OSError."""
        layer, expert = self.numbers.name(number)
        layout, memory, end = self.layouts[layer], staging.data, start + len(staging)
        for name, part in self._layers[layer].parts.items():
            place = layout.offsets[name]
            at, stop = max(start, place), min(end, place + layout.sizes[name])
            fd, offset = self._fds[int(part.shards[expert])], int(part.offsets[expert]) - place
            while at < stop:
                count = os.preadv(fd, [memory[at - start : stop - start]], offset + at)
                if not count:
                    raise OSError(errno.EIO, "the file ends early")
                at += count
