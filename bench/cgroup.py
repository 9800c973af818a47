"""Run a command under a memory limit, with a cold page cache if wanted, and report what it did.

Page cache is charged to the group that reads it first. With --drop the limit therefore covers the
anonymous memory and the file pages of the command together, as on a machine of that size. It needs
root and a memory controller, of cgroup v1 or v2. The last line of the output is one JSON object.

    sudo .venv/bin/python bench/cgroup.py --limit 40% --file MODEL.gguf --drop -- \\
        .venv/bin/colibri-mmap bench -m MODEL.gguf --json
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Protocol

from storage import BlockDevice, alone_on_disk, drop_page_cache

from colibri_mmap.errors import ArgumentError, ColibriError, ResourceError

_SAMPLING_SECONDS = 0.02
_REMOVAL_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Result:
    """What a command did; bytes and seconds, for it and all its children.

    `status` is negative after a signal. `limit_hits` counts how often the group was full, which for
    page cache is no error. Three tell how quiet the machine was: `device_bytes_read` is of all
    processes and should be near `process_bytes_read`; `other_processor_seconds`; and
    `longest_pause_seconds`, in which this harness did not run, so that perhaps nothing did.
    """

    command: list[str]
    status: int
    timed_out: bool
    oom_killed: bool
    limit_bytes: int | None
    wall_seconds: float
    user_seconds: float
    system_seconds: float
    other_processor_seconds: float
    longest_pause_seconds: float
    peak_anonymous_bytes: int
    peak_usage_bytes: int
    limit_hits: int
    major_faults: int
    minor_faults: int
    process_bytes_read: int
    device_bytes_read: int | None
    read_ahead_kb: int | None
    output: str


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
                time.sleep(_SAMPLING_SECONDS)


def limit_of(text: str, files: Sequence[Path]) -> int:
    """Bytes of "500000000" or of "40%", which is of the files' total size."""
    try:
        if not text.endswith("%"):
            return int(text)
        if not files:
            raise ArgumentError(f"--limit {text} needs --file: of what?")
        return int(float(text[:-1]) / 100 * sum(path.stat().st_size for path in files))
    except ValueError as error:
        raise ArgumentError(f"--limit {text}: give bytes or a percentage like 40%") from error


def run_limited(
    command: Sequence[str],
    *,
    limit: int | None = None,
    files: Sequence[Path] = (),
    drop: bool = False,
    read_ahead_kb: int | None = None,
    first: bool = False,
    timeout: float | None = None,
    capture: bool = False,
) -> Result:
    """Run `command` in a memory group of `limit` bytes, once no other such run is in progress.

    `drop` empties the page cache and checks that nothing of `files` is left in it. `read_ahead_kb`
    holds during the run for the device of the first file. `first`: see `limited_group`. After
    `timeout` seconds the command is killed. `capture` returns its output instead of printing it.
    """
    device = BlockDevice.under(files[0] if files else Path.cwd())
    with ExitStack() as stack:
        group = stack.enter_context(limited_group(limit, first))
        stack.enter_context(alone_on_disk())
        if read_ahead_kb is not None:
            if device is None:
                raise ArgumentError("read-ahead can be set for a file on a block device only")
            stack.enter_context(device.read_ahead(read_ahead_kb))
        if drop:
            drop_page_cache(files)
        output = stack.enter_context(tempfile.TemporaryFile()) if capture else None
        return _run(list(command), group, limit, device, timeout, output)


def _run(
    command: list[str],
    group: Group,
    limit: int | None,
    device: BlockDevice | None,
    timeout: float | None,
    output: IO[bytes] | None,
) -> Result:
    # A shell joins the groups and becomes the command, which is charged from its first page on.
    joining = "".join(f"echo $$ > {shlex.quote(str(file))} && " for file in group.joins)
    read_before = device.bytes_read() if device else 0
    busy_before, own_before = _busy_seconds(), time.process_time()
    started = time.perf_counter()
    process = subprocess.Popen(
        ["/bin/sh", "-c", joining + 'exec "$@"', "sh", *command], stdout=output
    )
    watched = _watch(process.pid, group, timeout)
    _, wait_status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(wait_status)
    used = usage.ru_utime + usage.ru_stime + time.process_time() - own_before
    text = ""
    if output is not None:
        output.seek(0)
        text = output.read().decode(errors="replace")
    return Result(
        command=command,
        status=process.returncode,
        timed_out=watched.timed_out,
        oom_killed=group.oom_kills() > 0,
        limit_bytes=limit,
        wall_seconds=wall,
        user_seconds=usage.ru_utime,
        system_seconds=usage.ru_stime,
        other_processor_seconds=max(0.0, _busy_seconds() - busy_before - used),
        longest_pause_seconds=watched.longest_pause_seconds,
        peak_anonymous_bytes=watched.peak_anonymous_bytes,
        peak_usage_bytes=group.peak_bytes(),
        limit_hits=group.limit_hits(),
        major_faults=usage.ru_majflt,
        minor_faults=usage.ru_minflt,
        process_bytes_read=usage.ru_inblock * 512,
        device_bytes_read=device.bytes_read() - read_before if device else None,
        read_ahead_kb=device.read_ahead_kb if device else None,
        output=text,
    )


@dataclass(slots=True)
class _Watched:
    """What was seen while a command ran."""

    peak_anonymous_bytes: int = 0
    longest_pause_seconds: float = 0.0
    timed_out: bool = False


def _watch(pid: int, group: Group, timeout: float | None) -> _Watched:
    """Sample the group until a child has ended; it is not reaped yet."""
    seen = _Watched()
    last = time.monotonic()
    deadline = last + timeout if timeout is not None else float("inf")
    ended = select.poll()
    descriptor = os.pidfd_open(pid)
    try:
        ended.register(descriptor, select.POLLIN)
        while not ended.poll(_SAMPLING_SECONDS * 1e3):
            now = time.monotonic()
            seen.longest_pause_seconds = max(seen.longest_pause_seconds, now - last)
            last = now
            seen.peak_anonymous_bytes = max(seen.peak_anonymous_bytes, group.anonymous_bytes())
            if now > deadline and not seen.timed_out:
                seen.timed_out = True
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except BaseException:
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    finally:
        os.close(descriptor)
    return seen


def _busy_seconds() -> float:
    """Processor time that anything on this machine has used."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, interrupts, soft_interrupts = map(int, fields[:7])
    return (user + nice + system + interrupts + soft_interrupts) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--limit", help="bytes, or a percentage of the files like 40%%")
    parser.add_argument("--file", type=Path, action="append", default=[], help="model; repeatable")
    parser.add_argument("--drop", action="store_true", help="start with an empty page cache")
    parser.add_argument("--read-ahead", type=int, metavar="KB", help="of the file's device")
    parser.add_argument("--first", action="store_true", help="comes before all other processes")
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- program arguments")
    arguments = parser.parse_args()
    command = arguments.command[arguments.command[:1] == ["--"] :]
    if not command:
        parser.error("there is no command: put it behind --")
    try:
        result = run_limited(
            command,
            limit=limit_of(arguments.limit, arguments.file) if arguments.limit else None,
            files=arguments.file,
            drop=arguments.drop,
            read_ahead_kb=arguments.read_ahead,
            first=arguments.first,
            timeout=arguments.timeout,
        )
    except (ColibriError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    report = asdict(result)
    del report["output"]  # it has been printed
    print(json.dumps(report))
    sys.exit(result.status if result.status >= 0 else 128 - result.status)


if __name__ == "__main__":
    main()
