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
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from groups import Group, limited_group
from storage import BlockDevice, alone_on_disk, drop_page_cache

from colibri_mmap.errors import ArgumentError, ColibriError

_SAMPLING_SECONDS = 0.02
_ENDING_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


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


@contextmanager
def _ending_signals_raise() -> Iterator[None]:
    """SIGTERM and SIGHUP raise SystemExit within the block, so that `finally` clauses run."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = [signal.signal(number, leave) for number in _ENDING_SIGNALS]
    try:
        yield
    finally:
        for number, handler in zip(_ENDING_SIGNALS, before, strict=True):
            signal.signal(number, handler)


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
        stack.enter_context(_ending_signals_raise())
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
