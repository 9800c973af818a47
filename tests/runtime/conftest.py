"""What the tests of the runtime measure is printed at the end of the run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

MEASURED = pytest.StashKey[dict[str, list[str]]]()


@pytest.fixture
def measured(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Adds a line under a heading to the summary of the run."""
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
