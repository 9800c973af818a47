"""The RAM tier: which experts are in memory, fetching those that are not, forgetting others.

A decode step asks for the chosen experts of a layer with `fetch`: all are announced at once, the
absent ones first; those in memory come back immediately and are computed while the others arrive,
in the order in which they were asked for. The threads of the prefault service wait for the pages,
so that errors surface as exceptions and the computing threads need not fault; one more evicts. What
is kept is the policy's decision alone, and nothing here can change a result.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelReadError
from .policy import ExpertPolicy, Kind
from .sources import ExpertNumbers, ExpertSource

_WINDOW_BYTES = 256 << 20  # read ahead of the computation in prefill, at most
_AUDIT_SIZE = 16  # experts

# Where an expert is on its way from disk to memory. Plain numbers: numpy asks an enum's member for
# attributes by running Python code, and drops the KeyboardInterrupt of a Ctrl-C that comes there.
_ABSENT, _LOADING, _READY = range(3)


@dataclass(slots=True)
class PagerStats:
    """Counts since they were last taken: experts, bytes, seconds."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    miss_bytes: int = 0
    wait_seconds: float = 0.0
    prefetched: int = 0
    prefetch_hits: int = 0
    evicted: int = 0
    lost: int = 0  # believed to be in memory, but found gone


class ExpertPager:
    """Fetches experts through a source and keeps what the policy keeps.

    `distrusts`: memory is short, so the kernel may have taken what the book believes to be in
    memory. The book is then checked against the page cache now and then, and as long as the last
    check found something gone, hits are announced too, which costs a tenth of a millisecond each.
    """

    def __init__(
        self,
        numbers: ExpertNumbers,
        source: ExpertSource,
        policy: ExpertPolicy,
        *,
        threads: int,
        distrusts: bool,
    ) -> None:
        self.numbers, self.source, self.policy = numbers, source, policy
        self.stats = PagerStats()
        self.distrusts = distrusts
        self.doubts = False
        self._index = {layer: index for index, layer in enumerate(numbers.layers)}
        self._state = np.full(numbers.total, _ABSENT, np.uint8)
        self._prefetched = np.zeros(numbers.total, np.bool_)
        self._loading: set[int] = set()
        self._ahead: set[int] = set()  # read in advance by `stream`, not computed yet
        self._failed: dict[int, OSError] = {}
        self._demand: deque[int] = deque()
        self._background: deque[int] = deque()
        self._warming: deque[int] = deque()  # to be loaded when nothing else is; not loading yet
        self._announcements: deque[int] = deque()
        self._evictions: deque[int] = deque()
        # Taken as it is, not through the condition, which is Python code: there a Ctrl-C may come
        # between the end of a block and the release.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"colibri-{target.__name__}", daemon=True)
            for target in (*[self._prefault] * threads, self._announce, self._evict)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads; what is in the page cache stays there."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self.source.close()

    def take_stats(self) -> PagerStats:
        """The counts so far; they start anew, also those of what was prefetched before."""
        self._prefetched[:] = False
        stats, self.stats = self.stats, PagerStats()
        return stats

    def present(self) -> NDArray[np.bool_]:
        """Which experts the book has in memory [total]."""
        present: NDArray[np.bool_] = self._state == _READY
        return present

    # -------------------------------------------------------------------------- asking
    def note_elsewhere(self, layer: int, experts: NDArray[np.int64]) -> None:
        """Distinct experts of a decode step are computed on another device: they need no memory."""
        self.policy.count(self._index[layer], experts)

    def fetch(
        self, layer: int, experts: NDArray[np.int64], least: int | None = None
    ) -> Iterator[NDArray[np.int64]]:
        """The distinct experts of a decode step, in groups of positions in `experts`.

        Those in memory come first, the others as they arrive. All stay in memory until the next
        call; with `least`, those that do not fit in the budget may push out the ones before, but at
        least so many are in memory together.
        """
        index = self._index[layer]
        numbers = index * self.numbers.count + experts
        together = len(numbers)
        if least is not None:
            together = max(least, self.policy.budget // int(self.source.sizes[numbers[0]]))
        with self._lock:
            self._ahead.clear()  # of a prompt that is done or was given up
            self.policy.take_turn(index, experts)
        if len(numbers) <= together:
            yield from self._fetch(index, experts)
            return
        order = np.argsort(self._state[numbers] != _READY, kind="stable")
        for start in range(0, len(order), together):
            some = order[start : start + together]
            for positions in self._fetch(index, experts[some]):
                yield some[positions]

    def _fetch(self, index: int, experts: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """`fetch` of experts that are in memory together."""
        numbers = index * self.numbers.count + experts
        with self._lock:
            self.policy.admit(index, experts)
        present = self._state[numbers] == _READY
        self._count(numbers, present)
        missing = numbers[~present].tolist()
        if missing:
            for number in missing:
                self.source.announce(number)
            self._queue(missing, "demand", self._demand)
        if self.doubts:
            for number in numbers[present].tolist():
                self.source.announce(number)
        if missing:
            self._make_room(numbers.tolist())
        if len(missing) < len(numbers):
            yield np.flatnonzero(present)
        yield from self._arrivals(missing, np.flatnonzero(~present))

    def stream(
        self, layer: int, experts: NDArray[np.int64], upcoming: Sequence[int] = ()
    ) -> Iterator[NDArray[np.int64]]:
        """The experts of a prefill chunk, each once, in groups of positions in `experts`.

        Those in memory come first, the others as they arrive, in the order given. While they are
        computed more are read, up to a window; after them the absent ones among the numbers
        `upcoming`, of the next layer. What is read here leaves memory first.
        """
        numbers = self._index[layer] * self.numbers.count + experts
        with self._lock:
            self._ahead.intersection_update(numbers.tolist())  # others were read in vain
            present = self._state[numbers] == _READY
        self._count(numbers, present)
        missing = numbers[~present].tolist()
        queue = deque([*missing, *upcoming])
        group = numbers[present].tolist()
        self._read_ahead(queue, len(upcoming), missing, group)
        if group:
            yield np.flatnonzero(present)
        done = 0
        for arrived in self._arrivals(missing, np.flatnonzero(~present)):
            group = numbers[arrived].tolist()
            done += len(group)
            self._read_ahead(queue, len(upcoming), missing[done:], group)
            yield arrived

    def prefetch(self, layer: range, experts: Sequence[int]) -> None:
        """Read experts that may be wanted soon, unless something is being waited for.

        `layer`: the numbers of the layer whose `experts` they are.
        """
        absent = [layer[e] for e in experts if self._state[layer[e]] == _ABSENT]
        if absent and not self._demand:
            self._prefetched[absent] = True
            self.stats.prefetched += len(absent)
            self._queue(absent, "prefetch", self._background)
            self._make_room(absent)

    def warm(self, numbers: Sequence[int]) -> None:
        """Read these experts, the first most likely to be used, in idle moments until memory is
        full; those in memory already are left alone."""
        with self._lock:
            self._warming.extend(numbers)
            self._changed.notify_all()

    def _count(self, numbers: NDArray[np.int64], present: NDArray[np.bool_]) -> None:
        stats, size = self.stats, int(self.source.sizes[numbers[0]])
        hits = int(np.count_nonzero(present))
        stats.hits += hits
        stats.hit_bytes += hits * size
        stats.misses += len(numbers) - hits
        stats.miss_bytes += (len(numbers) - hits) * size
        if stats.prefetched:
            stats.prefetch_hits += int(np.count_nonzero(self._prefetched[numbers]))
            self._prefetched[numbers] = False

    def _key(self, number: int) -> tuple[int, NDArray[np.int64]]:
        """A number as the policy names it: index of the layer, experts."""
        index, expert = divmod(number, self.numbers.count)
        return index, np.array([expert], np.int64)

    def _queue(self, numbers: Sequence[int], kind: Kind, queue: deque[int]) -> None:
        """Have the prefault service load experts; one that waits in the background moves up."""
        with self._lock:
            for number in numbers:
                if self._state[number] == _ABSENT:
                    self._failed.pop(number, None)
                    self.policy.admit(*self._key(number), kind)
                    queue.append(number)  # before the state: Ctrl-C must not leave it unqueued
                    self._loading.add(number)
                    self._state[number] = _LOADING
                    if queue is self._background or kind == "one_shot":
                        self._announcements.append(number)
                elif queue is self._demand and number in self._background:
                    self._background.remove(number)
                    queue.append(number)
            self._changed.notify_all()

    def _read_ahead(
        self, queue: deque[int], upcoming: int, missing: Sequence[int], group: Sequence[int]
    ) -> None:
        """Load what comes next in `queue` while there is room in the window, and in any case the
        first of `missing`, which will be waited for; `group` is computed now. The last `upcoming`
        in the queue are for later."""
        sizes = self.source.sizes
        spare = upcoming + max(0, len(missing) - 1)
        window = min(_WINDOW_BYTES, self.policy.budget // 4)
        fresh: list[int] = []
        with self._lock:
            self._ahead.difference_update(group)
            # some arrive without being asked for here: they too must not leave before their turn
            self._ahead.update(n for n in missing if self._state[n] != _ABSENT)
            inside = sum(int(sizes[n]) for n in self._ahead)
            while queue and (inside < window or len(queue) > spare):
                number = queue.popleft()
                if self._state[number] != _READY:
                    fresh.append(number)
                    inside += int(sizes[number]) if number not in self._ahead else 0
                    self._ahead.add(number)
        if fresh:
            self._queue(fresh, "one_shot", self._demand)
            self._make_room(group)

    def _make_room(self, in_use: Collection[int]) -> None:
        """Evict what the policy gives up; nothing that is in use, being read or read in advance."""
        if self.policy.resident_bytes <= self.policy.budget:
            return
        count = self.numbers.count
        with self._lock:
            keep = {*in_use, *self._loading, *self._ahead}
            found = self.policy.victims(keep=[divmod(number, count) for number in keep])
            victims = [layer * count + expert for layer, expert in found]
            self.stats.evicted += len(victims)
            self._state[victims] = _ABSENT
            self._prefetched[victims] = False
            self._evictions.extend(victims)
            self._changed.notify_all()

    # -------------------------------------------------------------------------- waiting
    def _arrivals(
        self, missing: list[int], positions: NDArray[np.int64]
    ) -> Iterator[NDArray[np.int64]]:
        """The positions of the missing experts, in order, as many at a time as have arrived."""
        done = 0
        while done < len(missing):
            count = self._wait_for(missing[done:])
            yield positions[done : done + count]
            done += count

    def _wait_for(self, missing: list[int]) -> int:
        """Wait for the first; how many from it on are in memory."""
        started = time.perf_counter()
        with self._lock:
            self._changed.wait_for(
                lambda: self._state[missing[0]] == _READY or missing[0] in self._failed
            )
            self.stats.wait_seconds += time.perf_counter() - started
            if missing[0] in self._failed:
                self._give_up(missing[0])
            count = 1
            while count < len(missing) and self._state[missing[count]] == _READY:
                count += 1
        return count

    def _give_up(self, number: int) -> None:
        error = self._failed.pop(number)
        layer, expert = self.numbers.name(number)
        raise ModelReadError(
            f"{self.source.path(number)}: layer {layer}, expert {expert} cannot be read "
            f"({error.strerror}); check the disk, and the file with colibri-mmap verify"
        ) from error

    # -------------------------------------------------------------------------- threads
    def _prefault(self) -> None:
        """Load queued experts, the demanded ones first."""
        while True:
            warms = False
            with self._lock:
                self._changed.wait_for(
                    lambda: self._closed or self._demand or self._background or self._warming
                )
                if self._closed:
                    return
                if self._demand or self._background:
                    number = (self._demand or self._background).popleft()
                else:
                    number = self._warming.popleft()
                    warms = self._may_warm(number)
                    if not warms:
                        continue
            error = None
            try:
                if warms:  # not earlier: what is announced delays what others wait for
                    self.source.announce(number)
                self.source.load(number)
            except OSError as caught:
                error = caught
            with self._lock:
                self._loading.discard(number)
                self._state[number] = _READY if error is None else _ABSENT
                if error is not None:
                    self.policy.drop(*self._key(number))
                    self._ahead.discard(number)
                    self._failed[number] = error
                self._changed.notify_all()

    def _may_warm(self, number: int) -> bool:
        """Begin to load an expert if it is absent and fits; if none fits any more, warming ends."""
        if self._state[number] != _ABSENT:
            return False
        if self.policy.resident_bytes + int(self.source.sizes[number]) > self.policy.budget:
            self._warming.clear()
            return False
        self._state[number] = _LOADING
        self._loading.add(number)
        self.policy.admit(*self._key(number), "demand")
        return True

    def _announce(self) -> None:
        """Have the disk start on queued experts, far ahead of those who wait for them."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._announcements)
                if self._closed:
                    return
                number = self._announcements.popleft()
            self.source.announce(number)

    def _evict(self) -> None:
        """Give back the memory of evicted experts, unless they were asked for again meanwhile."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._closed or self._evictions)
                if self._closed:
                    return
                number = self._evictions.popleft()
                if self._state[number] != _ABSENT:
                    continue
                if self.source.is_buffer:
                    self.source.evict(number)  # quick, and no load may come between
                    continue
            self.source.evict(number)

    def audit(self) -> None:
        """Compare some entries of the book with the page cache; what is gone is asked for anew."""
        if not self.distrusts:
            return
        ready = np.flatnonzero(self._state == _READY).tolist()
        sample = random.sample(ready, min(_AUDIT_SIZE, len(ready)))
        gone = [number for number in sample if self.source.resident(number) < 0.5]
        for number in gone:
            with self._lock:
                self._state[number] = _ABSENT
                self.policy.drop(*self._key(number))
        self.stats.lost += len(gone)
        self.doubts = bool(gone)

    def check_integrity(self) -> None:
        """Assert that the books agree with one another, while nothing is being asked for."""
        with self._lock:
            self.policy.check_integrity()
            held = [i * self.numbers.count + expert for i, expert in self.policy.resident_keys()]
            assert held == np.flatnonzero(self._state != _ABSENT).tolist()
            assert self._loading == set(np.flatnonzero(self._state == _LOADING).tolist())
            assert {*self._demand, *self._background} <= self._loading
