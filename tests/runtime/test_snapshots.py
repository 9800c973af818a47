"""Parts of caches: checkpoints to cut to, copies, and the bytes that make a sequence."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from toycache import IDS, PLAIN, RECURRENT, WINDOWED, Toy

from colibri_mmap.runtime.kv import KVShape, LayerShape, RecurrentShape
from colibri_mmap.runtime.scheduler import Sequence
from colibri_mmap.runtime.snapshots import Checkpoint, gather, scatter, without_the_closest

NARROW = (KVShape(2, 16, 16, 24), RecurrentShape(5))

all_shapes = pytest.mark.parametrize(
    "shapes", [PLAIN, WINDOWED, RECURRENT, NARROW], ids=["plain", "windows", "states", "narrow"]
)


def test_the_toy_notices_a_wrong_token() -> None:
    toy = Toy(WINDOWED)
    sequence = toy.sequence()
    toy.extend(sequence, IDS[:50])
    toy.check(sequence)
    sequence.ids[20] += 1
    with pytest.raises(AssertionError):
        toy.check(sequence)


@all_shapes
@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("length", [1, 15, 16, 577, 1601])
def test_span_and_edge_make_a_sequence_in_any_context(
    shapes: tuple[LayerShape, ...], kv_type: str, length: int
) -> None:
    """The bytes of a cache with one context, in a cache with another: rings have other sizes."""
    source = Toy(shapes, kv_type, context=1700)
    sequence = source.sequence()
    source.extend(sequence, IDS[:length], step=300)
    cache = sequence.cache
    parts = [
        (start, gather(cache.span(start, min(start + 512, length))))
        for start in range(0, length, 512)
    ]
    edge = cache.edge(length)
    assert edge.size == cache.edge_bytes(length)
    for context in (1700, 4000):
        target = Toy(shapes, kv_type, context=context)
        restored = target.sequence()
        for start, data in parts:
            scatter(data, restored.cache.span(start, min(start + 512, length)))
        restored.cache.restore(length, edge)
        restored.ids.extend(IDS[:length])
        target.check(restored)
        target.extend(restored, IDS[length : length + 90], step=45)
        target.check(restored)


@all_shapes
def test_a_copy_is_independent(shapes: tuple[LayerShape, ...]) -> None:
    toy = Toy(shapes)
    first, second = toy.sequence(), toy.sequence()
    toy.extend(first, IDS[:1000])
    second.cache.copy(first.cache, 1000)
    second.ids.extend(first.ids)
    toy.extend(first, IDS[1000:1700])
    toy.check(second)
    toy.extend(second, IDS[2000:2600])
    toy.check(first)
    toy.check(second)


@all_shapes
def test_a_sequence_is_cut_to_a_checkpoint(shapes: tuple[LayerShape, ...]) -> None:
    toy = Toy(shapes)
    sequence = toy.sequence()
    for end in (512, 1024, 1536, 2048):
        toy.extend(sequence, IDS[end - 512 : end])
        sequence.cache.checkpoint(end)
    toy.extend(sequence, IDS[2048:2900], step=400)
    for length, left in ((2900, 2900), (2047, 1536), (1024, 1024), (700, 512), (20, 0)):
        sequence.rewind(length)
        assert len(sequence.ids) == (length if sequence.cache.cuttable else left)
        toy.check(sequence)
    toy.extend(sequence, IDS[:400])
    toy.check(sequence)


def test_checkpoints_of_tokens_that_were_given_up_are_gone() -> None:
    toy = Toy(RECURRENT)
    sequence = toy.sequence()
    for end in (10, 20, 30):
        toy.extend(sequence, IDS[end - 10 : end])
        sequence.cache.checkpoint(end)
    sequence.rewind(12)
    assert len(sequence.ids) == 10
    toy.extend(sequence, IDS[500:530])
    sequence.rewind(25)
    assert len(sequence.ids) == 10
    toy.check(sequence)


def test_a_cache_where_everything_is_kept_has_no_checkpoints() -> None:
    toy = Toy(PLAIN)
    sequence = toy.sequence()
    toy.extend(sequence, IDS[:100])
    sequence.cache.checkpoint(100)
    assert sequence.cache.cuttable
    assert sequence.cache.checkpoints == []


@all_shapes
def test_the_memory_of_a_cache(shapes: tuple[LayerShape, ...]) -> None:
    """What is said to be held is what the process has taken."""
    toy = Toy(shapes, context=400_000)
    sequence = toy.sequence()
    before = _anonymous_bytes(sequence)
    toy.extend(sequence, IDS[:2000])
    taken = _anonymous_bytes(sequence) - before
    regions = sum(2 * s.heads for s in shapes if isinstance(s, KVShape)) + 2
    assert taken <= sequence.cache.nbytes + regions * 4096
    assert sequence.cache.nbytes <= taken + regions * 4096
    sequence.rewind(0)
    toy.extend(sequence, IDS[:10])
    assert sequence.cache.nbytes > taken / 2


def _anonymous_bytes(sequence: Sequence) -> int:
    """Resident bytes of the mappings that hold the cache, by /proc/self/smaps."""
    cache = sequence.cache
    places = [place.keys for place in cache.layers.values()]
    total, inside = 0, False
    with Path("/proc/self/smaps").open() as lines:
        for line in lines:
            first = line.split()[0]
            if "-" in first and not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                inside = any(low <= place < high for place in places)
            elif inside and first == "Rss:":
                total += 1024 * int(line.split()[1])
    return total


def test_checkpoints_are_thinned_evenly_and_the_latest_stay() -> None:
    kept = [Checkpoint(length, np.empty(0, np.uint8)) for length in range(512, 16 * 512 + 1, 512)]
    kept += [Checkpoint(length, np.empty(0, np.uint8)) for length in (8200, 8300, 8310)]
    while len(kept) > 8:
        kept = without_the_closest(kept, 4)
    lengths = [checkpoint.length for checkpoint in kept]
    assert lengths[-4:] == [8192, 8200, 8300, 8310]
    gaps = np.diff([0, *lengths[:5]])
    assert gaps.max() <= 2 * gaps.min()
    assert len(without_the_closest(kept[:1], 4)) == 0
