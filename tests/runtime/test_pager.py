"""The pager on real files, threads and page cache: what arrives, what leaves, what is believed."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from expertfiles import LAYERS, LAYOUTS, ExpertFiles, Layout, expert_files, write

from colibri_mmap.errors import ModelReadError
from colibri_mmap.runtime.pager import ExpertPager
from colibri_mmap.runtime.sources import BufferedExperts, IoMode, MappedExperts

IO: tuple[IoMode, ...] = ("mmap", "pread", "direct")
EXPERTS = 8
PATIENCE = 300.0  # seconds: other programs may stop this one for a while


class Told(MappedExperts):
    """Mapped experts that note what they were told, and can be held up."""

    def __init__(self, files: ExpertFiles) -> None:
        super().__init__(files.numbers, files.layers, files.files)
        self.announced: list[int] = []
        self.loads: list[int] = []
        self.inside: set[int] = set()
        self.changed = threading.Condition()
        self.may_load, self.may_evict = threading.Event(), threading.Event()
        self.may_load.set()
        self.may_evict.set()

    def announce(self, number: int) -> None:
        super().announce(number)
        with self.changed:
            self.announced.append(number)
            self.changed.notify_all()

    def load(self, number: int) -> None:
        with self.changed:
            self.loads.append(number)
            self.changed.notify_all()
        self.may_load.wait()
        super().load(number)
        with self.changed:
            self.inside.add(number)
            self.changed.notify_all()

    def evict(self, number: int) -> None:
        self.may_evict.wait()
        super().evict(number)
        with self.changed:
            self.inside.discard(number)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE)


@contextmanager
def paging(
    files: ExpertFiles,
    source: MappedExperts | BufferedExperts,
    budget: int,
    threads: int = 2,
    distrusts: bool = True,
) -> Iterator[ExpertPager]:
    """A pager that keeps `budget` experts."""
    policy = files.policy(source, budget)
    pager = ExpertPager(files.numbers, source, policy, threads=threads, distrusts=distrusts)
    try:
        yield pager
    finally:
        pager.close()


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ExpertFiles]:
    with expert_files(tmp_path, "stacked", EXPERTS) as files:
        files.evict_all()
        if any(file.resident_bytes(0, file.size) for file in files.files):
            pytest.skip(f"{tmp_path} is on a file system that keeps its files in memory")
        yield files


def ids(*experts: int) -> np.ndarray:
    return np.array(experts, np.int64)


def in_time(work: Callable[[], None]) -> None:
    """Run what would wait for ever if it were wrong."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "it waits for ever"
    if failures:
        raise failures[0]


def flat(groups: Iterable[Iterable[int]]) -> list[int]:
    return [int(position) for group in groups for position in group]


def fetched(pager: ExpertPager, layer: int, *experts: int) -> list[list[int]]:
    return [group.tolist() for group in pager.fetch(layer, ids(*experts))]


# ------------------------------------------------------------------------------ what arrives
@pytest.mark.parametrize("io", IO)
def test_each_position_comes_once_and_those_in_memory_first(files: ExpertFiles, io: IoMode) -> None:
    with paging(files, files.source(io, 24), 24) as pager:
        assert flat(fetched(pager, 2, 5, 1, 7)) == [0, 1, 2]
        assert fetched(pager, 2, 5, 1, 7) == [[0, 1, 2]]
        present, *others = fetched(pager, 2, 3, 7, 2, 5, 0)
        assert present == [1, 3]
        assert flat(others) == [0, 2, 4]
        assert (pager.stats.hits, pager.stats.misses) == (5, 6)
        pager.check_integrity()


@pytest.mark.parametrize("io", IO)
def test_a_prompt_gets_each_expert_once_and_the_next_layer_after_them(
    files: ExpertFiles, io: IoMode
) -> None:
    with paging(files, files.source(io, 24), 24) as pager:
        fetched(pager, 1, 6, 2)
        asked = ids(0, 1, 2, 4, 6, 7)
        first, *others = [g.tolist() for g in pager.stream(1, asked, range(8, 16))]
        assert first == [2, 4]
        assert flat(others) == [0, 1, 3, 5]
        groups = pager.stream(2, ids(*range(8)))
        assert sorted(flat(groups)) == list(range(8))
        files.check(pager.source, 2, ids(*range(8)))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("io", IO)
def test_addresses_hold_the_bytes_of_the_file(tmp_path: Path, layout: Layout, io: IoMode) -> None:
    with expert_files(tmp_path, layout) as files, paging(files, files.source(io, 24), 24) as pager:
        for layer in LAYERS:
            fetched(pager, layer, *range(EXPERTS))
        for layer in LAYERS:  # only now: none may have been written over another
            files.check(pager.source, layer, ids(*range(EXPERTS)))


@pytest.mark.parametrize("io", ["pread", "direct"])
def test_buffers_hold_all_experts_where_all_fit(tmp_path: Path, io: IoMode) -> None:
    """Of small experts slots are several times larger: there must be one for each."""
    with expert_files(tmp_path, "stacked", experts=100, rows=1) as files:
        source = files.source(io, 300)

        def work() -> None:
            with paging(files, source, 300, distrusts=False) as pager:
                for layer in LAYERS:
                    fetched(pager, layer, *range(100))
                assert pager.stats.evicted == 0
                for layer in LAYERS:
                    files.check(source, layer, ids(*range(100)))

        in_time(work)


@pytest.mark.parametrize("io", IO)
def test_more_experts_at_once_than_memory_holds(tmp_path: Path, io: IoMode) -> None:
    """Those of a step of many sequences come some at a time, while they last."""
    with expert_files(tmp_path, "stacked", experts=200, rows=1) as files:
        files.evict_all()
        source = files.source(io, 4)
        experts = np.random.default_rng(1).permutation(200)

        def work() -> None:
            with paging(files, source, 4) as pager:
                positions = []
                for group in pager.fetch(LAYERS[0], experts, 3):
                    assert len(group) <= 4
                    files.check(source, LAYERS[0], experts[group])
                    positions += group.tolist()
                assert sorted(positions) == list(range(200))
                assert pager.stats.hits + pager.stats.misses == 200
                assert fetched(pager, LAYERS[0], *experts[-3:]) == [[0, 1, 2]]
                pager.check_integrity()

        in_time(work)


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("seed", range(3))
def test_random_requests(files: ExpertFiles, io: IoMode, seed: int) -> None:
    """Whatever is asked for: all of it comes, with its bytes, and the books agree."""
    random = np.random.default_rng(seed)

    def choice() -> np.ndarray:
        return random.permutation(EXPERTS)[: random.integers(1, EXPERTS + 1)]

    def take(groups: Iterator[np.ndarray], layer: int, experts: np.ndarray) -> None:
        positions = []
        for group in groups:
            files.check(pager.source, layer, experts[group])
            positions += group.tolist()
        assert sorted(positions) == list(range(len(experts)))

    def step() -> None:
        place = int(random.integers(len(LAYERS)))
        layer, experts = LAYERS[place], choice()
        kind = random.choice(["fetch", "fetch", "stream", "prefetch", "warm", "budget", "give up"])
        following = range((place + 1) * EXPERTS, min(place + 2, len(LAYERS)) * EXPERTS)
        if kind == "fetch":
            least = int(random.integers(1, EXPERTS)) if random.random() < 0.5 else None
            take(pager.fetch(layer, experts, least), layer, experts)
        elif kind == "stream":
            upcoming = following if random.random() < 0.7 else ()
            take(pager.stream(layer, experts, upcoming), layer, experts)
        elif kind == "prefetch" and len(following):
            pager.prefetch(following, experts.tolist())
        elif kind == "warm":
            pager.warm(random.permutation(len(LAYERS) * EXPERTS).tolist())
        elif kind == "budget" and io == "mmap":
            pager.policy.budget = int(random.integers(1, 24)) * files.expert_bytes
        elif kind == "give up":
            next(pager.stream(layer, experts, following))
        pager.audit()

    def work() -> None:
        for _ in range(150):
            step()
        for layer in LAYERS:  # one after another: all that was under way before has ended
            take(pager.fetch(layer, ids(*range(EXPERTS))), layer, ids(*range(EXPERTS)))

    budget = int(random.integers(1, 12))
    with paging(files, files.source(io, budget), budget, threads=seed + 1) as pager:
        in_time(work)
    pager.check_integrity()
    if isinstance(pager.source, BufferedExperts):
        pager.source.check_integrity()


def test_what_is_believed_is_what_the_source_was_told(files: ExpertFiles) -> None:
    random = np.random.default_rng(9)
    source = Told(files)
    with paging(files, source, 6) as pager:
        for _ in range(60):
            layer = LAYERS[random.integers(3)]
            experts = random.permutation(EXPERTS)[: random.integers(1, 5)]
            list((pager.fetch if random.random() < 0.7 else pager.stream)(layer, experts))

            def agree() -> bool:
                held = pager.policy.resident_keys()
                return source.inside == {place * EXPERTS + e for place, e in held}

            source.wait_for(agree)
            pager.check_integrity()


# ------------------------------------------------------------------------------ what leaves
def test_evicted_experts_leave_the_page_cache_and_loaded_ones_are_in_it(tmp_path: Path) -> None:
    with expert_files(tmp_path, "packed", EXPERTS, rows=300) as files:
        files.evict_all()
        source = Told(files)
        with paging(files, source, 4) as pager:
            for layer in LAYERS:
                fetched(pager, layer, 0, 3, 6)
            source.wait_for(lambda: len(source.inside) == 4)
            gone = set(source.loads) - source.inside
        assert len(gone) == 5
        assert all(source.resident(number) == 1 for number in source.inside)
        assert all(source.resident(number) < 0.01 for number in gone)


def test_experts_in_use_stay_whatever_the_budget(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 1) as pager:
        for layer in (*LAYERS, *LAYERS):
            for _ in pager.fetch(layer, ids(0, 2, 4, 6)):
                pass
            first = LAYERS.index(layer) * EXPERTS
            source.wait_for(lambda first=first: source.inside == {first + e for e in (0, 2, 4, 6)})


def test_a_request_overtakes_an_eviction(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 2) as pager:
        fetched(pager, 1, 0, 1)
        source.may_evict.clear()
        fetched(pager, 1, 2, 3)  # 0 and 1 are to leave
        assert flat(fetched(pager, 1, 1, 0)) == [0, 1]
        files.check(source, 1, ids(0, 1))
        source.may_evict.set()
        files.check(source, 1, ids(0, 1))
        pager.check_integrity()


def test_an_eviction_that_was_overtaken_gives_no_slot_back_twice(files: ExpertFiles) -> None:
    source = files.source("pread", 2)
    assert isinstance(source, BufferedExperts)
    source.load(3)
    source.load(3)
    source.evict(3)
    source.evict(3)
    source.check_integrity()
    source.close()


def test_what_was_read_ahead_in_vain_does_not_stay(files: ExpertFiles) -> None:
    """The next layer is read before it is known what the router wants of it."""

    def work() -> None:
        with paging(files, files.mapped(), 8) as pager:
            for turn in range(40):
                place = turn % 2
                upcoming = range((place + 1) * EXPERTS, (place + 2) * EXPERTS)
                for _ in pager.stream(LAYERS[place], ids(turn % EXPERTS), upcoming):
                    pass
            fetched(pager, 5, 1, 2)
            assert pager.policy.resident_bytes <= pager.policy.budget

    in_time(work)


def test_a_prompt_that_is_given_up_does_not_hold_up_the_next(files: ExpertFiles) -> None:
    def work() -> None:
        with paging(files, files.mapped(), 8) as pager:
            next(pager.stream(5, ids(*range(8))))
            for layer in LAYERS[:2]:
                groups = pager.stream(layer, ids(*range(8)))
                assert sorted(flat(groups)) == list(range(8))

    in_time(work)


def test_a_prompt_waits_for_what_is_on_its_way_already(files: ExpertFiles) -> None:
    """An expert that arrives for another reason must not be evicted before it is computed."""
    source = Told(files)

    def release() -> None:
        source.wait_for(lambda: 0 in source.announced)
        source.may_load.set()

    def work() -> None:
        with paging(files, source, 4, threads=1) as pager:
            source.may_load.clear()
            pager.warm([7])
            source.wait_for(lambda: source.loads == [7])
            groups = pager.stream(1, ids(*range(8)))
            helper = threading.Thread(target=release)
            helper.start()
            assert sorted(flat(groups)) == list(range(8))
            helper.join()

    in_time(work)


# ------------------------------------------------------------------------------ reading early
def test_prefetches_are_dropped_while_something_is_waited_for(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 24, threads=1) as pager:
        source.may_load.clear()
        waiting = threading.Thread(target=fetched, args=(pager, 1, 0, 1))
        waiting.start()
        source.wait_for(lambda: source.loads == [0])
        pager.prefetch(range(8, 16), [4, 5])
        source.may_load.set()
        waiting.join()
        fetched(pager, 5, 0)
    assert source.loads == [0, 1, 16]
    assert pager.stats.prefetched == 0


def test_demand_overtakes_prefetches(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 24, threads=1) as pager:
        fetched(pager, 2, 1)
        pager.doubts = True  # hits are announced too
        source.may_load.clear()
        pager.prefetch(range(8, 16), [4, 5, 6])
        source.wait_for(lambda: source.loads == [9, 12])
        waiting = threading.Thread(target=fetched, args=(pager, 2, 0, 6, 1))
        waiting.start()
        source.wait_for(lambda: source.announced.count(9) == 2)  # a hit, after all misses
        source.may_load.set()
        waiting.join()
        source.wait_for(lambda: len(source.inside) == 5)
    assert source.loads == [9, 12, 8, 14, 13]
    assert pager.stats.prefetched == 3
    assert pager.stats.prefetch_hits == 1


def test_warming_reads_in_order_until_memory_is_full(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 5, threads=1) as pager:
        fetched(pager, 2, 3)
        pager.warm([9, 11, 20, 2, 17, 4, 5, 6])
        source.wait_for(lambda: len(source.inside) == 5)
        fetched(pager, 2, 3)
        pager.check_integrity()
    assert source.loads == [11, 9, 20, 2, 17]
    assert pager.stats.evicted == 0


# ------------------------------------------------------------------------------ what is believed
def test_audit_notices_what_was_evicted_behind_its_back(files: ExpertFiles) -> None:
    with paging(files, files.mapped(), 24) as pager:
        for layer in LAYERS:
            fetched(pager, layer, *range(EXPERTS))
        pager.audit()
        assert pager.stats.lost == 0
        files.evict_all()
        while pager.stats.lost < 24:  # a sample each time
            before = pager.stats.lost
            pager.audit()
            assert pager.stats.lost > before
        assert pager.policy.resident_bytes == 0
        pager.check_integrity()
        assert pager.doubts
        pager.take_stats()
        fetched(pager, 2, 1, 2)
        assert pager.stats.misses == 2
        assert pager.source.resident(EXPERTS + 1) == 1


def test_hits_that_the_system_has_evicted_are_read_again(files: ExpertFiles) -> None:
    """The book is not trusted: a hit is announced, and right even before that has an effect."""
    with paging(files, files.mapped(), 24) as pager:
        fetched(pager, 1, *range(EXPERTS))
        files.evict_all()
        assert fetched(pager, 1, *range(EXPERTS)) == [list(range(EXPERTS))]
        files.check(pager.source, 1, ids(*range(EXPERTS)))


# ------------------------------------------------------------------------------ ends and errors
def colibri_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("colibri-_")]


def test_close_ends_all_threads_even_with_work_left(files: ExpertFiles) -> None:
    source = Told(files)
    with paging(files, source, 4, threads=3) as pager:
        assert len(colibri_threads()) == 5
        source.may_load.clear()
        pager.prefetch(range(8, 16), list(range(8)))
        source.wait_for(lambda: len(source.loads) == 3)
        source.may_load.set()
    assert colibri_threads() == []
    assert len(source.loads) < 8


@pytest.mark.parametrize("io", IO)
@pytest.mark.parametrize("way", ["fetch", "stream"])
def test_experts_that_cannot_be_read(files: ExpertFiles, io: IoMode, way: str) -> None:
    """The error names them; others are unharmed, and they too once the file is healthy again."""
    shard = LAYERS.index(5) % 2
    path, content = files.files[shard].path, files.contents[shard]
    cut = int(files.layers[5].parts["down"].offsets[4])  # experts from 4 on end after this

    def work() -> None:
        os.truncate(path, cut)
        ask = getattr(pager, way)
        for experts, failing in (((1, 6, 2), 6), ((7,), 7), ((0, 4, 5, 3), 4)):
            message = re.escape(f"{path}: layer 5, expert {failing} cannot be read (the ")
            with pytest.raises(ModelReadError, match=message + "[^\n]*"):
                list(ask(5, ids(*experts)))
        for layer, experts in ((5, (2, 0, 3)), (2, (4, 6)), (1, (7,))):
            assert sorted(flat(ask(layer, ids(*experts)))) == list(range(len(experts)))
            files.check(pager.source, layer, ids(*experts))
        write(path, content)
        for layer in LAYERS:
            list(ask(layer, ids(*range(EXPERTS))))
            files.check(pager.source, layer, ids(*range(EXPERTS)))

    source = files.source(io, 24)
    with paging(files, source, 24) as pager:
        in_time(work)
        pager.check_integrity()
    if isinstance(source, BufferedExperts):
        source.check_integrity()


def test_a_prompt_after_one_that_failed(files: ExpertFiles) -> None:
    """What was read in advance of the failure does not hold up the next prompt."""
    shard = LAYERS.index(5) % 2
    path, content = files.files[shard].path, files.contents[shard]

    def work() -> None:
        with paging(files, files.mapped(), 8) as pager:
            for _ in range(3):
                os.truncate(path, int(files.layers[5].parts["down"].offsets[3]))
                with pytest.raises(ModelReadError, match="layer 5, expert 3"):
                    list(pager.stream(5, ids(*range(EXPERTS))))
                write(path, content)
                for layer in LAYERS:
                    assert sum(map(len, pager.stream(layer, ids(*range(EXPERTS))))) == EXPERTS

    in_time(work)


def test_errors_of_prefetches_are_not_raised_and_not_kept(files: ExpertFiles) -> None:
    path, content = files.files[0].path, files.contents[0]
    source = Told(files)
    with paging(files, source, 24) as pager:
        os.truncate(path, 0)
        pager.prefetch(range(16, 24), [2, 3])
        fetched(pager, 2, 0)
        source.wait_for(lambda: not pager.policy.resident((2, 2)))
        write(path, content)
        assert flat(fetched(pager, 5, 2, 3)) == [0, 1]
        files.check(source, 5, ids(2, 3))
