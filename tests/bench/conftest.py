"""The benchmarks are programs, not a package: their directory goes on the path."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))


@pytest.fixture(scope="session")
def bench() -> Path:
    """The directory of the benchmarks."""
    return BENCH
