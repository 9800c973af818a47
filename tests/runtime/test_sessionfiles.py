"""Session files that are damaged, foreign or in the way, and disks that take no more."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faultyfs import FaultyFile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storeuse import Stores
from toycache import IDS, KINDS, OTHER, RECURRENT, Toy

HEADER = 96  # bytes before the tokens

MakeStores = Callable[..., Stores]


def written(some: Stores, length: int = 1300, model: str = "toy") -> list[Path]:
    """The files of a conversation, by their end."""
    store = some.open(model)
    some.serve(store, IDS[:length])
    store.close()
    return files(some)


def files(some: Stores) -> list[Path]:
    assert some.directory is not None
    found = some.directory.rglob("*.kvpart")
    return sorted(found, key=lambda path: (path.name[0], int(path.name.split("-")[1])))


def change(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


# ------------------------------------------------------------------------------ bad files
def test_the_format(stores: MakeStores) -> None:
    """The header by the description, without our code."""
    some = stores(RECURRENT)
    paths = written(some)
    kinds = []
    for path in paths:
        content = path.read_bytes()
        magic, version, kind, model, _, start, count, size = struct.unpack_from(
            "<8sII16s16sQQQ", content
        )
        assert (magic, version) == (b"colibKV1", 1)
        assert path.parent.name == model.hex()
        assert start % 512 == 0
        tokens = struct.unpack_from(f"<{count}i", content, HEADER)
        assert list(tokens) == IDS[start : start + count]
        payload = -(-(HEADER + 4 * count) // 64) * 64
        assert len(content) == payload + size
        values = 2 * (16 + 32) + 32 + 16  # floats of a token: 2 heads of 16 and 32, 1 of 32 and 16
        assert size == (4 * values * -(-count // 16) * 16 if kind == 0 else 128 + 192)
        kinds.append((kind, start + count))
    assert sorted(kinds) == [(kind, end) for kind in (0, 1) for end in (512, 1024, 1300)]


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_damage(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whatever happened to the bytes: what comes back is right, and what is broken is removed."""
    kind = data.draw(st.sampled_from(sorted(KINDS)))
    some = Stores(Toy(KINDS[kind]), tmp_path_factory.mktemp("kept"))
    path = data.draw(st.sampled_from(written(some)))
    content = path.read_bytes()
    place = data.draw(st.integers(0, len(content) - 1) | st.integers(0, HEADER + 64))
    how = data.draw(st.sampled_from(["flip", "cut", "longer", "empty"]))
    if how == "flip":
        bit = 1 << data.draw(st.integers(0, 7))
        change(path, place, bytes([content[place] ^ bit]))
    elif how == "cut":
        os.truncate(path, place)
    elif how == "longer":
        path.write_bytes(content + bytes(place + 1))
    else:
        path.write_bytes(b"")
    tokens_end = HEADER + 4 * (276 if "-1300-" in path.name else 512)
    payload = -(-tokens_end // 64) * 64
    padding = how == "flip" and tokens_end <= place < payload
    foreign = how == "flip" and place < 12  # another magic or version: not ours to judge
    needed = path.name.startswith("span") or "-1300-" in path.name
    store = some.open()
    if how != "flip" or (place < tokens_end and not foreign):
        assert not path.exists()
    known = some.serve(store, IDS[:1301])
    assert (known < 1300) == (needed and not padding)
    if not padding and (needed or how != "flip" or place < payload):
        assert len(some.notices) == 1
        assert path.name in some.notices[0]
        assert needed or path.exists() == foreign
    store.close()
    if not foreign:
        some.notices.clear()
        store = some.open()
        assert some.serve(store, IDS[:1302]) == 1301  # it was written anew
        assert some.notices == []
        store.close()


def test_files_of_others_are_left_alone(stores: MakeStores) -> None:
    some = stores()
    first, second, _ = written(some)
    folder = first.parent
    change(first, 8, struct.pack("<I", 2))
    another = next(path for path in written(some, model="another") if path.parent != folder)
    shutil.copy(second, another.parent)
    (folder / "notes.txt").write_text("mine")
    (folder / "span-7-x.kvpart").write_text("mine")
    (folder / f"span-7-{'0' * 32}.kvpart").write_text("a text of mine")
    (folder / f"span-8-{'0' * 32}.kvpart").mkdir()
    before = sorted(some.directory.rglob("*"))
    some.notices.clear()
    store = some.open()
    assert some.notices == [
        f"sessions in {folder}: {first.name} cannot be used "
        "(has version 2, this program writes 1); 2 more likewise"
    ]
    assert store.take(IDS[:1301]).ids == []
    some.notices.clear()
    some.open("another")
    assert len(some.notices) == 1
    assert "belongs to another model" in some.notices[0]
    assert sorted(some.directory.rglob("*")) == before


def test_the_space_of_others_counts_but_is_not_taken(stores: MakeStores) -> None:
    """Other models' sessions make room, oldest first; foreign files never do."""
    some = stores()
    old = written(some, 1300, "old")
    one = sum(path.stat().st_size for path in old)
    mine = old[0].parent / "mine.kvpart"
    mine.write_bytes(bytes(one))
    store = some.open("new", disk_bytes=one)
    some.serve(store, IDS[:1300])
    store.close()
    assert not any(path.exists() for path in old)
    assert mine.exists()
    assert some.serve(some.open("new"), IDS[:1301]) == 1300


def test_temporary_files_of_killed_processes_go(stores: MakeStores) -> None:
    some = stores()
    folder = written(some)[0].parent
    (folder / "tmpabc.writing").write_bytes(bytes(1000))
    some.open()
    assert list(folder.glob("*.writing")) == []


def test_two_processes_with_one_directory(stores: MakeStores) -> None:
    """They take each other's space away; nobody gets an error."""
    some = stores()
    one = sum(path.stat().st_size for path in written(some, 900))
    pair = [some.open(ram_bytes=0, disk_bytes=2 * one) for _ in range(2)]
    for round in range(6):
        for n, store in enumerate(pair):
            some.serve(store, [n, round // 2, *IDS[:900]])
    for store in pair:
        store.close()
        assert store.status().disk_bytes <= 2 * one * (1 + 1 / 32)
    assert some.notices == []


def test_a_range_that_cannot_be_read(stores: MakeStores, tmp_path: Path) -> None:
    some = stores()
    second = written(some)[1]
    copy = tmp_path / "copy.kvpart"
    shutil.copy(second, copy)
    with FaultyFile(copy, tmp_path) as faulty:
        second.unlink()
        second.symlink_to(faulty.path)
        store = some.open()
        faulty.fail(40_000, 100)
        assert some.serve(store, IDS[:1301]) == 512
        assert len(some.notices) == 1
        assert "cannot be used" in some.notices[0]
        store.close()


# ------------------------------------------------------------------------------ bad disks
class SmallDisk:
    """A file system of a few bytes."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.path = folder / "disk"
        self.path.mkdir()
        if self._mount(0, f"size={nbytes}") != 0:
            pytest.skip(f"mounting is refused: {os.strerror(ctypes.get_errno())}")

    def make_read_only(self) -> None:
        remount, read_only = 32, 1
        assert self._mount(remount | read_only, "") == 0

    def _mount(self, flags: int, options: str) -> int:
        target = bytes(self.path)
        return int(self._libc.mount(b"small", target, b"tmpfs", flags, options.encode()))

    def close(self) -> None:
        self._libc.umount2(bytes(self.path), 2)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[SmallDisk]:
    disk = SmallDisk(tmp_path, 1 << 20)
    yield disk
    disk.close()


def test_a_full_disk(small_disk: SmallDisk) -> None:
    """Said once; serving goes on, what fitted is of use, and space that is freed is used."""
    some = Stores(Toy(), small_disk.path)
    store = some.open()
    filler = small_disk.path / "filler"
    filler.write_bytes(bytes(600_000))
    for first in range(3):
        some.serve(store, [first, *IDS[:1500]])
        assert some.serve(store, [first, *IDS[:1501]]) == 1501
    store.close()
    assert len(some.notices) == 1
    assert "No space left on device" in some.notices[0]
    assert "\n" not in some.notices[0]
    assert list(small_disk.path.rglob("*.writing")) == []
    filler.unlink()
    store = some.open()
    assert some.serve(store, [0, *IDS[:1501]]) in (0, 512)
    store.close()
    assert some.serve(some.open(), [0, *IDS[:1502]]) == 1502


def test_a_disk_that_becomes_read_only(small_disk: SmallDisk) -> None:
    some = Stores(Toy(), small_disk.path)
    written(some, 600)
    small_disk.make_read_only()
    store = some.open()
    assert some.serve(store, IDS[:900]) == 600
    assert some.serve(store, OTHER[:900]) == 0
    store.close()
    assert len(some.notices) == 1
    assert "Read-only file system" in some.notices[0]


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    some = Stores(Toy(), tmp_path / "file" / "sessions")
    store = some.open()
    for length in (600, 700):
        some.serve(store, IDS[:length])
    store.close()
    assert len(some.notices) == 1
    assert "Not a directory" in some.notices[0]


def test_a_directory_that_is_removed_meanwhile(stores: MakeStores) -> None:
    some = stores()
    store = some.open()
    some.serve(store, IDS[:600])
    store.close()
    store = some.open()
    shutil.rmtree(some.directory)
    some.serve(store, IDS[:900])
    store.close()
    assert some.serve(some.open(), IDS[:901]) == 900


# ------------------------------------------------------------------------------ kills
CHILD = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from storeuse import Stores
from toycache import IDS, RECURRENT, Toy
some = Stores(Toy(RECURRENT), Path(sys.argv[2]))
for number in range(1000):
    store = some.open()
    some.serve(store, [number, *IDS[:1700]])
    print("begun", number, flush=True)
    store.close()
    print("written", number, flush=True)
"""


def test_a_kill_at_any_time_leaves_good_files(tmp_path: Path) -> None:
    some = Stores(Toy(RECURRENT), tmp_path / "kept")
    chance = random.Random(3)
    complete: set[int] = set()
    for kills in range(4):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(Path(__file__).parent), str(some.directory)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        for _ in range(2 * kills + 1):
            assert child.stdout.readline()
        try:
            child.wait(chance.uniform(0, 0.02))
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
        rest, _ = child.communicate()
        lines = [line.split() for line in rest.splitlines() if line.endswith(tuple("0123456789"))]
        complete |= {int(number) for word, number in lines if word == "written"}
        complete |= set(range(kills))
    store = some.open()
    for number in range(max(complete, default=0) + 2):
        known = some.serve(store, [number, *IDS[:1701]])
        assert known == 1701 or number not in complete
    store.close()
    assert some.notices == []
    assert list(some.directory.rglob("*.writing")) == []
