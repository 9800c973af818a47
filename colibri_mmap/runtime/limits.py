"""How much memory this process may use: the machine's and that of every cgroup it is in.

Page cache never counts as used, it makes room. A cgroup therefore leaves its limit minus what
cannot be reclaimed: anonymous and shared memory, kernel stacks, page tables and such. The tightest
of all levels decides. Sources: Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst of
Linux, proc(5).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from ..errors import ResourceError
from .procfs import read_lines, read_number, unescape

# By version: the files with limits, and the fields of memory.stat that cannot be reclaimed.
# Version 1 has sums over the children as total_*, and does not tell which kernel memory is a cache.
_FILES: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {
    1: (("memory.limit_in_bytes",), ("total_rss", "total_shmem")),
    2: (
        ("memory.max", "memory.high"),
        ("anon", "shmem", "kernel_stack", "pagetables", "sec_pagetables", "slab_unreclaimable"),
    ),
}


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes: the smallest bound in all (`total`), and what the tightest, `source`, leaves now."""

    total: int
    available: int
    source: str


@dataclass(frozen=True, slots=True)
class _Hierarchy:
    """Where the memory controller of a cgroup version is, and this process within it."""

    version: int
    mount: Path
    group: Path


def memory_limits(root: Path = Path("/")) -> MemoryLimits:
    """The bounds of this process, read from /proc and the mounted cgroups below `root`."""
    machine = _fields(root / "proc/meminfo")
    if not {"MemTotal", "MemAvailable"} <= machine.keys():
        raise ResourceError(
            f"{root / 'proc/meminfo'} does not tell how much memory there is: "
            "this needs Linux with /proc mounted"
        )
    bounds = [MemoryLimits(machine["MemTotal"], machine["MemAvailable"], "the machine")]
    for hierarchy in _hierarchies(root):
        for group in _levels(hierarchy):
            bounds += _group_limits(hierarchy.version, group)
    tightest = min(bounds, key=lambda bound: bound.available)
    total = min(bound.total for bound in bounds)
    return MemoryLimits(total, tightest.available, tightest.source)


def _group_limits(version: int, group: Path) -> list[MemoryLimits]:
    """The bound of one cgroup; none where it sets none or cannot be read."""
    files, unreclaimable = _FILES[version]
    limits = [limit for name in files if (limit := read_number(group / name)) is not None]
    if not limits:
        return []
    used = _fields(group / "memory.stat")
    held = sum(used.get(name, 0) for name in unreclaimable)
    limit = min(limits)
    return [MemoryLimits(limit, max(0, limit - held), f"cgroup v{version} {group}")]


def _hierarchies(root: Path) -> Iterator[_Hierarchy]:
    """The memory controllers, version 1 or 2, that are mounted and that this process is under."""
    paths: dict[int, str] = {}
    for line in read_lines(root / "proc/self/cgroup"):
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in read_lines(root / "proc/self/mountinfo"):
        mount, _, file_system = line.partition(" - ")
        fields, (kind, *_, options) = mount.split(), file_system.split()
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or version not in paths:
            continue
        if version == 1 and "memory" not in options.split(","):
            continue
        inner = PurePosixPath(unescape(fields[3]))
        place = root / unescape(fields[4]).lstrip("/")
        group = PurePosixPath(paths[version])
        # in a container the mount may start at the group itself, or elsewhere
        below = group.relative_to(inner) if group.is_relative_to(inner) else PurePosixPath()
        yield _Hierarchy(version, place, place / below)


def _levels(hierarchy: _Hierarchy) -> Iterator[Path]:
    """The group and its parents, up to the mount."""
    group = hierarchy.group
    yield group
    while group != hierarchy.mount:
        group = group.parent
        yield group


def _fields(path: Path) -> dict[str, int]:
    """Lines of "name bytes" or "name: number kB", in bytes."""
    values = {}
    for line in read_lines(path):
        name, _, value = line.partition(" ")
        number, _, unit = value.strip().partition(" ")
        if number.isdigit():
            values[name.rstrip(":")] = int(number) * (1024 if unit == "kB" else 1)
    return values
