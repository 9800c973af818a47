"""plan: the numbers of the engine, quickly, and its refusals under a real limit."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from program import COMMAND, ROOT, Colibri, environment

from colibri_mmap import Engine
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.usage import load_usage, save_usage

V1 = Path("/sys/fs/cgroup/memory")
MIB = 1 << 20


@pytest.fixture
def model(mini: Path) -> Path:
    return next((mini / "qwen3moe").glob("*.gguf"))


@pytest.fixture
def limit() -> Iterator[Path]:
    """A cgroup of version 1 of its own."""
    group = V1 / f"colibri-plan-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup v1 can be made here ({error.strerror})")
    yield group
    group.rmdir()


def planned(colibri: Colibri, *arguments: str | Path) -> dict[str, dict[str, float]]:
    done = colibri("plan", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found


def test_the_plan_is_the_engines(colibri: Colibri, model: Path) -> None:
    found = planned(colibri, "-m", model, "-c", "512")["memory"]
    with Engine.open(model, ctx=512) as engine:
        made = engine.memory_plan
    for name in ("trunk_bytes", "kv_bytes", "expert_bytes", "expert_budget", "evict"):
        assert found[name] == getattr(made, name), name


def test_a_model_that_fits_reads_nothing(colibri: Colibri, model: Path) -> None:
    found = planned(colibri, "-m", model)["per_token"]
    assert found["read_bytes"] == 0
    assert found["bottleneck"] != "disk"
    text = colibri("plan", "-m", model).stdout.decode()
    assert "100%" in text
    assert "rule of thumb" in text


def test_a_part_of_the_experts(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    memory = planned(colibri, "-m", model)["memory"]
    always = memory["trunk_bytes"] + memory["kv_bytes"] + 256 * MIB
    ram = str(int(always + 0.75 * memory["expert_bytes"]))
    found = planned(colibri, "-m", model, "--ram", ram)
    assert found["limited_by"] == f"--ram {ram}"
    assert found["memory"]["evict"]
    assert found["memory"]["expert_share"] == pytest.approx(0.75, abs=0.01)
    used = sum(found["memory"][f"{name}_bytes"] for name in ("trunk", "kv", "anonymous"))
    assert found["memory"]["limit"] == int(ram) > used


def test_known_uses_are_taken_into_account(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "state" / "colibri-mmap" / "usage"
    gguf = open_gguf(model)
    save_usage(gguf, load_usage(gguf, directory).counts.astype(int) + 50, 500, directory)
    assert planned(colibri, "-m", model)["per_token"]["counted_tokens"] == 500


def test_below_the_least_it_refuses(model: Path, limit: Path, tmp_path: Path) -> None:
    (limit / "memory.limit_in_bytes").write_text(str(160 * MIB))
    script = f'echo $$ > {limit / "cgroup.procs"} && exec "$@"'
    done = subprocess.run(
        ["/bin/sh", "-c", script, "sh", *COMMAND, "plan", "-m", str(model)],
        capture_output=True,
        env=environment(tmp_path),
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: the model needs ")
    assert done.stderr.count(b"\n") == 1


def test_it_is_quick_and_compiles_nothing(model: Path, tmp_path: Path) -> None:
    """In seconds of processor time, which other work on the machine does not lengthen."""
    code = (
        "import sys; from colibri_mmap.cli import app\n"
        f"try: app(['plan', '-m', {str(model)!r}])\n"
        "except SystemExit: pass\n"
        "assert 'numba' not in sys.modules"
    )

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            cwd=ROOT,
            env=environment(tmp_path),
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(2)) < 1.0
