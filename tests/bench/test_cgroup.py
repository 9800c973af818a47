"""Commands under a real memory limit, with a page cache that is really cold."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cgroup import limit_of, run_limited
from groups import require_memory_limits
from storage import BlockDevice, cached_bytes, drop_page_cache

from colibri_mmap.errors import ArgumentError, ResourceError

MB = 1_000_000
FILE_BYTES = 16 * MB
LIMIT = 96 * MB

try:
    require_memory_limits()
    refusal = ""
except ResourceError as error:
    refusal = str(error)
limited = pytest.mark.skipif(bool(refusal), reason=refusal)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "random.bin"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


def python(code: str, *arguments: str | Path) -> list[str]:
    return [sys.executable, "-c", code, *map(str, arguments)]


def left_behind(harness: int | None = None) -> list[Path]:
    """Control groups that a harness (by its pid; default: this process) has left behind."""
    name, root = f"bench-{harness or os.getpid()}", Path("/sys/fs/cgroup")
    return [*root.glob(name), *root.glob(f"*/{name}")]


def runs(pid: int) -> bool:
    """Whether a process exists and is no zombie that merely waits for its new parent."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    return "State:\tZ" not in status


@limited
def test_bytes_of_a_cold_file_are_counted(file: Path) -> None:
    result = run_limited(["cat", str(file)], limit=LIMIT, files=[file], drop=True, capture=True)
    assert result.status == 0
    assert len(result.output) > 0
    assert FILE_BYTES <= result.process_bytes_read < FILE_BYTES + 8 * MB  # and cat itself
    assert result.device_bytes_read is not None
    assert result.device_bytes_read >= result.process_bytes_read
    assert FILE_BYTES < result.peak_usage_bytes <= LIMIT
    assert result.peak_anonymous_bytes < 4 * MB
    assert not result.oom_killed
    assert not left_behind()


@limited
def test_a_warm_file_is_not_read(file: Path) -> None:
    file.read_bytes()
    result = run_limited(["cat", str(file)], limit=LIMIT, files=[file], capture=True)
    assert result.process_bytes_read < 8 * MB


@limited
def test_the_limit_covers_page_cache(file: Path) -> None:
    limit = FILE_BYTES // 2
    result = run_limited(["cat", str(file)], limit=limit, files=[file], drop=True, capture=True)
    assert result.status == 0
    assert not result.oom_killed
    assert result.peak_usage_bytes <= limit
    assert result.limit_hits > 0
    assert cached_bytes(file) <= limit


@limited
def test_anonymous_memory_is_measured() -> None:
    code = "import time; held = bytearray(b'x') * 40_000_000; time.sleep(0.2)"
    result = run_limited(python(code), limit=LIMIT)
    assert 40 * MB <= result.peak_anonymous_bytes < 60 * MB


@limited
def test_too_much_anonymous_memory_is_killed_and_reported() -> None:
    result = run_limited(python("held = bytearray(b'x') * 400_000_000"), limit=LIMIT)
    assert result.oom_killed
    assert result.status == -signal.SIGKILL
    assert not left_behind()


@limited
def test_a_child_of_the_command_is_limited_too() -> None:
    inner = "held = bytearray(b'x') * 400_000_000"
    code = "import subprocess, sys; print(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
    result = run_limited(python(code, inner), limit=LIMIT, capture=True)
    assert result.status == 0
    assert result.output.strip() == str(-signal.SIGKILL)
    assert result.oom_killed


@limited
def test_faults_on_a_cold_mapping_are_counted(file: Path) -> None:
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "print(sum(mapped[::4096]))"
    )
    cold = run_limited(python(code, file), files=[file], drop=True, capture=True)
    warm = run_limited(python(code, file), files=[file], capture=True)
    assert cold.output == warm.output
    assert cold.major_faults > warm.major_faults
    assert warm.minor_faults > 0


@limited
def test_a_command_out_of_time_is_killed_with_its_children() -> None:
    code = (
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()"
    )
    result = run_limited(python(code), timeout=0.5, capture=True)
    assert result.timed_out
    assert result.status == -signal.SIGKILL
    assert not runs(int(result.output))
    assert not left_behind()


@limited
def test_a_command_that_comes_first_is_measured_like_any_other(file: Path) -> None:
    result = run_limited(["cat", str(file)], limit=LIMIT, first=True, capture=True)
    assert result.status == 0
    assert not left_behind()


@limited
def test_a_missing_program_is_reported_by_its_status() -> None:
    assert run_limited(["/no/such/program"]).status == 127


@limited
def test_a_mapped_and_touched_file_cannot_be_dropped(file: Path) -> None:
    code = (
        "import mmap, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)\n"
        "sum(mapped[::4096])\n"
        "print('touched', flush=True)\n"
        "input()"
    )
    holder = subprocess.Popen(python(code, file), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"touched\n"
        with pytest.raises(ResourceError, match=r"random\.bin: .* stay in the page cache"):
            drop_page_cache([file], patience=0)
    finally:
        holder.communicate(b"\n")
    drop_page_cache([file])
    assert cached_bytes(file) == 0


@limited
def test_runs_exclude_each_other() -> None:
    code = (
        "import fcntl\n"
        "with open('/proc/sys/vm/drop_caches', 'wb') as file:\n"
        "    try:\n"
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "    except BlockingIOError:\n"
        "        print('locked')"
    )
    assert run_limited(python(code), capture=True).output == "locked\n"


@limited
def test_read_ahead_holds_during_the_run_only(file: Path) -> None:
    device = BlockDevice.under(file)
    if device is None:
        pytest.skip("the file system has no block device")
    before = device.read_ahead_kb
    result = run_limited(["true"], files=[file], read_ahead_kb=before + 4)
    assert result.read_ahead_kb == before + 4
    assert device.read_ahead_kb == before


@limited
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_restores_read_ahead_and_ends_the_command(
    file: Path, bench: Path, number: signal.Signals
) -> None:
    device = BlockDevice.under(file)
    if device is None:
        pytest.skip("the file system has no block device")
    before = device.read_ahead_kb
    code = "import os; print(os.getpid(), flush=True); input()"
    program = [sys.executable, str(bench / "cgroup.py"), "--file", str(file), "--read-ahead", "12"]
    harness = subprocess.Popen(
        [*program, "--", *python(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert harness.stdout is not None
    pid = int(harness.stdout.readline())
    assert device.read_ahead_kb == 12
    harness.send_signal(number)
    harness.communicate()
    assert harness.returncode != 0
    assert device.read_ahead_kb == before
    assert not runs(pid)
    assert not left_behind(harness.pid)


@limited
def test_the_program_prints_one_json_line_and_passes_the_status_on(file: Path, bench: Path) -> None:
    program = [sys.executable, str(bench / "cgroup.py"), "--limit", "300%", "--file", str(file)]
    done = subprocess.run(
        [*program, "--drop", "--", "sh", "-c", "echo said; exit 7"], capture_output=True, text=True
    )
    assert done.returncode == 7
    said, last = done.stdout.splitlines()
    assert said == "said"
    report = json.loads(last)
    assert report["status"] == 7
    assert report["limit_bytes"] == 3 * FILE_BYTES
    assert "output" not in report


def test_limits_in_bytes_and_percent(file: Path) -> None:
    assert limit_of("12345", []) == 12345
    assert limit_of("40%", [file, file]) == int(0.8 * FILE_BYTES)
    for text in ("much", "x%", "40 percent"):
        with pytest.raises(ArgumentError, match="give bytes or a percentage"):
            limit_of(text, [file])
    with pytest.raises(ArgumentError, match="needs --file"):
        limit_of("40%", [])


def test_the_program_names_what_is_missing(bench: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(bench / "cgroup.py"), "--limit", "40%", "--", "true"],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr == "error: --limit 40% needs --file: of what?\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="drops its own privileges, which needs root")
def test_without_root_it_says_so(bench: Path) -> None:
    code = (
        "import os, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "from cgroup import run_limited\n"
        "os.setuid(65534)\n"
        "run_limited(['true'])"
    )
    done = subprocess.run(python(code, bench), capture_output=True, text=True)
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1].endswith("memory limits need root: run this with sudo")


@limited
def test_a_pause_of_the_harness_is_noticed(bench: Path) -> None:
    code = "print('runs', flush=True); input()"
    harness = subprocess.Popen(
        [sys.executable, str(bench / "cgroup.py"), "--", *python(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert harness.stdout is not None
    assert harness.stdout.readline() == "runs\n"
    harness.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    time.sleep(0.3)  # the pause that is to be measured
    paused = time.monotonic() - stopped
    harness.send_signal(signal.SIGCONT)
    output, _ = harness.communicate("\n")
    report = json.loads(output)
    assert paused <= report["longest_pause_seconds"] <= report["wall_seconds"]
