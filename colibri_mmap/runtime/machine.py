"""What the system tells about the place of a file: file system, block device, read-ahead, heat.

Everything is read from /proc and /sys below `root`; what is not there is None. Sources: proc(5) of
Linux, Documentation/ABI/stable/sysfs-block and Documentation/hwmon/sysfs-interface.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .procfs import read_lines, read_number, unescape

_HWMON = ("device/hwmon*", "device/hwmon/hwmon*", "device/device/hwmon/hwmon*")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system: its type, what is mounted, and where."""

    file_system: str
    source: str
    place: str


@dataclass(frozen=True, slots=True)
class Temperature:
    """Degrees Celsius of a drive, and the most that its maker allows."""

    now: float
    limit: float | None


def mount_of(path: Path, root: Path = Path("/")) -> Mount | None:
    """The mount that holds an absolute path without links; the latest of several at one place."""
    found: Mount | None = None
    for line in read_lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        place = unescape(before.split()[4])
        kind, source, *_ = after.split(" ")
        if path.is_relative_to(place) and (found is None or len(place) >= len(found.place)):
            found = Mount(kind, unescape(source), place)
    return found


@dataclass(frozen=True, slots=True)
class BlockDevice:
    """The device under a file, by its number; a partition shares the queue of its disk."""

    number: str
    root: Path = Path("/")

    @classmethod
    def under(cls, path: Path) -> BlockDevice:
        """The device that a file is on; network and stacked file systems have a number only."""
        device = path.stat().st_dev
        return cls(f"{os.major(device)}:{os.minor(device)}")

    @property
    def directory(self) -> Path | None:
        """Of the whole disk, in /sys."""
        found = self.root / "sys/dev/block" / self.number
        if not found.exists():
            return None
        found = found.resolve()
        return found.parent if (found / "partition").exists() else found

    @property
    def name(self) -> str | None:
        return self.directory.name if self.directory else None

    @property
    def read_ahead_kb(self) -> int | None:
        """How far an ordinary page fault reads ahead."""
        places = [self.root / "sys/class/bdi" / self.number / "read_ahead_kb"]
        if self.directory is not None:
            places.insert(0, self.directory / "queue/read_ahead_kb")
        return next((kb for place in places if (kb := read_number(place)) is not None), None)

    def temperature(self) -> Temperature | None:
        """Of the first drive below that has a sensor; encrypted and joined volumes lie above it."""
        if self.directory is None:
            return None
        for disk in (self.directory, *_lower_disks(self.directory)):
            for pattern in _HWMON:
                for sensor in sorted(disk.glob(pattern)):
                    now, limit = (
                        read_number(sensor / "temp1_input"),
                        read_number(sensor / "temp1_max"),
                    )
                    if now is not None:
                        return Temperature(now / 1000, limit / 1000 if limit else None)
        return None


def _lower_disks(directory: Path) -> list[Path]:
    """The disks that a device of the device mapper or a RAID is made of, at any depth."""
    found = []
    for lower in sorted((directory / "slaves").glob("*")):
        place = lower.resolve()
        disk = place.parent if (place / "partition").exists() else place
        found += [disk, *_lower_disks(disk)]
    return found


def swap_in_use(root: Path = Path("/")) -> int:
    """Bytes of memory that are swapped out."""
    values = dict.fromkeys(("SwapTotal", "SwapFree"), 0)
    for line in read_lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name in values:
            values[name] = int(value.split()[0]) * 1024
    return values["SwapTotal"] - values["SwapFree"]


def graphics_cards(root: Path = Path("/")) -> list[str]:
    """Names of NVIDIA GPUs whose driver is loaded."""
    cards = []
    for file in sorted((root / "proc/driver/nvidia/gpus").glob("*/information")):
        cards += [
            line.partition(":")[2].strip() for line in read_lines(file) if line[:5] == "Model"
        ]
    return cards
