"""doctor: what it looks at, and that it changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import Colibri

MACHINE = ["processor", "kernels", "memory", "swap", "system", "GPU"]
PLACE = ["fit", "locking", "file system", "read-ahead", "disk", "tuning"]


def findings(colibri: Colibri, *arguments: str | Path) -> dict[str, dict[str, str]]:
    done = colibri("doctor", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    for finding in found.values():
        assert finding["text"]
        assert bool(finding["advice"]) == (finding["state"] == "warn")
    return found


def test_the_machine(colibri: Colibri, tmp_path: Path) -> None:
    assert list(findings(colibri)) == MACHINE
    assert not (tmp_path / "state").exists()


def test_the_place_of_a_model(colibri: Colibri, mini: Path) -> None:
    model = mini / "mixtral" / "mixtral.Q8_0.gguf"
    found = findings(colibri, "-m", model)
    assert [name for name in found if name != "drive"] == MACHINE + PLACE
    assert "100% of the experts fit" in found["fit"]["text"]
    assert "not tuned yet" in found["tuning"]["text"]
    assert " kB are used by every token" in found["locking"]["text"]
    assert not any(" 0 MB" in finding["text"] for finding in found.values())


def test_compiled_kernels_are_recognised(colibri: Colibri, mini: Path, tmp_path: Path) -> None:
    model = mini / "mixtral" / "mixtral.Q8_0.gguf"
    assert colibri("warmup", "-m", model).returncode == 0
    assert findings(colibri, "-m", model)["kernels"]["state"] == "ok"
    empty = str(tmp_path / "empty")
    done = colibri("doctor", "-m", model, XDG_CACHE_HOME=empty)
    assert done.returncode == 0
    assert "not compiled yet" in done.stdout.decode()
    assert "colibri-mmap warmup" in done.stdout.decode()
    compiled = {file.name.partition(".")[0] for file in Path(empty).rglob("*.nbi")}
    assert compiled <= {"pool"}, "looking compiles no kernels"


@pytest.mark.parametrize("place", ["/dev/shm"])
def test_a_model_in_memory_is_warned_of(colibri: Colibri, mini: Path, place: str) -> None:
    """A file system that is not this machine's disk."""
    model = Path(place) / "colibri-doctor.gguf"
    if not model.parent.is_dir():
        pytest.skip(f"there is no {place}")
    model.write_bytes((mini / "mixtral" / "mixtral.Q8_0.gguf").read_bytes())
    try:
        found = findings(colibri, "-m", model)["file system"]
    finally:
        model.unlink()
    assert found["state"] == "warn"
    assert "tmpfs" in found["text"]
