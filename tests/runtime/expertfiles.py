"""Files of random experts in every layout, and what their bytes must be."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from colibri_mmap.errors import ArgumentError
from colibri_mmap.format.experts import ExpertLayer, ExpertPart
from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime.pages import PAGE, MappedFile
from colibri_mmap.runtime.policy import ExpertPolicy
from colibri_mmap.runtime.sources import (
    BufferedExperts,
    ExpertNumbers,
    IoMode,
    MappedExperts,
)

Layout = Literal["stacked", "fused", "packed", "scattered"]
LAYOUTS: tuple[Layout, ...] = ("stacked", "fused", "packed", "scattered")
LAYERS = (1, 2, 5)  # some models have layers without experts


@dataclass(frozen=True)
class ExpertFiles:
    """Layers of experts in open files, and the bytes that were written to these."""

    numbers: ExpertNumbers
    layers: dict[int, ExpertLayer]
    files: list[MappedFile]
    contents: list[bytes] = field(repr=False)

    @property
    def expert_bytes(self) -> int:
        return self.layers[LAYERS[0]].expert_bytes

    def mapped(self) -> MappedExperts:
        return MappedExperts(self.numbers, self.layers, self.files)

    def source(self, io: IoMode, budget: int = 0) -> MappedExperts | BufferedExperts:
        """A source of these experts, buffers for `budget` experts and some more."""
        if io == "mmap":
            return self.mapped()
        size = self.expert_bytes
        try:
            return BufferedExperts(
                self.numbers, self.layers, self.files, budget * size, direct=io == "direct"
            )
        except ArgumentError as error:
            pytest.skip(str(error))

    def policy(self, source: MappedExperts | BufferedExperts, budget: int) -> ExpertPolicy:
        """A policy that keeps `budget` experts."""
        sizes = source.sizes.reshape(len(self.numbers.layers), self.numbers.count)
        return ExpertPolicy(sizes, budget * int(source.sizes[0]))

    def expected(self, part: str, layer: int, expert: int) -> bytes:
        found = self.layers[layer].parts[part]
        start = int(found.offsets[expert])
        return self.contents[int(found.shards[expert])][start : start + found.nbytes]

    def check(
        self, source: MappedExperts | BufferedExperts, layer: int, experts: np.ndarray
    ) -> None:
        """Assert that a source has the right bytes of these experts."""
        for part in ("gate", "up", "down"):
            addresses = source.addresses(part, layer, experts)
            for expert, address in zip(experts.tolist(), addresses.tolist(), strict=True):
                want = self.expected(part, layer, expert)
                assert ctypes.string_at(address, len(want)) == want, (layer, expert, part)

    def evict_all(self) -> None:
        """Let the page cache forget the files, as a system short of memory would."""
        for file in self.files:
            file.evict(0, -(-file.size // PAGE) * PAGE)


@contextmanager
def expert_files(
    folder: Path, layout: Layout, experts: int = 8, rows: int = 40
) -> Iterator[ExpertFiles]:
    """Experts of about 0.1 * `rows` KB, at odd offsets where the layout has them anywhere."""
    random = np.random.default_rng(3)
    shapes = {"gate": (1024, rows), "up": (1024, rows), "down": (512, 2 * rows + 1)}
    sizes = {name: 34 * width // 32 * count for name, (width, count) in shapes.items()}
    ends = [0, 0]

    def place(nbytes: int, shard: int, alignment: int = 1) -> int:
        """Room at the end of a shard, after an odd gap unless it is to be aligned."""
        start = ends[shard] + (12_345 if alignment == 1 else 0)
        start = -(-start // alignment) * alignment
        ends[shard] = start + nbytes
        return start

    layers = {}
    for number, layer in enumerate(LAYERS):
        shards = np.full(experts, number % 2, np.int64)
        offsets: dict[str, np.ndarray] = {}
        each = np.arange(experts)
        if layout == "stacked":
            for name, size in sizes.items():
                offsets[name] = place(size * experts, number % 2) + each * size
        elif layout == "fused":
            both = sizes["gate"] + sizes["up"]
            offsets["gate"] = place(both * experts, number % 2) + each * both
            offsets["up"] = offsets["gate"] + sizes["gate"]
            offsets["down"] = place(sizes["down"] * experts, number % 2) + each * sizes["down"]
        else:
            # packed: one slab for each; scattered: so is the first one, others in any order
            offsets = {name: np.zeros(experts, np.int64) for name in sizes}
            whole = experts if layout == "packed" else 1
            for expert in range(whole):
                at = place(sum(sizes.values()), number % 2, PAGE)
                for name, size in sizes.items():
                    offsets[name][expert] = at
                    at += size
            rest = [(name, e) for name in sizes for e in range(whole, experts)]
            for index in random.permutation(len(rest)).tolist():
                name, expert = rest[index]
                offsets[name][expert] = place(sizes[name], number % 2)
        parts = {
            name: ExpertPart(name, GGMLType.Q8_0, shapes[name], shards, offsets[name])
            for name in sizes
        }
        layers[layer] = ExpertLayer(layer, experts, parts)
    contents = [random.bytes(end) for end in ends]
    with ExitStack() as stack:
        files = []
        for shard, content in enumerate(contents):
            path = folder / f"{layout}-{shard}.bin"
            write(path, content)
            files.append(MappedFile(path, len(content)))
            stack.callback(files[-1].close)
        yield ExpertFiles(ExpertNumbers(LAYERS, experts), layers, files, contents)


def write(path: Path, content: bytes) -> None:
    """Write to the disk itself: the page cache does not forget pages that are not there yet."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
