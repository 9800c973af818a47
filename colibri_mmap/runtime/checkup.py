"""What of this machine and the place of a model decides how fast it runs, each with what to do.

Everything is only looked at; the one thing that costs anything is reading some of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numba

from ..errors import ColibriError
from ..format.describe import describe
from ..format.experts import expert_layers
from ..format.gguf import GGUF
from ..quantities import byte_size
from .device import probe
from .diskspeed import DiskProbe
from .limits import MemoryLimits, memory_limits
from .machine import BlockDevice, graphics_cards, mount_of, swap_in_use
from .pages import has_populate_read
from .processor import default_threads, processor_name
from .profile import load_profile
from .ram import PLANNED_CONTEXT, plan_ram, resident_trunk
from .simd import FORM
from .trunk import may_lock
from .warmup import all_tasks, model_tasks

_MUCH_SWAP = 256 << 20  # bytes
_WIDE_READ_AHEAD_KB = 512
_SLOW_DISK = 300e6  # bytes per second
_TELLING_READ = 256 << 10  # bytes; smaller reads say nothing about a disk's speed
_PROBED_BYTES, _PROBED_SECONDS = 256 << 20, 1.2  # per queue depth
_HOT, _NEAR_LIMIT = 70, 5  # degrees Celsius

_FORMS = {
    "avx512vnni": "AVX-512 with VNNI",
    "avx2": "AVX2",
    "generic": "no AVX2: a slow, general form",
}
_SLOW_FILE_SYSTEMS = {
    "ntfs": "NTFS",
    "ntfs3": "NTFS",
    "fuseblk": "NTFS or another one in user space",
    "9p": "a folder of the host (9P)",
    "drvfs": "a folder of the host",
    "vboxsf": "a folder of the host",
    "virtiofs": "a folder of the host",
    "nfs": "a network",
    "nfs4": "a network",
    "cifs": "a network",
    "smb3": "a network",
    "ceph": "a network",
    "fuse.sshfs": "a network",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `advice` says what to do about a warning."""

    name: str
    state: Literal["ok", "warn"]
    text: str
    advice: str = ""


def checkup(gguf: GGUF | None) -> Iterator[Finding]:
    """The findings about the machine and, if there is one, the model, as they are made."""
    limits = memory_limits()
    yield _cpu()
    yield _kernels(gguf)
    yield _memory(limits)
    yield _swap()
    yield _populate()
    yield _graphics()
    if gguf is None:
        return
    path = gguf.shards[0].path.resolve()
    yield _fit(gguf, limits)
    yield _locking(gguf, limits)
    yield _file_system(path)
    device = BlockDevice.under(path)
    yield _read_ahead(device)
    yield from _temperature(device)
    yield _disk(gguf)
    yield _profile(gguf)


def _finding(name: str, text: str, advice: str = "") -> Finding:
    return Finding(name, "warn" if advice else "ok", text, advice)


# ------------------------------------------------------------------------------ the machine
def _cpu() -> Finding:
    text = f"{processor_name()}, {default_threads()} usable cores; {_FORMS[FORM]}"
    advice = "" if FORM != "generic" else "expect a few tokens per second at most on this processor"
    return _finding("processor", text, advice)


def _kernels(gguf: GGUF | None) -> Finding:
    try:
        tasks = all_tasks() if gguf is None else model_tasks(gguf, "int8", "f16")
    except ColibriError as error:
        return _finding("kernels", "there are none for this model", str(error))
    place = Path(numba.config.CACHE_DIR)
    cached = {file.name.rpartition("-")[0].rpartition(".")[2] for file in place.glob("*/*.nbi")}
    missing = sum(task.function.__name__ not in cached for task in tasks)
    what = "kernels of this model" if gguf else "kernels"
    if missing:
        return _finding(
            "kernels",
            f"{missing} of {len(tasks)} {what} are not compiled yet",
            "the first run compiles them; colibri-mmap warmup does it now",
        )
    return _finding("kernels", f"all {len(tasks)} {what} are compiled")


def _memory(limits: MemoryLimits) -> Finding:
    return _finding(
        "memory",
        f"{byte_size(limits.available)} of {byte_size(limits.total)} can be used, "
        f"limited by {limits.source}",
    )


def _swap() -> Finding:
    used = swap_in_use()
    advice = "close other programs: swapping takes the disk from the model"
    text = f"{byte_size(used)} in use" if used > _MUCH_SWAP else "hardly in use"
    return _finding("swap", text, advice if used > _MUCH_SWAP else "")


def _populate() -> Finding:
    if has_populate_read():
        return _finding("system", "MADV_POPULATE_READ works")
    return _finding(
        "system",
        "there is no MADV_POPULATE_READ",
        "a kernel from Linux 5.14 on waits for pages with less work",
    )


def _graphics() -> Finding:
    found, cards = probe(), graphics_cards()
    if not isinstance(found, str):
        free, total = found.memory_info()
        text = f"{found.name}, {byte_size(free)} of {byte_size(total)} free"
        found.close()
        return _finding("GPU", text)
    if not cards:
        return _finding("GPU", f"none is used, and none is needed ({found})")
    return _finding("GPU", f"{', '.join(cards)} is not used", found)


# ------------------------------------------------------------------------------ the model
def _fit(gguf: GGUF, limits: MemoryLimits) -> Finding:
    layers, kv = expert_layers(gguf), describe(gguf)["kv"]
    kv_bytes = 2 * PLANNED_CONTEXT * (kv["values_per_token"] if kv else 0)
    trunk = resident_trunk(gguf, layers, limits)
    if not trunk:
        return _finding(
            "fit",
            "a dense model larger than memory: every token reads all of it",
            "choose a smaller quantisation, or a Mixture of Experts",
        )
    try:
        plan = plan_ram(gguf, layers, trunk, kv_bytes, None, limits)
    except ColibriError as error:
        return _finding("fit", "the model does not fit", str(error))
    share = f"{plan.expert_share:.0%} of the experts fit in memory" if layers else "all of it fits"
    return _finding("fit", f"{share}; colibri-mmap plan tells more")


def _locking(gguf: GGUF, limits: MemoryLimits) -> Finding:
    nbytes = sum(part.nbytes for part in resident_trunk(gguf, expert_layers(gguf), limits))
    text = f"{byte_size(nbytes)} are used by every token"
    if may_lock(nbytes):
        return _finding("locking", f"{text} and may be locked in memory")
    advice = "raise the limit with ulimit -l or LimitMEMLOCK, which keeps them from being evicted"
    return _finding("locking", f"{text}, more than may be locked", advice)


def _file_system(path: Path) -> Finding:
    mount = mount_of(path)
    if mount is None:
        return _finding("file system", "not known")
    text = f"{mount.file_system} on {mount.source}"
    advice = ""
    if mount.file_system in _SLOW_FILE_SYSTEMS:
        text += f": {_SLOW_FILE_SYSTEMS[mount.file_system]}"
        advice = "copy the model to a local Linux file system as ext4, XFS or Btrfs"
    elif mount.file_system.startswith("fuse."):
        advice = "file systems in user space are slow: copy the model to ext4, XFS or Btrfs"
    elif mount.file_system in ("tmpfs", "ramfs"):
        advice = "this file system is memory itself, in which the model takes room for good"
    elif mount.file_system == "zfs":
        advice = "ZFS keeps a second copy of mapped pages: limit zfs_arc_max, or use another one"
    return _finding("file system", text, advice)


def _read_ahead(device: BlockDevice) -> Finding:
    kb = device.read_ahead_kb
    if kb is None:
        return _finding("read-ahead", "not told by this file system")
    text = f"{kb} kB on {device.name or 'this file system'}"
    if kb <= _WIDE_READ_AHEAD_KB:
        return _finding("read-ahead", text)
    where = f"/sys/class/bdi/{device.number}/read_ahead_kb"
    if device.name:
        where = f"/sys/block/{device.name}/queue/read_ahead_kb"
    return _finding(
        "read-ahead",
        f"{text}: page faults read too much, though this program seldom has any",
        f"for other programs: echo 128 | sudo tee {where}",
    )


def _temperature(device: BlockDevice) -> Iterator[Finding]:
    found = device.temperature()
    if found is None:
        return
    limit = f" of at most {found.limit:.0f}" if found.limit else ""
    hot = found.now >= _HOT or (found.limit and found.now > found.limit - _NEAR_LIMIT)
    advice = "drives slow down when they are hot: give it a heat sink or moving air" if hot else ""
    yield _finding("drive", f"{found.now:.0f} degrees{limit}", advice)


def _disk(gguf: GGUF) -> Finding:
    try:
        probe = DiskProbe(gguf)
        reads = probe.random_reads(256)
        size = max(nbytes for _, _, nbytes in reads)
        one, four = (
            probe.speed(reads[start::2], depth, _PROBED_SECONDS, _PROBED_BYTES)
            for start, depth in ((0, 1), (1, 4))
        )
    except ColibriError as error:
        return _finding("disk", "not measured", str(error))
    text = (
        f"{byte_size(one)}/s in random reads of {byte_size(size)}, {byte_size(four)}/s with four "
        "at a time"
    )
    slow = max(one, four) < _SLOW_DISK and size >= _TELLING_READ
    advice = "an NVMe drive is several times faster, and so is a model that does not fit in memory"
    return _finding("disk", text, advice if slow else "")


def _profile(gguf: GGUF) -> Finding:
    found = load_profile(gguf)
    if found is None:
        return _finding("tuning", "not tuned yet; colibri-mmap tune measures the best settings")
    return _finding(
        "tuning",
        f"{found.threads} threads, --io {found.io}, --prefetch {found.prefetch or 'off'}, "
        f"--prefetch-threads {found.prefetch_threads}",
    )
