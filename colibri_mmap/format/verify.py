"""Checking a model file: its structure and, for a container, every checksum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path

import xxhash

from colibri_mmap.format.container import VERSION_KEY, records
from colibri_mmap.format.experts import all_expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.format.stream import StreamReader


@dataclass(frozen=True, slots=True)
class Verification:
    """What was found: plain GGUF has no checksums, `damaged` names what does not match."""

    path: Path
    has_checksums: bool
    checked_bytes: int
    damaged: tuple[str, ...]


def verify(
    path: str | PathLike[str], progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Check the structure of a model (FormatError) and recompute a container's checksums."""
    gguf = open_gguf(path)
    all_expert_layers(gguf)
    if VERSION_KEY not in gguf.metadata:
        return Verification(gguf.path, False, 0, ())
    total = sum(record.nbytes for record in records(gguf))
    done = 0
    damaged = []
    with StreamReader(tuple(shard.path for shard in gguf.shards)) as reader:
        for record in records(gguf):
            digest = xxhash.xxh3_64()
            for chunk in reader.chunks(record.shard, record.offset, record.nbytes):
                digest.update(chunk)
                done += len(chunk)
                if progress:
                    progress(done, total)
            if digest.intdigest() != record.checksum:
                damaged.append(record.name)
    return Verification(gguf.path, True, done, tuple(damaged))
