"""Where test models are: small ones in tests/data, larger ones beside the repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA = Path(__file__).parent / "data"
SHARED_FIXTURES = Path(__file__).parents[2] / "shared" / "fixtures"


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the program learns in tests is kept apart from what it learned of a person."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    if before is None:
        del os.environ["XDG_STATE_HOME"]
    else:
        os.environ["XDG_STATE_HOME"] = before


@pytest.fixture(scope="session")
def data() -> Path:
    """The directory of committed test data."""
    return DATA


@pytest.fixture(scope="session")
def mini() -> Path:
    """One small model per family; index.json describes them."""
    return DATA / "mini"


@pytest.fixture(scope="session")
def shared_fixtures() -> Path:
    """The larger reference models, which are not part of the repository."""
    if not SHARED_FIXTURES.is_dir():
        pytest.skip(f"the reference models are not in {SHARED_FIXTURES}")
    return SHARED_FIXTURES
