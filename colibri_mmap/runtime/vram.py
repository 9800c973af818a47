"""The VRAM tier: the hottest experts in slots of device memory, brought there in the background.

A layer's turn: `use` tells which of the chosen experts are in VRAM and where; kernels on the
compute stream may read these until `release`. `offer` proposes the missed ones, which others
compute meanwhile: an upload is never waited for, it serves later steps. Three fences keep bytes
from being overwritten or read too early:

    1  a staging buffer is filled again only when the device has fetched its last content (upload)
    2  a copy into a slot waits for the last kernels that read what was there        (copy stream)
    3  kernels wait for the copy of what they are about to read                   (compute stream)
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .device import ALIGNMENT, Address, DeviceBackend, Event
from .processor import default_threads
from .upload import PIECE_BYTES, Fill, Priority, Upload, Uploader
from .vrampolicy import Admission, SlotPolicy

UPLOADS_PER_TURN = 2  # an upload moves an expert's bytes through memory three times, its use once
_LEAST_THREADS, _MOST_THREADS = 4, 8  # of uploads; one reads about 7 GB/s from the page cache


@dataclass(slots=True)
class VramStats:
    """Counts since they were last taken: experts and bytes. `failed` could not be read."""

    hits: int = 0
    misses: int = 0
    uploads: int = 0
    upload_bytes: int = 0
    rejected: int = 0
    evicted: int = 0
    prefetched: int = 0
    prefetch_hits: int = 0
    failed: int = 0
    last_error: str = ""


class VramCache:
    """Experts in VRAM. All methods are for the thread that computes; uploads have their own."""

    def __init__(
        self,
        backend: DeviceBackend,
        policy: SlotPolicy,
        fill: Fill,
        *,
        threads: int | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        """`fill` reads a piece of an expert's slot. `threads`: None is as many as suit the machine.

        With none at all uploads are done by `offer` itself.

        OutOfDeviceMemory if the slots do not fit.
        """
        self.policy, self.stats = policy, VramStats()
        self._backend = backend
        used = [part for part in policy.classes if part.count]
        assert all(part.slot_bytes % ALIGNMENT == 0 for part in used)
        self.nbytes = sum(part.count * part.slot_bytes for part in used)
        slots = sum(part.count for part in used)
        self._ready: list[Event | None] = [None] * slots  # None: the content may be read
        self._arriving: set[int] = set()  # slots whose copy is not on the stream yet
        self._reading: dict[int, int] = {}  # number: slot, between use and release
        self._prefetched: set[int] = set()
        self._lock = threading.Lock()
        self._memory = backend.allocate(max(self.nbytes, ALIGNMENT))
        try:
            self._uploader = Uploader(
                backend,
                fill,
                max((part.slot_bytes for part in used), default=ALIGNMENT),
                threads=_usual_threads() if threads is None else threads,
                piece_bytes=piece_bytes,
                arrived=self._arrived,
                failed=self._failed,
            )
        except BaseException:
            self._memory.free()
            raise

    # -------------------------------------------------------------------------- a layer's turn
    def use(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The addresses of a layer's chosen experts [n], distinct; 0: not in VRAM.

        Work given to the compute stream from now on may read them, until `release`.
        """
        policy, base, reading = self.policy, self._memory.address, self._reading
        names, addresses, taken = numbers.tolist(), [0] * len(numbers), []
        with self._lock:
            policy.count(numbers)
            slots = policy.slot_of[numbers].tolist()
            for position, (number, slot) in enumerate(zip(names, slots, strict=True)):
                if slot < 0 or slot in self._arriving:
                    continue
                if self._ready[slot] is not None:
                    self._await(slot)
                addresses[position] = base + policy.place(slot)[0]
                if number not in reading:  # else its release was forgotten, by a Ctrl-C
                    reading[number] = slot
                    taken.append(slot)
                if number in self._prefetched:
                    self._prefetched.remove(number)
                    self.stats.prefetch_hits += 1
            policy.hold(taken)
            misses = addresses.count(0)
            self.stats.hits += len(names) - misses
            self.stats.misses += misses
        return np.array(addresses, np.int64)

    def release(self, numbers: NDArray[np.int64]) -> None:
        """All work that reads these experts, as far as they are in VRAM, is on the stream."""
        with self._lock:
            reading = self._reading
            self.policy.release([reading.pop(n) for n in numbers.tolist() if n in reading])

    def offer(self, numbers: NDArray[np.int64]) -> None:
        """Propose a layer's missed experts: the hottest are uploaded if they deserve a slot."""
        order = np.argsort(-self.policy.heat[numbers], kind="stable")
        left = UPLOADS_PER_TURN
        for number in numbers[order].tolist():
            if not left:
                break
            left -= self._admit(number, Priority.DEMAND)

    # -------------------------------------------------------------------------- in advance
    def prefetch(self, numbers: Iterable[int]) -> None:
        """Upload experts that are expected to be chosen soon, where that is not too many."""
        for number in numbers:
            self._admit(number, Priority.PREFETCH)

    def warm(self) -> None:
        """Fill the slots with pinned experts and those to be expected, the hottest first."""
        hottest = np.array(self.policy.hottest(), np.int64)
        with self._lock:
            absent = hottest[self.policy.slot_of[hottest] < 0]
            slots = self.policy.demand_free(absent)
            free = slots >= 0
            pairs = zip(absent[free].tolist(), slots[free].tolist(), strict=True)
            used = self._used()
            uploads = [self._begin(number, slot, used) for number, slot in pairs]
        self._uploader.submit(uploads, Priority.WARM)
        for number in absent[~free].tolist():
            self._admit(number, Priority.WARM)

    def pin(self, numbers: Iterable[int]) -> None:
        """These experts, and no others, stay in VRAM whatever is used, once `warm` or a miss
        brought them there."""
        with self._lock:
            self.policy.pin(numbers)

    # -------------------------------------------------------------------------- what is known
    def resident(self) -> NDArray[np.bool_]:
        """Which experts have a slot [total], their bytes there or on their way."""
        return self.policy.slot_of >= 0

    def take_stats(self) -> VramStats:
        """The counts so far; they start anew."""
        with self._lock:
            stats, self.stats = self.stats, VramStats()
        return stats

    def drain(self) -> None:
        """Wait until no upload is pending."""
        self._uploader.drain()

    def check_integrity(self) -> None:
        """Assert that the books agree with one another."""
        with self._lock:
            self.policy.check_integrity()
            for number, slot in self._reading.items():
                assert self.policy.slot_of[number] == slot
                assert slot not in self._arriving
            assert (self.policy.slot_of[list(self._prefetched)] >= 0).all()

    def close(self) -> None:
        """End the uploads and free the memory; kernels must not read it any more."""
        try:
            self._uploader.close()
        finally:
            self._memory.free()

    # -------------------------------------------------------------------------- within
    def _admit(self, number: int, priority: Priority) -> bool:
        """Start an upload if the policy has a slot for the expert."""
        with self._lock:
            policy = self.policy
            if policy.slot_of[number] >= 0:
                return False
            admission: Admission | None
            if priority is Priority.PREFETCH:
                admission = policy.prefetch(number)
            else:
                admission = policy.demand(number)
            if admission is None:
                self.stats.rejected += 1
                return False
            if admission.evicted >= 0:
                self.stats.evicted += 1
                self._prefetched.discard(admission.evicted)
            if priority is Priority.PREFETCH:
                self.stats.prefetched += 1
                self._prefetched.add(number)
            upload = self._begin(number, admission.slot, self._used())
        self._uploader.submit((upload,), priority)
        return True

    def _used(self) -> Event:
        """Behind all that was launched, and so behind what reads slots that can be taken now."""
        return self._backend.record(self._backend.compute)

    def _begin(self, number: int, slot: int, used: Event) -> Upload:
        """The upload of an expert into the slot that it got, once that is `used` no more."""
        self.policy.hold(slot)
        self._arriving.add(slot)
        offset, nbytes = self.policy.place(slot)
        address = Address(self._memory.address + offset)
        return Upload(number, address, nbytes, used)

    def _await(self, slot: int) -> None:
        """Make the compute stream wait for a slot's content."""
        ready = self._ready[slot]
        if ready is None:
            return
        if self._backend.done(ready):
            self._ready[slot] = None
        else:
            self._backend.wait(self._backend.compute, ready)

    def _arrived(self, upload: Upload, ready: Event) -> None:
        with self._lock:
            slot = int(self.policy.slot_of[upload.number])
            self._ready[slot] = ready
            self._arriving.remove(slot)
            self.policy.release(slot)
            self.stats.uploads += 1
            self.stats.upload_bytes += upload.nbytes

    def _failed(self, upload: Upload, error: Exception) -> None:
        with self._lock:
            slot = int(self.policy.slot_of[upload.number])
            self._arriving.remove(slot)
            self.policy.release(slot)
            self.policy.drop(upload.number)
            self._prefetched.discard(upload.number)
            self.stats.failed += 1
            self.stats.last_error = str(error)


def _usual_threads() -> int:
    """Half of the processors, within limits: they are needed while experts are brought."""
    return min(_MOST_THREADS, max(_LEAST_THREADS, default_threads() // 2))
