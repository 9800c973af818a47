"""Limits read from trees as kernels and containers lay them out, and from a real cgroup."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from colibri_mmap.errors import ResourceError
from colibri_mmap.runtime.limits import MemoryLimits, memory_limits

GB = 1 << 30
V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")

V1_MOUNT = "35 31 0:32 {inner} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory"
V2_MOUNT = "30 23 0:26 {inner} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def machine(
    root: Path, cgroup: str = "", mountinfo: str = "", files: dict[str, str] | None = None
) -> Path:
    """A machine with 16 GB, of which 10 are available."""
    process = root / "proc/self"
    process.mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:   10485760 kB\nHugePages: 0\n\n"
    )
    (process / "cgroup").write_text(cgroup)
    (process / "mountinfo").write_text("22 1 8:1 / / rw - ext4 /dev/sda1 rw\n" + mountinfo)
    for name, text in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_cgroups_the_machine_decides(tmp_path: Path) -> None:
    assert memory_limits(machine(tmp_path)) == MemoryLimits(16 * GB, 10 * GB, "the machine")


def test_v1_page_cache_is_not_used_memory(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "4:memory:/app\n3:cpu,cpuacct:/x\n0::/y\n",
        V1_MOUNT.format(inner="/"),
        {
            "memory/app/memory.limit_in_bytes": f"{4 * GB}\n",
            "memory/app/memory.usage_in_bytes": f"{4 * GB}\n",
            "memory/app/memory.stat": f"cache {3 * GB}\nrss 5\nrss_huge 5\ntotal_cache {3 * GB}\n"
            f"total_rss {GB}\ntotal_rss_huge {GB}\ntotal_shmem {GB // 2}\n",
            "memory/memory.limit_in_bytes": "9223372036854771712\n",
        },
    )
    found = memory_limits(root)
    assert (found.total, found.available) == (4 * GB, 4 * GB - GB - GB // 2)
    assert found.source == f"cgroup v1 {root}/sys/fs/cgroup/memory/app"


def test_v2_counts_what_cannot_be_reclaimed(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/user.slice/job\n",
        V2_MOUNT.format(inner="/"),
        {
            "user.slice/job/memory.max": f"{2 * GB}\n",
            "user.slice/job/memory.high": "max\n",
            "user.slice/job/memory.stat": "anon 1000\nfile 90000\nkernel 77777\nkernel_stack 100\n"
            "pagetables 20\nsec_pagetables 3\nshmem 4000\nslab_reclaimable 80000\n"
            "slab_unreclaimable 50000\n",
        },
    )
    found = memory_limits(root)
    assert (found.total, found.available) == (2 * GB, 2 * GB - 55123)
    assert found.source == f"cgroup v2 {root}/sys/fs/cgroup/user.slice/job"


def test_v2_high_bounds_too(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/job\n",
        V2_MOUNT.format(inner="/"),
        {"job/memory.max": "max\n", "job/memory.high": f"{GB}\n", "job/memory.stat": "anon 24\n"},
    )
    assert memory_limits(root).available == GB - 24


@pytest.mark.parametrize("tight", ["a", "a/b", "a/b/c"])
def test_any_parent_may_be_the_tightest(tmp_path: Path, tight: str) -> None:
    files = {}
    for level in ("a", "a/b", "a/b/c"):
        limit = 2 * GB if level == tight else 8 * GB
        files[f"{level}/memory.max"] = f"{limit}\n"
        files[f"{level}/memory.stat"] = f"anon {GB}\n"
    root = machine(tmp_path, "0::/a/b/c\n", V2_MOUNT.format(inner="/"), files)
    assert memory_limits(root) == MemoryLimits(
        2 * GB, GB, f"cgroup v2 {root}/sys/fs/cgroup/{tight}"
    )


def test_a_parent_filled_by_others_leaves_less_than_its_smaller_child(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/a/b\n",
        V2_MOUNT.format(inner="/"),
        {
            "a/memory.max": f"{8 * GB}\n",
            "a/memory.stat": f"anon {7 * GB}\n",
            "a/b/memory.max": f"{4 * GB}\n",
            "a/b/memory.stat": f"anon {GB}\n",
        },
    )
    assert memory_limits(root) == MemoryLimits(4 * GB, GB, f"cgroup v2 {root}/sys/fs/cgroup/a")


def test_a_limit_beyond_what_the_machine_has_left(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/a\n",
        V2_MOUNT.format(inner="/"),
        {"a/memory.max": f"{12 * GB}\n", "a/memory.stat": "anon 0\n"},
    )
    assert memory_limits(root) == MemoryLimits(12 * GB, 10 * GB, "the machine")


@pytest.mark.parametrize("inner", ["/docker/0f3a", "/elsewhere"])
def test_in_a_container_the_mount_is_the_group(tmp_path: Path, inner: str) -> None:
    root = machine(
        tmp_path,
        "5:memory:/docker/0f3a\n",
        V1_MOUNT.format(inner=inner),
        {"memory/memory.limit_in_bytes": f"{GB}\n", "memory/memory.stat": "total_rss 7\n"},
    )
    assert memory_limits(root).available == GB - 7


def test_odd_mount_points_and_other_controllers(tmp_path: Path) -> None:
    mountinfo = "\n".join(
        [
            "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu",
            r"35 31 0:32 / /sys/fs/cgroup/my\040memory rw - cgroup cgroup rw,memory",
            "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
        ]
    )
    root = machine(
        tmp_path,
        "5:cpuset,memory:/g\n",
        mountinfo,
        {
            "cpu/g/memory.limit_in_bytes": "1\n",
            "unified/memory.max": "1\n",
            "my memory/g/memory.limit_in_bytes": f"{3 * GB}\n",
        },
    )
    assert memory_limits(root).available == 3 * GB


def test_more_used_than_allowed_leaves_nothing(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        "0::/a\n",
        V2_MOUNT.format(inner="/"),
        {"a/memory.max": "4096\n", "a/memory.stat": "anon 8192\n"},
    )
    assert memory_limits(root).available == 0


def test_without_proc_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="needs Linux with /proc mounted"):
        memory_limits(tmp_path)


@pytest.fixture
def cgroup() -> Iterator[tuple[Path, str]]:
    """A cgroup of our own with a limit of 600 MiB, and its version."""
    if (V1 / "memory.limit_in_bytes").exists():
        version, base, limit_file = "1", _own_group(":memory:", V1), "memory.limit_in_bytes"
    elif (V2 / "cgroup.controllers").exists():
        version, base, limit_file = "2", V2, "memory.max"
    else:
        pytest.skip("no cgroup with a memory controller is mounted")
    group = base / f"colibri-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no permission to make a cgroup: {error}")
    try:
        try:
            (group / limit_file).write_text(str(600 << 20))
        except OSError as error:
            pytest.skip(f"the memory controller is not ours to use: {error}")
        yield group, version
    finally:
        group.rmdir()


def _own_group(marker: str, mount: Path) -> Path:
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    path = next(line.split(":", 2)[2] for line in lines if marker in line)
    return mount / path.lstrip("/")


REPORT = """
import mmap, pathlib, sys
pathlib.Path(sys.argv[1], "cgroup.procs").write_text("0")
from colibri_mmap.runtime.limits import memory_limits
held = mmap.mmap(-1, 100 << 20)
for page in range(0, len(held), 4096):
    held[page] = 1
file = pathlib.Path(sys.argv[2])
file.write_bytes(bytes(200 << 20))  # page cache, of this group
file.read_bytes()
limits = memory_limits()
print(limits.total, limits.available, limits.source, sep="\\n")
"""


def test_a_process_in_a_real_cgroup(cgroup: tuple[Path, str], tmp_path: Path) -> None:
    group, version = cgroup
    done = subprocess.run(
        [sys.executable, "-c", REPORT, str(group), str(tmp_path / "cached")],
        capture_output=True,
        text=True,
        check=True,
    )
    total, available, source = done.stdout.splitlines()
    assert int(total) == 600 << 20
    assert source == f"cgroup v{version} {group}"
    # 100 MiB are anonymous for sure, the interpreter takes some, the file's 200 must not count
    assert 440 << 20 < int(available) < 500 << 20
