"""Small models, a pool to run kernels on, and a place for what tests measure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shim import Shim
from storeuse import Stores
from toycache import PLAIN, Toy

from colibri_mmap.runtime.device import DeviceBackend, probe
from colibri_mmap.runtime.kv import LayerShape
from colibri_mmap.runtime.pool import Launch, Pool, job
from colibri_mmap.runtime.task import Task

MEASURED = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture(scope="session")
def run() -> Iterator[Callable[..., None]]:
    """Runs `units` of a task with its argument words, `chunk` at a time on two threads."""
    pool = Pool(2)

    def run(task: Task, units: int, *arguments: int, chunk: int = 1) -> None:
        pool.run(Launch([[job(task, units, chunk, *arguments)]]))

    yield run
    pool.close()


@pytest.fixture(scope="session")
def shim(pytestconfig: pytest.Config) -> Shim:
    """Runs the CUDA kernels on host addresses; what was built is kept between sessions."""
    cache = pytestconfig.cache
    assert cache is not None
    return Shim(cache.mkdir("shim"))


@pytest.fixture(scope="session")
def gpu() -> DeviceBackend:
    """The GPU that is there."""
    found = probe({"COLIBRI_DEVICE": "cuda"})
    if isinstance(found, str):
        pytest.skip(found)
    return found


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Adds a line under a heading, printed at the end of the run."""
    lines = request.config.stash.setdefault(MEASURED, {})
    return lambda heading, line: lines.setdefault(heading, []).append(line)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    for heading, lines in config.stash.get(MEASURED, {}).items():
        terminalreporter.section(heading)
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def dense(mini: Path) -> Path:
    """A small llama model with a byte-level tokenizer."""
    return mini / "llama-dense" / "llama-dense.F16.gguf"


@pytest.fixture
def mixtral(mini: Path) -> Path:
    """A small Mixture-of-Experts llama model with a SentencePiece tokenizer."""
    return mini / "mixtral" / "mixtral.Q4_0.gguf"


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Callable[..., Stores]]:
    """Makes prefix stores of a model with such layers, with or without a directory."""
    made: list[Stores] = []

    def make(
        shapes: tuple[LayerShape, ...] = PLAIN, *, disk: bool = True, limit: int = 0
    ) -> Stores:
        made.append(Stores(Toy(shapes, limit=limit), tmp_path / "kept" if disk else None))
        return made[-1]

    yield make
    for some in made:
        for store in some.opened:
            store.close()
