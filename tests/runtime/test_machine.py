"""The place of a file, read from trees of /proc and /sys as real machines have them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from colibri_mmap.runtime.machine import (
    BlockDevice,
    Mount,
    Temperature,
    graphics_cards,
    mount_of,
    swap_in_use,
)

MOUNTS = r"""22 1 259:2 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p2 rw
40 22 0:45 / /mnt/c rw,noatime - 9p C:\134 rw,dirsync,aname=drvfs
41 22 0:50 / /media/me/My\040Disk rw - fuseblk /dev/sdb1 rw,user_id=0
42 22 8:1 / /data rw - xfs /dev/sda1 rw
43 22 253:0 / /data rw - btrfs /dev/mapper/vg-data rw
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine with an NVMe drive, a SATA drive, and a volume on both."""
    files = {
        "proc/self/mountinfo": MOUNTS,
        "proc/meminfo": "MemTotal: 16 kB\nSwapTotal:     2048 kB\nSwapFree:       512 kB\n",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: \t NVIDIA X\nIRQ: 1\n",
        "sys/class/bdi/0:45/read_ahead_kb": "64\n",
        "sys/devices/virtual/block/dm-0/queue/read_ahead_kb": "256\n",
        "sys/devices/pci/nvme0/nvme0n1/queue/read_ahead_kb": "128\n",
        "sys/devices/pci/nvme0/nvme0n1/nvme0n1p2/partition": "2\n",
        "sys/devices/pci/nvme0/hwmon3/temp1_input": "48850\n",
        "sys/devices/pci/nvme0/hwmon3/temp1_max": "84850\n",
        "sys/devices/ata/sda/queue/read_ahead_kb": "8192\n",
        "sys/devices/ata/sda/sda1/partition": "1\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    links = {
        "sys/dev/block/259:2": "sys/devices/pci/nvme0/nvme0n1/nvme0n1p2",
        "sys/dev/block/8:1": "sys/devices/ata/sda/sda1",
        "sys/dev/block/253:0": "sys/devices/virtual/block/dm-0",
        "sys/devices/pci/nvme0/nvme0n1/device": "sys/devices/pci/nvme0",
        "sys/devices/virtual/block/dm-0/slaves/nvme0n1p2": (
            "sys/devices/pci/nvme0/nvme0n1/nvme0n1p2"
        ),
    }
    for name, target in links.items():
        link = tmp_path / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(tmp_path / target)
    return tmp_path


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/home/me/m.gguf", Mount("ext4", "/dev/nvme0n1p2", "/")),
        ("/mnt/c/m.gguf", Mount("9p", "C:\\", "/mnt/c")),
        ("/mnt/cd/m.gguf", Mount("ext4", "/dev/nvme0n1p2", "/")),
        ("/media/me/My Disk/m.gguf", Mount("fuseblk", "/dev/sdb1", "/media/me/My Disk")),
        ("/data/m.gguf", Mount("btrfs", "/dev/mapper/vg-data", "/data")),
    ],
)
def test_the_mount_of_a_path(root: Path, path: str, expected: Mount) -> None:
    assert mount_of(Path(path), root) == expected


@pytest.mark.parametrize(
    ("number", "name", "read_ahead"),
    [
        ("259:2", "nvme0n1", 128),
        ("8:1", "sda", 8192),
        ("253:0", "dm-0", 256),
        ("0:45", None, 64),
        ("0:50", None, None),
    ],
)
def test_read_ahead(root: Path, number: str, name: str | None, read_ahead: int | None) -> None:
    device = BlockDevice(number, root)
    assert (device.name, device.read_ahead_kb) == (name, read_ahead)


def test_temperature(root: Path) -> None:
    assert BlockDevice("259:2", root).temperature() == Temperature(48.85, 84.85)
    assert BlockDevice("253:0", root).temperature() == Temperature(48.85, 84.85)
    assert BlockDevice("8:1", root).temperature() is None
    assert BlockDevice("0:45", root).temperature() is None


def test_swap_and_graphics_cards(root: Path, tmp_path: Path) -> None:
    assert swap_in_use(root) == 1536 * 1024
    assert graphics_cards(root) == ["NVIDIA X"]
    assert swap_in_use(tmp_path / "absent") == 0
    assert graphics_cards(tmp_path / "absent") == []


def test_this_machine(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    mount = mount_of(file.resolve())
    assert mount is not None
    assert os.path.ismount(mount.place)
    assert Path(mount.place).stat().st_dev == file.stat().st_dev
