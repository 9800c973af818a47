"""plan: the numbers of the engine, quickly, and its refusals under a real limit."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from program import COMMAND, ROOT, Colibri, environment

from colibri_mmap import Engine
from colibri_mmap.demo.geometry import MODELS, Grouped
from colibri_mmap.demo.randommodel import write_model
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.usage import load_usage, save_usage
from colibri_mmap.runtime.vramsettings import VramSettings

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


def planned(colibri: Colibri, *arguments: str | Path) -> dict[str, Any]:
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
            env={**environment(tmp_path), "COLIBRI_DEVICE": "none"},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(2)) < 1.0


@pytest.fixture(scope="module")
def sparse(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8 layers with 1 GB of experts, which are holes in the file."""
    model = MODELS["qwen3-235b-a22b"].shortened(8, None)
    model = replace(
        model,
        width=512,
        heads=8,
        vocabulary=512,
        context=65536,
        attention=Grouped(kv_heads=2, head_size=64),
        experts=replace(model.experts, count=128, hidden=1024),
    )
    path = tmp_path_factory.mktemp("sparse") / "sparse.gguf"
    write_model(path, open_gguf(mini / "qwen3moe" / "qwen3moe.BF16.gguf"), model, sparse=True)
    return path


def test_a_gpu_that_is_assumed(colibri: Colibri, sparse: Path) -> None:
    found = planned(colibri, sparse, "--vram", "1G")
    gpu, plan = found["gpu"], found["gpu"]["plan"]
    assert (gpu["name"], gpu["total_bytes"]) == (None, 1 << 30)
    assert (gpu["layers"], gpu["blocks"]) == (8, 8)
    always = plan["trunk_bytes"] + plan["kv_bytes"] + plan["scratch_bytes"]
    assert plan["limit"] == (1 << 30) - plan["reserve"]
    assert plan["expert_budget"] == plan["limit"] - always
    assert 0 < plan["expert_share"] < 1
    text = colibri("plan", sparse, "--vram", "1G").stdout.decode()
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = lines.index("GPU assumed, 1.07 GB, 805 MB can be used")
    assert re.fullmatch(r"trunk 8 of 8 layers, .* MB, and .* MB for 4096 tokens", lines[at + 1])
    assert lines[at + 3].endswith(f": {plan['expert_share']:.0%}")
    assert "without the GPU" in lines[-1]
    few = planned(colibri, sparse, "--vram", "1G", "-ngl", "2")["gpu"]
    assert (few["layers"], few["plan"]["kv_bytes"] * 4) == (2, plan["kv_bytes"])
    assert few["plan"]["expert_budget"] > plan["expert_budget"]


def test_the_gpus_plan_is_the_engines(
    colibri: Colibri, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of host memory that plays its part."""
    monkeypatch.setenv("COLIBRI_DEVICE", "host")
    for vram in ("auto", "500M"):
        with Engine.open(model, ctx=512, gpu=VramSettings(vram)) as engine:
            report = engine.device_report()
        assert report is not None
        done = colibri("plan", model, "-c", "512", "--vram", vram, "--json", COLIBRI_DEVICE="host")
        found = json.loads(done.stdout)["gpu"]
        share = found["plan"].pop("expert_share")
        assert share == report.plan.expert_share
        assert found["plan"] == {**asdict(report.plan), "notices": list(report.plan.notices)}
        assert (found["name"], found["layers"]) == (report.name, report.layers)


def test_layers_that_no_gpu_runs(colibri: Colibri, mini: Path) -> None:
    path = mini / "deepseek-v3" / "deepseek-v3.BF16.gguf"
    text = colibri("plan", path, "--vram", "8G").stdout.decode()
    assert "0 of 2 layers; block 1: LatentAttention runs on the CPU only" in text


def test_without_a_gpu_nothing_is_said_of_one(colibri: Colibri, model: Path) -> None:
    for more in ([], ["--vram", "off"]):
        done = colibri("plan", model, *more, COLIBRI_DEVICE="none")
        assert done.returncode == 0
        assert b"GPU" not in done.stdout + done.stderr


def test_gpus_that_cannot_be_planned_for(model: Path, tmp_path: Path) -> None:
    refused = {
        "--vram 50%": "--vram 8G plans for one of this size",
        "-ngl 2": "--vram 8G plans for one of this size",
        "-ngl 2 --vram off": "leave out --vram off",
        "--vram much": "size 'much'",
        "--vram 100M": "the GPU needs ",
        "-ngl -2": "give auto, or how many layers",
    }
    code = (
        "import sys; from colibri_mmap.cli import app; from colibri_mmap.errors import *\n"
        "for options in sys.argv[2:]:\n"
        "    try: app(['plan', sys.argv[1], *options.split()])\n"
        "    except ColibriError as error: print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model), *refused],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment(tmp_path), "COLIBRI_DEVICE": "none"},
    )
    assert done.stderr == ""
    for line, says in zip(done.stdout.splitlines(), refused.values(), strict=True):
        assert says in line
