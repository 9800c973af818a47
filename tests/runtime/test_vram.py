"""The cache of experts in VRAM, on a device whose streams run in any legal order."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray

from colibri_mmap.errors import ResourceError
from colibri_mmap.runtime.device import Address, Dimensions, OutOfDeviceMemory
from colibri_mmap.runtime.hostdevice import HostBackend, HostEvent, HostStream
from colibri_mmap.runtime.upload import Fill, Priority
from colibri_mmap.runtime.vram import UPLOADS_PER_TURN, VramCache
from colibri_mmap.runtime.vramplan import plan_vram
from colibri_mmap.runtime.vrampolicy import SlotPolicy

EXPERTS, SLOTS, BYTES = 40, 10, 256
PIECE = 1 << 20  # bytes: an expert at once
TRIALS = 60


def ids(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, np.int64)


def content(number: int, nbytes: int = BYTES) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)


class Bench:
    """A cache on a host device, whose only kernel compares experts with what they should be."""

    def __init__(
        self,
        backend: type[HostBackend] = HostBackend,
        *,
        sizes: NDArray[np.int64] | None = None,
        slots: int = SLOTS,
        deferred: bool = True,
        seed: int = 0,
        threads: int = 0,
        fill: Fill | None = None,
        piece: int = PIECE,
    ) -> None:
        self.sizes = np.full(EXPERTS, BYTES, np.int64) if sizes is None else sizes
        self.data = [content(number, int(size)) for number, size in enumerate(self.sizes)]
        self.wrong = self.compared = 0
        self.backend = backend(self.compare, deferred=deferred, seed=seed)
        self.policy = SlotPolicy(self.sizes, slots * BYTES, layers=1, half_life=10)
        self.cache = VramCache(
            self.backend, self.policy, fill or self.fill, threads=threads, piece_bytes=piece
        )

    def fill(self, number: int, start: int, staging: NDArray[np.uint8]) -> None:
        staging[:] = self.data[number][start : start + len(staging)]

    def compare(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
    ) -> None:
        """Arguments: pairs of an expert's number and where it should be."""
        for number, address in zip(arguments[::2], arguments[1::2], strict=True):
            expected = self.data[int(number)]
            found = (ctypes.c_uint8 * expected.nbytes).from_address(int(address))
            self.wrong += bytes(found) != expected.tobytes()
            self.compared += 1

    def turn(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """One layer's turn; the addresses."""
        addresses = self.cache.use(numbers)
        arguments: list[int] = []
        for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
            if address:
                arguments += [number, Address(address)]
        if arguments:
            stream = self.backend.compute
            self.backend.launch("compare", (1, 1, 1), (1, 1, 1), arguments, stream)
        self.cache.release(numbers)
        self.cache.offer(numbers[addresses == 0])
        return addresses

    def finish(self) -> None:
        self.cache.drain()
        self.cache.check_integrity()
        self.backend.close()
        self.cache.close()


def corrupted(
    backend: type[HostBackend], seed: int, *, deferred: bool, threads: int = 0, pieces: int = 1
) -> bool:
    """Whether a kernel read anything but the expert that it was told to read."""
    sizes, slots = np.full(EXPERTS, pieces * BYTES, np.int64), pieces * SLOTS
    bench = Bench(
        backend,
        sizes=sizes,
        slots=slots,
        seed=seed,
        deferred=deferred,
        threads=threads,
        piece=BYTES,
    )
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, EXPERTS + 1)
    popularity /= popularity.sum()
    for step in range(120):
        if step % 30 == 0:
            popularity = random.permutation(popularity)
        bench.turn(random.choice(EXPERTS, 4, False, popularity))
        if step % 4 == 0:
            bench.cache.drain()  # threads are slower than the steps of this test
    bench.finish()
    assert bench.compared > 50
    return bench.wrong > 0


# ------------------------------------------------------------------------------ fences
class WithoutFence1(HostBackend):
    """The host does not wait for the device to fetch a staging buffer."""

    def synchronize(self, event: HostEvent) -> None:
        pass


class WithoutFence2(HostBackend):
    """Copies do not wait for the kernels that read what they overwrite."""

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        if stream is self.compute:
            super().wait(stream, event)


class WithoutFence3(HostBackend):
    """Kernels do not wait for the copies that they read."""

    def wait(self, stream: HostStream, event: HostEvent) -> None:
        if stream is not self.compute:
            super().wait(stream, event)


def trials(
    backend: type[HostBackend], *, deferred: bool = True, threads: int = 0, pieces: int = 1
) -> int:
    """How many of TRIALS schedules ended in corruption."""
    return sum(
        corrupted(backend, seed, deferred=deferred, threads=threads, pieces=pieces)
        for seed in range(TRIALS)
    )


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("threads", [0, 3])
def test_with_all_fences_no_schedule_corrupts(threads: int, pieces: int) -> None:
    assert trials(HostBackend, threads=threads, pieces=pieces) == 0


@pytest.mark.parametrize("backend", [WithoutFence1, WithoutFence2, WithoutFence3])
def test_without_any_of_the_fences_most_schedules_corrupt(backend: type[HostBackend]) -> None:
    assert trials(backend) >= 50


def test_an_eager_device_would_prove_nothing() -> None:
    assert trials(WithoutFence3, deferred=False) == 0


# ------------------------------------------------------------------------------ books
class Machine(RuleBasedStateMachine):
    """Drives the cache beside a dict from number to address, reading all it claims to hold."""

    numbers = st.integers(0, 23)
    number_sets = st.sets(numbers, min_size=1, max_size=5)

    def __init__(self) -> None:
        super().__init__()
        sizes = np.array([256] * 12 + [512] * 12, np.int64)
        self.broken: set[int] = set()
        self.bench = Bench(sizes=sizes, slots=18, fill=self.fill)  # half of each size
        self.held: dict[int, int] = {}  # what was used and is not released: addresses
        self.failed = 0

    def fill(self, number: int, start: int, staging: NDArray[np.uint8]) -> None:
        staging[:] = 0xEE
        if number in self.broken:
            self.failed += 1
            raise OSError(5, "broken")
        self.bench.fill(number, start, staging)

    @rule(numbers=number_sets)
    def use(self, numbers: set[int]) -> None:
        asked = ids(*sorted(numbers - self.held.keys()))
        before = self.bench.cache.resident()[asked]
        addresses = self.bench.cache.use(asked)
        assert ((addresses != 0) == before).all()  # without threads all has arrived
        arguments = [v for n, a in zip(asked.tolist(), addresses, strict=True) if a for v in (n, a)]
        stream = self.bench.backend.compute
        self.bench.backend.launch("compare", (1, 1, 1), (1, 1, 1), arguments, stream)
        self.held |= dict(zip(asked[before].tolist(), addresses[before].tolist(), strict=True))

    @rule(numbers=number_sets)
    def release(self, numbers: set[int]) -> None:
        self.bench.cache.release(ids(*sorted(numbers)))
        for number in numbers:
            self.held.pop(number, None)

    @rule(numbers=number_sets)
    def offer(self, numbers: set[int]) -> None:
        before = self.bench.cache.stats.uploads + self.bench.cache.stats.failed
        self.bench.cache.offer(ids(*sorted(numbers)))
        after = self.bench.cache.stats.uploads + self.bench.cache.stats.failed
        assert after - before <= UPLOADS_PER_TURN

    @rule(numbers=number_sets)
    def prefetch(self, numbers: set[int]) -> None:
        self.bench.cache.prefetch(sorted(numbers))

    @rule(numbers=number_sets)
    def pin(self, numbers: set[int]) -> None:
        self.bench.cache.pin(numbers)

    @rule()
    def warm(self) -> None:
        self.bench.cache.warm()

    @rule(numbers=st.sets(numbers, max_size=8))
    def damage(self, numbers: set[int]) -> None:
        self.broken = numbers

    @invariant()
    def agrees(self) -> None:
        cache = self.bench.cache
        cache.check_integrity()
        assert cache.stats.failed == self.failed
        resident = np.flatnonzero(cache.resident())
        assert self.bench.sizes[resident].sum() <= 18 * 256
        assert self.held.keys() <= set(resident.tolist())
        places = {n: self.bench.policy.place(int(self.bench.policy.slot_of[n])) for n in resident}
        ends = sorted((offset, offset + size) for offset, size in places.values())
        assert all(first[1] <= second[0] for first, second in pairwise(ends))

    def teardown(self) -> None:
        self.bench.cache.release(ids(*self.held))
        self.bench.finish()
        assert self.bench.wrong == 0


Machine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase


# ------------------------------------------------------------------------------ a layer's turn
def test_misses_are_uploaded_few_at_a_time_and_found_later() -> None:
    bench = Bench(deferred=False)
    assert not bench.turn(ids(0, 1, 2, 3)).any()
    assert np.count_nonzero(bench.turn(ids(0, 1, 2, 3))) == UPLOADS_PER_TURN
    assert np.count_nonzero(bench.turn(ids(0, 1, 2, 3))) == 4
    bench.finish()
    stats = bench.cache.take_stats()
    assert (stats.hits, stats.misses, stats.uploads, stats.upload_bytes) == (6, 6, 4, 4 * BYTES)
    assert bench.cache.take_stats().hits == 0
    assert bench.wrong == 0


def test_the_hottest_of_the_missed_come_first() -> None:
    bench = Bench(deferred=False)
    for _ in range(3):
        bench.cache.use(ids(7, 9))
    bench.turn(ids(5, 6, 7, 8, 9))
    assert np.flatnonzero(bench.cache.resident()).tolist() == [7, 9]
    bench.finish()


def test_slots_in_use_are_not_taken() -> None:
    bench = Bench(deferred=False, slots=2)
    bench.turn(ids(0, 1))
    addresses = bench.cache.use(ids(0, 1))
    for _ in range(5):
        bench.turn(ids(2, 3))
        bench.cache.check_integrity()
    assert (bench.cache.use(ids(0, 1)) == addresses).all()
    bench.cache.release(ids(0, 1))
    bench.turn(ids(2, 3))
    assert np.flatnonzero(bench.cache.resident()).tolist() == [2, 3]
    bench.finish()
    assert bench.cache.take_stats().evicted == 2


def test_known_rates_fill_the_cache_at_the_start() -> None:
    rates = np.linspace(0, 1, EXPERTS)
    bench = Bench(threads=2)
    policy = SlotPolicy(bench.sizes, SLOTS * BYTES, layers=1, rates=rates)
    cache = VramCache(bench.backend, policy, bench.fill, threads=2)
    cache.warm()
    cache.drain()
    assert np.flatnonzero(cache.resident()).tolist() == list(range(EXPERTS - SLOTS, EXPERTS))
    assert cache.take_stats().uploads == SLOTS
    bench.finish()
    cache.close()


def test_prefetched_experts_are_counted_when_used() -> None:
    bench = Bench(deferred=False)
    bench.cache.prefetch([4])
    assert bench.turn(ids(4, 5))[0] != 0
    bench.turn(ids(4))
    stats = bench.cache.take_stats()
    assert (stats.prefetched, stats.prefetch_hits) == (1, 1)
    bench.finish()


# ------------------------------------------------------------------------------ failures
def test_an_expert_that_cannot_be_read_stays_on_the_cpu() -> None:
    broken = {0}

    def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
        staging[:] = 0xEE  # what is half read must never be seen
        if number in broken:
            raise OSError(5, "Input/output error")
        bench.fill(number, start, staging)

    bench = Bench(threads=2, fill=fill)
    for _ in range(4):
        addresses = bench.turn(ids(0, 1))
        bench.cache.drain()
    assert addresses[0] == 0
    assert addresses[1] != 0
    stats = bench.cache.take_stats()
    assert stats.failed == 4
    assert "Input/output error" in stats.last_error
    broken.clear()
    bench.turn(ids(0, 1))
    bench.cache.drain()
    assert bench.turn(ids(0, 1)).all()
    bench.finish()
    assert bench.wrong == 0


def test_an_expert_on_its_way_is_not_there_yet() -> None:
    gate = threading.Event()

    def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
        gate.wait()
        bench.fill(number, start, staging)

    bench = Bench(threads=1, fill=fill)
    assert not bench.turn(ids(3)).any()
    assert not bench.turn(ids(3)).any()
    assert bench.cache.resident()[3]  # its slot is taken
    gate.set()
    bench.cache.drain()
    assert bench.turn(ids(3)).all()
    bench.finish()
    assert bench.wrong == 0


def test_demand_overtakes_what_is_brought_in_advance() -> None:
    gate, order = threading.Event(), list[int]()

    def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
        gate.wait()
        order.append(number)

    bench = Bench(threads=1, fill=fill, slots=16)
    for number, priority in (
        (30, Priority.WARM),  # begun before the others come
        (31, Priority.WARM),
        (20, Priority.PREFETCH),
        (10, Priority.DEMAND),
    ):
        assert bench.cache._admit(number, priority)
        while number == 30 and not bench.cache._uploader._busy:
            pass
    gate.set()
    bench.finish()
    assert order == [30, 10, 20, 31]


@pytest.mark.parametrize("threads", [1, 4])
def test_closing_drops_what_has_not_begun_and_waits_for_the_rest(threads: int) -> None:
    started, gate, filled = threading.Semaphore(0), threading.Event(), list[int]()

    def fill(number: int, start: int, staging: NDArray[np.uint8]) -> None:
        started.release()
        gate.wait()
        filled.append(number)

    bench = Bench(threads=threads, fill=fill)
    for number in range(0, SLOTS, 2):
        bench.turn(ids(number, number + 1))
    for _ in range(threads):
        started.acquire()
    closing = threading.Thread(target=bench.cache.close)
    closing.start()
    gate.set()
    closing.join()
    assert len(filled) == threads
    assert not any(thread.is_alive() for thread in bench.cache._uploader._threads)
    assert bench.backend.memory_info()[0] == bench.backend.memory_info()[1]


# ------------------------------------------------------------------------------ memory
def test_slots_that_do_not_fit_are_refused_with_the_numbers() -> None:
    sizes = np.full(EXPERTS, BYTES, np.int64)
    backend = HostBackend(lambda *_: None, memory=8 * BYTES)
    policy = SlotPolicy(sizes, 10 * BYTES, layers=1)
    with pytest.raises(OutOfDeviceMemory, match=r"0\.0 MB do not fit.*--vram") as caught:
        VramCache(backend, policy, lambda number, start, staging: None)
    assert (caught.value.wanted, caught.value.free) == (10 * BYTES, 8 * BYTES)
    assert "\n" not in str(caught.value)


def test_memory_is_given_back_when_pinning_fails() -> None:
    class NoPinning(HostBackend):
        def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
            raise ResourceError("no memory can be pinned")

    backend = NoPinning(lambda *_: None)
    policy = SlotPolicy(np.full(EXPERTS, BYTES, np.int64), 10 * BYTES, layers=1)
    with pytest.raises(ResourceError):
        VramCache(backend, policy, lambda number, start, staging: None)
    assert backend.memory_info()[0] == backend.memory_info()[1]


GIGA = 10**9


@pytest.fixture
def card() -> dict[str, int]:
    """A card of 8 GB with a desktop on it, and a model."""
    return {
        "free": 7 * GIGA,
        "total": 8 * GIGA,
        "trunk_bytes": 2 * GIGA,
        "kv_bytes": GIGA,
        "scratch_bytes": GIGA // 2,
        "expert_bytes": 20 * GIGA,
    }


def test_what_is_free_beside_the_reserve_goes_to_experts(card: dict[str, int]) -> None:
    plan = plan_vram(**card)
    assert plan.reserve == 8 * GIGA // 20
    assert plan.limit == 7 * GIGA - plan.reserve
    assert plan.expert_budget == plan.limit - 3 * GIGA - GIGA // 2
    assert plan.expert_share == plan.expert_budget / (20 * GIGA)
    assert plan.notices == ()


def test_a_setting_bounds_what_is_taken(card: dict[str, int]) -> None:
    assert plan_vram(**card, vram=5 * GIGA).expert_budget == 5 * GIGA - 3 * GIGA - GIGA // 2


def test_a_setting_beyond_what_is_free_is_cut_with_a_notice(card: dict[str, int]) -> None:
    plan = plan_vram(**card, vram=100 * GIGA)
    assert plan.limit == 7 * GIGA - plan.reserve
    (notice,) = plan.notices
    assert "--vram 100.00 GB is more than the 6.60 GB that can be used" in notice


def test_small_models_take_no_more_than_they_need(card: dict[str, int]) -> None:
    plan = plan_vram(**(card | {"expert_bytes": GIGA}))
    assert plan.expert_budget == GIGA
    assert plan.expert_share == 1.0


@pytest.mark.parametrize(("vram", "bound"), [(3 * GIGA, "--vram"), (None, "0.40 GB kept free")])
def test_what_must_be_there_and_is_not_ends_in_the_numbers(
    card: dict[str, int], vram: int | None, bound: str
) -> None:
    with pytest.raises(ResourceError) as caught:
        plan_vram(**(card | {"free": 3 * GIGA}), vram=vram and vram // 2)
    message = str(caught.value)
    assert "the GPU needs 3.50 GB: 2.00 GB of weights, 1.00 GB for the context" in message
    assert bound in message
    assert "--gpu-layers" in message
