"""Control groups that limit the memory of a command, in cgroup v1 and v2."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

from colibri_mmap.errors import ResourceError

_REMOVAL_SECONDS = 5.0
_RETRY_SECONDS = 0.02


class Group(Protocol):
    """A control group of one run; `joins` are the files that a process enters it through."""

    joins: list[Path]

    def anonymous_bytes(self) -> int: ...
    def peak_bytes(self) -> int: ...
    def limit_hits(self) -> int: ...
    def oom_kills(self) -> int: ...


def _fields(path: Path) -> dict[str, int]:
    """A file of lines "name number"."""
    return {name: int(value) for name, value in map(str.split, path.read_text().splitlines())}


class GroupV1:
    """Directories of the memory and, for `first`, the cpu hierarchy."""

    def __init__(self, memory: Path, limit: int | None, cpu: Path | None) -> None:
        self._memory = memory
        self.joins = [d / "cgroup.procs" for d in (memory, cpu) if d is not None]
        if limit is not None:
            (memory / "memory.limit_in_bytes").write_text(str(limit))
            (memory / "memory.swappiness").write_text("0")
        if cpu is not None:
            (cpu / "cpu.shares").write_text("262144")

    def anonymous_bytes(self) -> int:
        return _fields(self._memory / "memory.stat")["rss"]

    def peak_bytes(self) -> int:
        return int((self._memory / "memory.max_usage_in_bytes").read_text())

    def limit_hits(self) -> int:
        return int((self._memory / "memory.failcnt").read_text())

    def oom_kills(self) -> int:
        return _fields(self._memory / "memory.oom_control")["oom_kill"]


class GroupV2:
    """A directory of the unified hierarchy."""

    def __init__(self, directory: Path, limit: int | None, first: bool) -> None:
        self._directory = directory
        self.joins = [directory / "cgroup.procs"]
        if limit is not None:
            (directory / "memory.max").write_text(str(limit))
            swap = directory / "memory.swap.max"
            if swap.exists():
                swap.write_text("0")
        if first:
            (directory / "cpu.weight").write_text("10000")

    def anonymous_bytes(self) -> int:
        return _fields(self._directory / "memory.stat")["anon"]

    def peak_bytes(self) -> int:
        return int((self._directory / "memory.peak").read_text())

    def limit_hits(self) -> int:
        return _fields(self._directory / "memory.events")["max"]

    def oom_kills(self) -> int:
        return _fields(self._directory / "memory.events")["oom_kill"]


def _hierarchies() -> dict[str, Path]:
    """Where v1 controllers ("memory", "cpu") and a v2 with memory ("unified") are mounted."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, where, kind, options = line.split()[:4]
        if kind == "cgroup":
            found |= {name: Path(where) for name in ("memory", "cpu") if name in options.split(",")}
        elif kind == "cgroup2" and "memory" in (
            (Path(where) / "cgroup.controllers").read_text().split()
        ):
            found["unified"] = Path(where)
    return found


def require_memory_limits() -> None:
    """ResourceError, saying why, where this program cannot limit memory."""
    if os.geteuid() != 0:
        raise ResourceError("memory limits need root: run this with sudo")
    if not _hierarchies().keys() & {"memory", "unified"}:
        raise ResourceError("no memory controller is mounted: mount cgroup v2 at /sys/fs/cgroup")


@contextmanager
def limited_group(limit: int | None, first: bool) -> Iterator[Group]:
    """A group of at most `limit` bytes; whatever still runs in it at the end is killed.

    With `first` its processes come before all others of the machine when they want the processor.
    """
    require_memory_limits()
    mounts = _hierarchies()
    name = f"bench-{os.getpid()}"
    with ExitStack() as stack:
        try:
            if "memory" in mounts:
                memory = stack.enter_context(_directory(mounts["memory"] / name))
                share = first and "cpu" in mounts
                cpu = stack.enter_context(_directory(mounts["cpu"] / name)) if share else None
                group: Group = GroupV1(memory, limit, cpu)
            else:
                controllers = "+memory +cpu" if first else "+memory"
                (mounts["unified"] / "cgroup.subtree_control").write_text(controllers)
                directory = stack.enter_context(_directory(mounts["unified"] / name))
                group = GroupV2(directory, limit, first)
        except OSError as error:
            raise ResourceError(
                f"the control group cannot be made ({error}); run this outside of containers"
            ) from error
        yield group


@contextmanager
def _directory(path: Path) -> Iterator[Path]:
    path.mkdir()
    try:
        yield path
    finally:
        deadline = time.monotonic() + _REMOVAL_SECONDS
        while True:
            for pid in (path / "cgroup.procs").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            try:
                path.rmdir()
                break
            except OSError:  # what was killed takes a moment to be gone
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
