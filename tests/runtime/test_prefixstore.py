"""The store gives back what was computed: the right tokens, the right bytes, within its bounds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from storeuse import PLENTY, Stores
from toycache import IDS, KINDS, LIMIT, OTHER, PLAIN, RECURRENT, WINDOWED, Toy

from colibri_mmap.runtime.kv import LayerShape
from colibri_mmap.runtime.prefixstore import PrefixStore
from colibri_mmap.runtime.scheduler import Sequence

kinds = pytest.mark.parametrize("kind", KINDS)


# ------------------------------------------------------------------------------ in memory
@kinds
def test_a_conversation_is_not_read_again(stores: Callable[..., Stores], kind: str) -> None:
    some = stores(KINDS[kind], disk=False)
    store = some.open()
    assert some.serve(store, IDS[:700], reply=5) == 0
    assert some.serve(store, IDS[:700] + IDS[:5] + OTHER[:50]) == 705
    assert store.status().tokens_from_ram == 705
    assert store.status().idle_sequences == 1


@kinds
def test_the_same_prompt_again(stores: Callable[..., Stores], kind: str) -> None:
    """All but the last token is known; what needs a checkpoint has one at the end of a part."""
    some = stores(KINDS[kind], disk=False)
    store = some.open()
    some.serve(store, IDS[:900], reply=3)
    assert some.serve(store, IDS[:900]) == (512 if kind == "states" else 899)
    assert some.serve(store, IDS[:901]) == 900


@kinds
def test_a_shared_system_prompt_stays_useful(stores: Callable[..., Stores], kind: str) -> None:
    some = stores(KINDS[kind], disk=False)
    store = some.open()
    system = IDS[:1024]
    known = [some.serve(store, system + OTHER[n : n + 200]) for n in (0, 200, 400)]
    assert known == [0, 1024, 1024]
    assert some.serve(store, system + OTHER[:200] + [1]) == 1224
    assert some.serve(store, system + OTHER[200:400] + [1]) == 1224


def test_a_sequence_is_moved_if_nothing_much_is_lost(stores: Callable[..., Stores]) -> None:
    some = stores(disk=False)
    store = some.open()
    sequence = store.take(IDS[:800])
    some.toy.extend(sequence, IDS[:800])
    store.give(sequence)
    assert store.take(IDS[:800]) is sequence
    store.give(sequence)
    other = store.take(IDS[:300])
    assert other is not sequence
    assert len(other.ids) == 299
    assert store.status().idle_sequences == 1


def test_what_a_longer_sequence_knows_is_not_kept_twice(stores: Callable[..., Stores]) -> None:
    some = stores(RECURRENT, disk=False)
    store = some.open()
    first, second = store.take(IDS[:600]), store.take(IDS[:1200])
    some.read(store, first, IDS[:600])
    some.read(store, second, IDS[:1200])
    store.give(first)
    store.give(second)
    assert store.status().idle_sequences == 1
    assert some.serve(store, IDS[:600] + OTHER[:5]) == 600


def test_memory_is_bounded_and_the_latest_stays(stores: Callable[..., Stores]) -> None:
    some = stores(disk=False)
    store = some.open()
    some.serve(store, [1, *IDS[:800]])
    one = store.status().ram_bytes
    store = some.open(ram_bytes=3 * one)
    for first in range(5):
        some.serve(store, [first, *IDS[:800]])
        assert store.status().ram_bytes <= 3 * one
    assert store.status().idle_sequences == 3
    assert some.serve(store, [2, *IDS[:801]]) == 801
    assert some.serve(store, [1, *IDS[:801]]) == 0
    nothing = some.open(ram_bytes=0)
    some.serve(nothing, IDS[:800])
    assert nothing.status().idle_sequences == 0


def test_checkpoints_are_bounded(stores: Callable[..., Stores]) -> None:
    some = stores(RECURRENT, disk=False)
    store = some.open()
    sequence = store.take(IDS)
    for token in IDS[:100]:
        some.toy.extend(sequence, [token])
        store.checkpoint(sequence)
    assert len(sequence.cache.checkpoints) == 16
    edge = sequence.cache.checkpoints[0].edge.nbytes
    store = some.open(ram_bytes=10 * edge)
    store.checkpoint(sequence)
    assert len(sequence.cache.checkpoints) == 5
    some.open(ram_bytes=0).checkpoint(sequence)
    assert len(sequence.cache.checkpoints) == 4


class Elsewhere:
    """Another memory, whose content is not that of the host until it is asked for."""

    def __init__(self, sequence: Sequence) -> None:
        self.views = sequence.cache.span(0, len(sequence.ids))
        self.content = [view.copy() for view in self.views]
        for view in self.views:
            view[:] = 0

    def to_host(self, length: int) -> None:
        for view, content in zip(self.views, self.content, strict=True):
            view[:] = content

    def to_device(self, length: int) -> None:
        raise AssertionError("nothing is restored here")


def test_what_lies_elsewhere_is_brought_back(stores: Callable[..., Stores]) -> None:
    some = stores()
    store = some.open()
    sequence = store.take(IDS[:700])
    some.toy.extend(sequence, IDS[:700])
    sequence.cache.mirrors.append(Elsewhere(sequence))
    store.give(sequence)
    assert sequence.cache.mirrors == []
    assert some.serve(store, IDS[:701]) == 700
    store.close()
    assert some.serve(some.open(), IDS[:702]) == 701


def test_short_and_long_sequences_do_not_mix(stores: Callable[..., Stores]) -> None:
    """Where a model computes long sequences otherwise, from their first token on."""
    some = stores(limit=LIMIT)
    store = some.open()
    some.serve(store, IDS[:800])
    some.serve(store, IDS[: LIMIT + 100])
    assert some.serve(store, IDS[:801]) == 800
    assert some.serve(store, IDS[: LIMIT + 1]) == LIMIT
    assert some.serve(store, IDS[:LIMIT]) == 801
    store.close()
    assert some.serve(some.open(), IDS[:LIMIT]) == LIMIT - 1
    assert some.serve(some.open(), IDS[: LIMIT + 50]) == LIMIT + 49


# ------------------------------------------------------------------------------ on disk
@kinds
@pytest.mark.parametrize("length", [1, 300, 512, 1000, 2048])
def test_another_process_goes_on(stores: Callable[..., Stores], kind: str, length: int) -> None:
    some = stores(KINDS[kind])
    store = some.open()
    some.serve(store, IDS[:length], reply=7)
    store.close()
    store = some.open()
    assert some.serve(store, IDS[:length] + IDS[:7] + OTHER[:30]) == length + 7
    assert store.status().tokens_from_disk == length + 7
    assert some.notices == []


@kinds
def test_from_disk_to_a_shared_beginning(stores: Callable[..., Stores], kind: str) -> None:
    some = stores(KINDS[kind])
    store = some.open()
    some.serve(store, IDS[:1300])
    store.close()
    common = 1100 if kind == "plain" else 1024
    assert some.serve(some.open(), IDS[:1100] + OTHER[:300]) == common


def test_what_a_conversation_adds_is_all_that_is_written(stores: Callable[..., Stores]) -> None:
    some = stores()
    for length in (700, 1100, 1110, 2000):
        store = some.open()
        some.serve(store, IDS[:length])
        store.close()
        assert some.directory is not None
        names = [path.name for path in some.directory.rglob("*.kvpart")]
        assert sorted(int(name.split("-")[1]) for name in names) == [
            *range(512, length, 512),
            length,
        ]


def test_disk_space_is_bounded_and_the_oldest_goes_first(stores: Callable[..., Stores]) -> None:
    some = stores()
    store = some.open()
    some.serve(store, [0, *IDS[:1500]])
    store.close()
    one = store.status().disk_bytes
    assert one > 0
    for first in (1, 2, 3):
        store = some.open(disk_bytes=int(2.5 * one))
        some.serve(store, [first, *IDS[:1500]])
        store.close()
        assert store.status().disk_bytes <= 2.5 * one
    store = some.open(disk_bytes=int(2.5 * one))
    sequence = store.take([1, *IDS[:1500]])
    assert len(sequence.ids) in (512, 1024)  # its end was forgotten first
    assert [len(store.take([n, *IDS[:1502]]).ids) for n in (0, 2, 3)] == [0, 1501, 1501]


def test_a_conversation_larger_than_the_disk_keeps_its_beginning(
    stores: Callable[..., Stores],
) -> None:
    some = stores()
    store = some.open()
    some.serve(store, IDS[:512])
    store.close()
    block = store.status().disk_bytes
    store = some.open(disk_bytes=2 * block)
    some.serve(store, IDS[:2000])
    store.close()
    assert store.status().disk_bytes <= 2 * block
    assert some.serve(some.open(disk_bytes=2 * block), IDS[:2000]) == 1024


def test_memory_does_not_grow_because_of_the_disk(stores: Callable[..., Stores]) -> None:
    some = stores()
    store = some.open(ram_bytes=0)
    some.serve(store, IDS[:900])
    store.close()
    assert some.serve(some.open(), IDS[:901]) == 900


def test_what_was_read_can_be_come_back_to(stores: Callable[..., Stores]) -> None:
    some = stores(RECURRENT)
    store = some.open()
    some.serve(store, IDS[:1000])
    store.close()
    store = some.open()
    assert some.serve(store, IDS[:1000] + OTHER[:50], reply=3) == 1000
    assert some.serve(store, IDS[:1000] + OTHER[50:90]) == 1000
    assert store.status().tokens_from_ram == 1000


def test_sequences_that_are_taken_while_they_are_written(stores: Callable[..., Stores]) -> None:
    """What is written belongs to the tokens, though others take their place at that moment."""
    some = stores()
    store = some.open(ram_bytes=1)
    for first in range(8):
        before = store.status().disk_files
        some.serve(store, [first, *IDS[:2500]])
        while store.status().disk_files == before:
            pass  # the writer has begun
        sequence = store.take([first, *OTHER[:2500]])
        some.read(store, sequence, [first, *OTHER[:2500]])
        store.give(sequence)
    store.close()
    store = some.open()
    for first in range(8):
        for ids in (IDS, OTHER):
            some.toy.check(store.take([first, *ids[:2501]]))


# ------------------------------------------------------------------------------ any use
class AnyUse(RuleBasedStateMachine):
    """Requests in any order, several at a time, through restarts: checked against the tokens."""

    shapes: tuple[LayerShape, ...] = PLAIN

    @initialize(
        ram=st.sampled_from([0, 200_000, 1_000_000, PLENTY]),
        disk=st.sampled_from([None, 300_000, PLENTY]),
    )
    def begin(self, ram: int, disk: int | None) -> None:
        self.toy = Toy(self.shapes, context=2048, limit=LIMIT)
        self.ram, self.disk = ram, disk
        self.folder = tempfile.TemporaryDirectory()
        self.used: list[Sequence] = []
        self.said: list[list[int]] = [IDS[:600]]
        self.best: dict[int, int] = {}
        self.notices: list[str] = []
        self.open()

    def open(self) -> None:
        directory = Path(self.folder.name) if self.disk else None
        self.store = PrefixStore(
            self.toy.sequence,
            "toy",
            ram_bytes=self.ram,
            directory=directory,
            disk_bytes=self.disk or 0,
            length_limit=self.toy.limit,
            notify=self.notices.append,
        )

    @precondition(lambda self: len(self.used) < 3)
    @rule(data=st.data(), more=st.integers(1, 700), salt=st.integers(0, 2))
    def take(self, data: st.DataObject, more: int, salt: int) -> None:
        """A prompt that begins like something that was said."""
        before = data.draw(st.sampled_from(self.said))
        cut = data.draw(st.integers(0, len(before)))
        ids = ([*before[:cut], salt, *OTHER[:more]])[:1990]
        known = self.store.take(ids)
        assert known.ids == ids[: len(known.ids)]
        assert len(known.ids) < len(ids)
        self.toy.check(known)
        while len(known.ids) < len(ids):
            self.toy.extend(known, ids[len(known.ids) :][:512])
            self.store.checkpoint(known)
        self.used.append(known)

    @precondition(lambda self: self.used)
    @rule(which=st.integers(0, 2), reply=st.integers(0, 40), keep=st.booleans())
    def finish(self, which: int, reply: int, keep: bool) -> None:
        sequence = self.used.pop(which % len(self.used))
        self.toy.extend(sequence, IDS[:reply], step=1)
        self.toy.check(sequence)
        if keep:
            self.said = [*self.said[-5:], sequence.ids.copy()]
            self.store.give(sequence)

    @rule()
    def restart(self) -> None:
        self.store.close()
        self.used.clear()
        self.open()

    @invariant()
    def bounds(self) -> None:
        status = self.store.status()
        if self.disk is None:
            assert status.ram_bytes <= self.ram
        assert status.disk_bytes <= (self.disk or 0)
        assert self.notices == []

    def teardown(self) -> None:
        self.store.close()
        self.folder.cleanup()


class AnyUseOfWindows(AnyUse):
    shapes = WINDOWED


class AnyUseOfStates(AnyUse):
    shapes = RECURRENT


for machine in (AnyUse, AnyUseOfWindows, AnyUseOfStates):
    machine.TestCase.settings = settings(
        max_examples=15,
        stateful_step_count=15,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
TestAnyUse = AnyUse.TestCase
TestAnyUseOfWindows = AnyUseOfWindows.TestCase
TestAnyUseOfStates = AnyUseOfStates.TestCase
