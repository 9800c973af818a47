"""The disk probe: reads lie in the file and cover experts, and are really made."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from colibri_mmap.errors import ResourceError
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.diskspeed import DiskProbe
from colibri_mmap.runtime.pages import PAGE, io_counters


def test_random_reads_are_whole_experts(mixtral: Path) -> None:
    gguf = open_gguf(mixtral)
    extents = {
        (extent.shard, extent.offset // PAGE, -(-(extent.offset + extent.nbytes) // PAGE))
        for layer in expert_layers(gguf).values()
        for expert in range(layer.n_experts)
        for extent in layer.extents(expert)
    }
    reads = DiskProbe(gguf).random_reads(100)
    assert len(reads) >= 100
    for shard, offset, nbytes in reads:
        assert offset % PAGE == nbytes % PAGE == 0
        assert (shard, offset // PAGE, (offset + nbytes) // PAGE) in extents


def test_a_dense_model_is_read_in_pieces(dense: Path) -> None:
    gguf = open_gguf(dense)
    probe = DiskProbe(gguf)
    assert set(probe.random_reads(10)) <= set(probe.sequential_reads())


def test_bytes_come_from_the_disk_and_stop_in_time(mixtral: Path) -> None:
    probe = DiskProbe(open_gguf(mixtral))
    reads = probe.random_reads(1000)
    before, started = io_counters(), time.perf_counter()
    assert probe.speed(reads, 4, 10.0, 200_000) > 0
    assert (io_counters() - before).bytes_read >= 200_000
    speed = probe.speed(reads * 10_000, 1, 0.1, 1 << 60)
    assert speed > 0
    assert time.perf_counter() - started < 30  # not the minutes that all of it would take


def test_a_file_that_is_gone_is_named(mixtral: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    copy.write_bytes(mixtral.read_bytes())
    probe = DiskProbe(open_gguf(copy))
    copy.unlink()
    with pytest.raises(ResourceError, match=r"copy\.gguf"):
        probe.speed(probe.sequential_reads(), 1, 1.0, 1 << 20)
