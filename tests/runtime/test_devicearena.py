"""Device memory of a step, and the ways to and from it, on a device that runs late."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from colibri_mmap.runtime.arena import Arena, Rows
from colibri_mmap.runtime.device import ALIGNMENT, OutOfDeviceMemory
from colibri_mmap.runtime.devicearena import DeviceArena, Downloads, UploadRing
from colibri_mmap.runtime.hostdevice import HostBackend, HostEvent
from colibri_mmap.runtime.hostkernels import execute


def late_device(seed: int) -> HostBackend:
    return HostBackend(execute, deferred=True, seed=seed)


@pytest.mark.parametrize("seed", range(10))
def test_uploads_arrive_although_their_memory_is_used_again(seed: int) -> None:
    """Through a ring far smaller than what passes, in pieces where it is less than an array."""
    device, host, random = late_device(seed), Arena(), np.random.default_rng(seed)
    ring, arena = UploadRing(device, half_bytes=256), DeviceArena(device)
    downloads = Downloads(device, host)
    sent = [random.standard_normal((1, n), np.float32) for n in random.integers(1, 200, 40)]
    rows = []
    for values in sent:
        there = arena.rows(*values.shape)
        ring.upload(there.address, values)
        values_of_caller = values.copy()
        rows.append((there, values_of_caller))
        values[:] = -1  # the caller's to change at once
    for there, expected in rows:
        (found,) = downloads.start(there).wait()
        assert np.array_equal(host.view(found), expected)


class _Interrupted(HostBackend):
    """Waiting ends with a Ctrl-C, once."""

    interrupt = False

    def synchronize(self, event: HostEvent) -> None:
        if self.interrupt:
            self.interrupt = False
            raise KeyboardInterrupt
        super().synchronize(event)


@pytest.mark.parametrize("seed", range(10))
def test_a_wait_that_was_given_up_is_made_up_for(seed: int) -> None:
    device = _Interrupted(execute, deferred=True, seed=seed)
    ring, arena = UploadRing(device, half_bytes=256), DeviceArena(device)
    rows = [arena.rows(1, 64) for _ in range(3)]
    for number, there in enumerate(rows[:2]):
        ring.upload(there.address, np.full((1, 64), number, np.float32))
    device.interrupt = True
    with pytest.raises(KeyboardInterrupt):
        ring.upload(rows[2].address, np.full((1, 64), 7, np.float32))
    ring.upload(rows[2].address, np.full((1, 64), 2, np.float32))
    host = Arena()
    found = Downloads(device, host).start(*rows).wait()
    assert [host.view(values)[0, 0] for values in found] == [0, 1, 2]


@pytest.mark.parametrize("seed", range(10))
def test_a_reading_is_of_its_moment(seed: int) -> None:
    """What the device computes afterwards does not change it; several rows come together."""
    device, host = late_device(seed), Arena()
    ring, arena, downloads = UploadRing(device), DeviceArena(device), Downloads(device, host)
    first, second = arena.rows(3, 700), arena.rows(400, 1000)
    ring.upload(first.address, np.full((3, 700), 1, np.float32))
    ring.upload(second.address, np.full((400, 1000), 2, np.float32))
    reading = downloads.start(first, second)
    ring.upload(first.address, np.zeros((3, 700), np.float32))
    ones, twos = reading.wait()
    assert (host.view(ones) == 1).all()
    assert (host.view(twos) == 2).all()


def test_the_same_requests_get_the_same_addresses() -> None:
    device = HostBackend(execute, memory=200 << 20)
    arena = DeviceArena(device)

    def requests() -> list[Rows]:
        with arena.temporaries():
            rows = [arena.rows(3, 5), arena.rows(1, 12 << 20)]  # the second in a chunk of its own
            with arena.temporaries():
                rows.append(arena.rows(7, 100))
            return [*rows, arena.rows(7, 100)]

    first, held = requests(), arena.nbytes
    assert first == requests()
    assert arena.nbytes == held == device.memory_info()[1] - device.memory_info()[0]
    assert first[2] == first[3]
    ends = sorted((r.address, r.address + 4 * r.count * r.width) for r in first[:3])
    assert all(end <= start for (_, end), (start, _) in pairwise(ends))
    assert all(r.address % ALIGNMENT == 0 for r in first)
    with pytest.raises(OutOfDeviceMemory):
        arena.rows(1, 1 << 26)
    arena.close()
    assert device.memory_info()[0] == device.memory_info()[1]
