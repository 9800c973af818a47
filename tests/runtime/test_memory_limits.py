"""A model under real limits of memory: what it reads, what it takes, and when it refuses."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from colibri_mmap import Engine
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.budget import MemoryPlan

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
COMPUTING = 256 * MIB  # kept for the program itself
PLENTY = 800 * MIB
SHAPE = {"layers": 8, "width": 512, "top_k": 4, "hidden": 256, "heads": 4, "kv_heads": 2}
SHAPE |= {"head_size": 64, "vocabulary": 2048}
CONTEXT, PROMPT, TOKENS = 256, 64, 48

CHILD = """
import json, sys
from colibri_mmap import Engine, Sampling
from colibri_mmap.errors import ColibriError
from colibri_mmap.runtime.pages import io_counters
from colibri_mmap.runtime.ram import RamSettings

path, context, prompt, tokens, settings = json.loads(sys.argv[1])
try:
    memory = RamSettings(learn=False, **settings)
    with Engine.open(path, ctx=context, threads=2, memory=memory) as engine:
        greedy = Sampling(temperature=0.0, ignore_eos=True)
        ids = [7 * n % 1000 + 3 for n in range(prompt)]
        said, stats = [], None
        for token in engine.generate(ids, tokens, greedy):
            said.append(token.id)
            if stats is None:
                start, stats = io_counters(), engine._tier.pager.take_stats()
        pager, plan = engine._tier.pager, engine._tier.plan
        print(json.dumps({
            "said": said, "notices": engine.notices,
            "bytes_read": (io_counters() - start).bytes_read,
            "misses": pager.stats.misses, "hits": pager.stats.hits,
            "unused": plan.limit - plan.trunk_bytes - plan.anonymous_bytes - plan.kv_bytes
            - plan.least_expert_bytes, "evict": plan.evict, "budget": plan.expert_budget,
            "held": pager.policy.resident_bytes, "limit": pager.policy.budget,
        }))
except ColibriError as error:
    print(json.dumps({"refused": type(error).__name__, "message": str(error)}))
"""


def make(path: Path, mini: Path, experts: int) -> Path:
    """A model of random weights with about 0.24 MB per expert and layer."""
    spec = importlib.util.spec_from_file_location(
        "make_bench_moe", ROOT / "tools" / "make_bench_moe.py"
    )
    assert spec is not None
    assert spec.loader is not None
    maker = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(maker)
    tokenizer = open_gguf(mini / "qwen3moe" / "qwen3moe.BF16.gguf")
    maker.write(path, tokenizer, maker.Shape(**SHAPE, experts=experts), zipf=0.5)
    return path


@pytest.fixture(scope="module")
def model(mini: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """65 MB."""
    return make(tmp_path_factory.mktemp("model") / "model.gguf", mini, 32)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    """What it says where there is plenty of memory."""
    return free_run(model)["said"]


def plan_of(model: Path) -> MemoryPlan:
    """How memory is divided where there is plenty."""
    with Engine.open(model, ctx=CONTEXT) as engine:
        assert engine._tier is not None
        return engine._tier.plan


def arguments(model: Path, **settings: object) -> list[str]:
    told = json.dumps([str(model), CONTEXT, PROMPT, TOKENS, settings])
    return [sys.executable, "-c", CHILD, told]


def free_run(model: Path) -> dict:
    ran = subprocess.run(arguments(model), capture_output=True, text=True, check=True)
    return json.loads(ran.stdout)


def limited_run(model: Path, limit: int, **settings: object) -> tuple[dict, dict]:
    """What the program says and what was seen of it, under a limit and with a cold cache."""
    program = [sys.executable, ROOT / "bench" / "cgroup.py", "--limit", str(limit)]
    ran = subprocess.run(
        [*program, "--file", model, "--drop", "--", *arguments(model, **settings)],
        capture_output=True,
        text=True,
    )
    if ran.stderr.startswith("error:"):
        pytest.skip(ran.stderr.strip())
    *_, said, seen = ran.stdout.splitlines()
    assert ran.returncode == 0, (seen, ran.stderr)
    return json.loads(said), json.loads(seen)


@pytest.mark.parametrize(
    "io", ["mmap", *(pytest.param(io, marks=pytest.mark.slow) for io in ("pread", "direct"))]
)
def test_it_runs_or_refuses_but_is_never_killed(model: Path, expected: list[int], io: str) -> None:
    """From what is certainly too little on; how much of its code is in memory differs by run."""
    plan = plan_of(model)
    least = COMPUTING + plan.trunk_bytes + plan.kv_bytes + plan.least_expert_bytes
    ran = []
    for more in (0, 80, 140, 200, 260):
        said, seen = limited_run(model, least + more * MIB, io=io)
        assert not seen["oom_killed"]
        assert seen["peak_anonymous_bytes"] < 300 * MIB
        ran.append("said" in said)
        if ran[-1]:
            assert said["said"] == expected
        else:
            assert said["refused"] == "ResourceError"
            assert "\n" not in said["message"]
    assert not ran[0]
    assert ran[-1]


@pytest.mark.slow
def test_anonymous_memory_and_bytes_read(mini: Path, tmp_path: Path) -> None:
    """311 MB of weights, a quarter of the experts in memory."""
    experts = 160
    model = make(tmp_path / "model.gguf", mini, experts)
    plan = plan_of(model)
    budget = plan.expert_bytes // 4
    free, _ = limited_run(model, PLENTY)
    said, seen = limited_run(model, PLENTY - free["unused"] - plan.least_expert_bytes + budget)
    assert said["said"] == free_run(model)["said"]
    assert said["evict"]
    assert said["budget"] < 2 * budget
    assert not seen["oom_killed"]
    assert seen["peak_anonymous_bytes"] < 300 * MIB + plan.kv_bytes
    assert said["misses"] + said["hits"] == SHAPE["layers"] * SHAPE["top_k"] * (TOKENS - 1)
    asked = said["misses"] * plan.expert_bytes / (SHAPE["layers"] * experts)
    pages = said["misses"] * 6 * 4096  # three ranges begin and end within pages
    # what was evicted is now and then still there: the system frees folios as a whole or not at all
    assert asked / 2 < said["bytes_read"] < asked + pages + 4 * MIB


def test_locking_refused(model: Path) -> None:
    """Not even root may lock memory without the capability: a notice, and it goes on."""
    if os.geteuid() != 0:
        pytest.skip("capabilities are dropped by root")

    def drop() -> None:
        drop_bounding, ipc_lock = 24, 14
        assert ctypes.CDLL(None).prctl(drop_bounding, ipc_lock, 0, 0, 0) == 0
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))

    plan = plan_of(model)
    ram = COMPUTING + plan.trunk_bytes + plan.kv_bytes + plan.least_expert_bytes + 20 * MIB
    command = arguments(model, ram=str(ram))
    free = subprocess.run(command, capture_output=True, text=True, check=True)
    refused = subprocess.run(command, capture_output=True, text=True, check=True, preexec_fn=drop)
    said, without = json.loads(free.stdout), json.loads(refused.stdout)
    assert said["evict"]
    assert not any("locked" in notice for notice in said["notices"])
    assert without["said"] == said["said"]
    (notice,) = [notice for notice in without["notices"] if "locked" in notice]
    assert "ulimit -l" in notice
    assert "\n" not in notice
