"""`cache` in a real process, with directories of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from program import Colibri

from colibri_mmap.demo.model import PACKED_NAME

Cache = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """Directories with a file of each kind, and the one beside them that must stay."""
    state, kernels = tmp_path / "state" / "colibri-mmap", tmp_path / "cache" / "colibri-mmap"
    found = {name: state / name for name in ("usage", "profiles", "sessions")}
    found["kernels"] = kernels / "kernels"
    for directory in (*found.values(), kernels / "models"):
        (directory / "below").mkdir(parents=True)
        (directory / "below" / "file").write_bytes(bytes(1500))
    found["demo"] = kernels
    (kernels / PACKED_NAME).write_bytes(bytes(1500))
    return found


@pytest.fixture
def cache(colibri: Colibri, tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs `cache` with arguments: status and lines of its output."""

    def run(*arguments: str) -> tuple[int, list[str]]:
        done = colibri("cache", *arguments, XDG_CACHE_HOME=str(tmp_path / "cache"))
        return done.returncode, done.stdout.decode().splitlines()

    return run


def test_shows_what_is_kept_and_where(
    cache: Cache, colibri: Colibri, places: dict[str, Path]
) -> None:
    status, lines = cache()
    assert status == 0
    assert b"`colibri-mmap list`" in colibri("cache").stderr
    assert {line.split()[0] for line in lines} == set(places)
    for line in lines:
        assert "1.5 kB" in line
        assert str(places[line.split()[0]]) in line


def test_clear_spares_sessions_and_other_files(
    cache: Cache, places: dict[str, Path], tmp_path: Path
) -> None:
    status, lines = cache("clear")
    assert status == 0
    expected = [f"{name}: 1.5 kB freed" for name in ("demo", "kernels", "profiles", "usage")]
    assert sorted(lines) == expected
    assert [name for name, place in places.items() if place.exists()] == ["sessions", "demo"]
    assert not (places["demo"] / PACKED_NAME).exists()
    assert (tmp_path / "cache/colibri-mmap/models/below/file").exists()


def test_clear_of_one_kind(cache: Cache, places: dict[str, Path]) -> None:
    assert cache("clear", "sessions") == (0, ["sessions: 1.5 kB freed"])
    assert cache("clear", "sessions") == (0, ["sessions: 0 bytes freed"])
    assert not places["sessions"].exists()
    assert places["usage"].exists()


def test_an_unknown_kind_deletes_nothing(cache: Cache, places: dict[str, Path]) -> None:
    assert cache("clear", "everything")[0] == 2
    assert all(place.exists() for place in places.values())
