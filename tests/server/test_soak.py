"""A busy server: replies are right, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from serverprocess import ServerProcess
from soak import Report, soak


@pytest.fixture
def server(qwen: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    arguments = ["-m", str(qwen), "--threads", "2", "--cache-ram", "4M"]
    with ServerProcess(tmp_path, *arguments) as server:
        server.wait_for("is open")
        yield server


def check(report: Report) -> None:
    assert report.wrong == []
    assert report.outcomes["answered"] > 0
    assert report.outcomes["left"] > 0
    before, after = report.idle_before, report.idle_after
    assert before is not None
    assert after is not None
    # Threads that prepare prompts are made as needed, up to a fixed number.
    assert after.threads <= before.threads + min(32, (os.cpu_count() or 1) + 4)


def test_many_clients_for_a_moment(server: ServerProcess) -> None:
    check(soak(server, seconds=2, clients=16))


@pytest.mark.slow
def test_many_clients_for_two_minutes(server: ServerProcess) -> None:
    report = soak(server, seconds=120, clients=50)
    check(report)
    assert report.growth < 1.05
    assert report.slowest < 60
