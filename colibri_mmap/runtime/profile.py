"""What `tune` found out about a model on this machine, kept as JSON for later runs.

A profile holds settings, which only move bytes and never change a result, and the rates that `plan`
estimates with. One that belongs to another model, machine or version is none.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from ..format.gguf import GGUF
from .processor import processor_name
from .sources import IO_MODES, IoMode
from .state import replace_file, state_directory
from .usage import model_identity

VERSION = 1


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Bytes per second: of the disk in order and at expert size by queue depth, of reading memory,
    and of weights going through the kernels. 0 where it could not be measured."""

    disk_sequential: float
    disk_depth_1: float
    disk_depth_4: float
    disk_depth_16: float
    memory: float
    kernels: float


@dataclass(frozen=True, slots=True)
class Profile:
    """Settings that did best, and what they were found with: `ram` is what --ram said."""

    threads: int
    io: IoMode
    prefetch: int
    prefetch_threads: int
    rates: MachineRates
    ram: str | None
    tokens_per_second: float


def load_profile(gguf: GGUF) -> Profile | None:
    """The profile of this model on this machine; None if there is none that can be used."""
    try:
        stored = json.loads(_path(gguf).read_bytes())
        if stored.pop("version") != VERSION:
            return None
        found = Profile(**{**stored, "rates": MachineRates(**stored["rates"])})
        counts = (found.threads, found.prefetch_threads)
        sound = all(1 <= count <= 64 for count in counts) and 0 <= found.prefetch <= 1024
        return found if sound and found.io in IO_MODES else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def save_profile(gguf: GGUF, profile: Profile) -> Path:
    """Store a profile in place of an older one and return its file; OSError if that fails."""
    path = _path(gguf)
    replace_file(path, json.dumps({"version": VERSION, **asdict(profile)}, indent=2) + "\n")
    return path


def machine_name() -> str:
    """What makes a machine another one for a profile: processor, usable cores, memory in GiB."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return f"{processor_name()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def _path(gguf: GGUF) -> Path:
    sizes = [shard.size for shard in gguf.shards]  # files of one model are read differently
    place = repr((model_identity(gguf), sizes, machine_name()))
    name = hashlib.sha256(place.encode()).hexdigest()[:32]
    return state_directory("profiles") / f"{name}.json"
