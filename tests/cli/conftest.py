"""Running the command to its end."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from program import COMMAND, Colibri, environment


@pytest.fixture
def colibri(tmp_path: Path) -> Colibri:
    """Run the command in `tmp_path`; `text` is its standard input."""

    def run(
        *arguments: str | Path, text: bytes = b"", **variables: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*COMMAND, *map(str, arguments)],
            input=text,
            capture_output=True,
            env={**environment(tmp_path / "state"), **variables},
            cwd=tmp_path,
            timeout=120,
        )

    return run
