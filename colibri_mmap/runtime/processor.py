"""The processor: its name and how much of it this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from .procfs import read_lines


def processor_name() -> str:
    """As the system tells it."""
    lines = read_lines(Path("/proc/cpuinfo"))
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else os.uname().machine


def default_threads() -> int:
    """The CPUs this process may use, at most a cgroup's quota."""
    usable = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return usable
    return usable if quota == "max" else max(1, min(usable, int(quota) // int(period)))
