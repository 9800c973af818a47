"""Machine code is kept between runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from colibri_mmap.runtime.cubins import kept_code


def test_code_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made: list[bytes] = []

    def make() -> bytes:
        made.append(b"code %d" % len(made))
        return made[-1]

    assert [kept_code(key, make) for key in "aabba"] == [
        *[b"code 0"] * 2,
        *[b"code 1"] * 2,
        b"code 0",
    ]
    for file in tmp_path.rglob("*.cubin"):
        file.write_bytes(file.read_bytes()[:-1])
    assert kept_code("a", make) == b"code 2"
    assert kept_code("a", make) == b"code 2"


def test_without_a_place_it_is_made_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_code("a", lambda: b"first") == b"first"
    assert kept_code("a", lambda: b"second") == b"second"
