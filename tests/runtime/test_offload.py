"""Experts in VRAM beside those on the CPU: odd steps, abandoned ones, broken devices."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from colibri_mmap import Engine
from colibri_mmap.format.experts import ExpertLayer, ExpertPart
from colibri_mmap.format.quants import GGMLType
from colibri_mmap.runtime import offload as offloading
from colibri_mmap.runtime.device import Address, DeviceError
from colibri_mmap.runtime.devicearena import DeviceArena, aligned
from colibri_mmap.runtime.devicekernels import ExpertShape
from colibri_mmap.runtime.experts import ExpertStore
from colibri_mmap.runtime.hostdevice import HostBackend, HostEvent, HostStream
from colibri_mmap.runtime.hostkernels import execute
from colibri_mmap.runtime.kv import STEP_TOKENS
from colibri_mmap.runtime.offload import Offload
from colibri_mmap.runtime.ops import Ops
from colibri_mmap.runtime.pool import Pool
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.routing import Routing
from colibri_mmap.runtime.slots import ExpertReader
from colibri_mmap.runtime.sources import ExpertNumbers
from colibri_mmap.runtime.vram import VramCache
from colibri_mmap.runtime.vrampolicy import SlotPolicy
from colibri_mmap.runtime.vramsettings import VramSettings

FORGETFUL = RamSettings(learn=False)
IDS = np.random.default_rng(3).integers(3, 250, STEP_TOKENS).tolist()
Opened = Callable[..., Engine]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Opens a model with some experts in VRAM, and `layers` blocks."""

    def opened(path: Path, device: HostBackend, experts: float, layers: int = 0) -> Engine:
        monkeypatch.setattr("colibri_mmap.runtime.engine.find_device", lambda *_: device)
        with Engine.open(path, memory=FORGETFUL, gpu=VramSettings(gpu_layers=layers)) as engine:
            plan = tier(engine).plan
        always = plan.trunk_bytes + plan.kv_bytes + plan.scratch_bytes
        size = str(always + int(plan.expert_bytes * experts))
        gpu = VramSettings(size, layers)
        engine = Engine.open(path, memory=FORGETFUL, gpu=gpu)
        engine.logits(IDS[:64])
        offload(engine).cache.drain()
        return engine

    return opened


def tier(engine: Engine) -> SimpleNamespace:
    assert engine._vram is not None
    return engine._vram  # type: ignore[return-value]


def offload(engine: Engine) -> Offload:
    found = tier(engine).offload
    assert isinstance(found, Offload)
    return found


@pytest.fixture
def model(mini: Path) -> Path:
    """Two of its experts per token; all products are float32."""
    return mini / "qwen3moe" / "qwen3moe.BF16.gguf"


@pytest.mark.parametrize("layers", [0, 1])
@pytest.mark.parametrize("experts", [0.15, 0.5, 1.0])
def test_steps_that_are_computed_in_parts(
    model: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch, experts: float, layers: int
) -> None:
    """Parts of one token, and parts that choose nothing of what is in VRAM."""
    counts = (1, 4, 5, 7, 9, 13)
    with Engine.open(model, gpu=VramSettings("off"), memory=FORGETFUL) as engine:
        expected = [engine.logits(IDS[:count]) for count in counts]
    top_k = 2
    monkeypatch.setattr(offloading, "_MOST_PAIRS", 4 * top_k)
    with opened(model, HostBackend(execute), experts, layers) as engine:
        for logits, count in zip(expected, counts, strict=True):
            for _ in range(2):
                assert np.abs(engine.logits(IDS[:count]) - logits).max() < 1e-4, count


def test_a_step_that_was_given_up_adds_nothing_to_the_next(
    model: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's sums were on their way when it ended; then comes a layer without any."""
    with opened(model, HostBackend(execute), 0.5) as engine:
        interrupted = offload(engine)
        readings = []

        def interrupt(*_: object) -> None:
            readings.append(interrupted._reading)
            if readings[-1] is not None:
                raise KeyboardInterrupt

        with monkeypatch.context() as patched:
            patched.setattr(ExpertStore, "_add_on_cpu", interrupt)
            with pytest.raises(KeyboardInterrupt):
                engine.logits(IDS[:20])
        assert readings[-1] is not None
        ops = engine._ops
        with ops.temporaries():
            x = ops.zeros(1, 64)
            routing = Routing(np.zeros((1, 2), np.int64), np.zeros((1, 2), np.float32), 0, 0)
            stats = interrupted.cache.take_stats()
            assert interrupted.begin(x, x, x, 99, routing, ops) is None  # no layer of the device's
            interrupted.finish(x)
            assert not ops.numpy(x).any()
            after = interrupted.cache.take_stats()
        assert stats.misses > 0
        assert after == replace(after, uploads=0, rejected=0, misses=0)


REAL = {  # width, hidden, chosen, experts, types
    "Qwen3-30B-A3B": (2048, 768, 8, 128, GGMLType.Q4_K, GGMLType.Q6_K),
    "Mixtral-8x7B": (4096, 14336, 2, 8, GGMLType.Q4_K, GGMLType.Q6_K),
    "gpt-oss-20b": (2880, 2880, 4, 32, GGMLType.MXFP4, GGMLType.MXFP4),
    "GLM-4.5-Air": (4096, 1408, 8, 128, GGMLType.Q4_K, GGMLType.Q8_0),
}


class _Measured(DeviceArena):
    """Knows the most that was taken of its first chunk."""

    most = 0

    def take(self, nbytes: int) -> Address:
        address = super().take(nbytes)
        self.most = max(self.most, address + aligned(nbytes) - self._chunks[0].address)
        return address


@pytest.mark.parametrize("name", REAL)
def test_real_models_compute_in_the_memory_that_was_planned(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Their sizes; nothing is computed. The largest step takes all, but for some tables."""
    width, hidden, chosen, count, *types = REAL[name]
    monkeypatch.setattr(offloading, "DeviceArena", _Measured)
    shapes = {0: ExpertShape(*types, width, hidden)}
    part = ExpertPart("up", GGMLType.F32, (8, 8), np.zeros(count, int), np.zeros(count, int))
    layer = ExpertLayer(0, count, {n: replace(part, name=n) for n in ("gate", "up", "down")})
    reader = ExpertReader(ExpertNumbers((0,), count), {0: layer}, [])
    device = HostBackend(lambda *_: None)
    policy = SlotPolicy(reader.sizes, int(reader.sizes.sum()), layers=1)
    cache = VramCache(device, policy, lambda *_: None, threads=0)
    for expert in range(count):
        cache.offer(np.array([expert]))
    planned = Offload.scratch_bytes(shapes, chosen, STEP_TOKENS)
    pool = Pool(1)
    ops = Ops(pool, "int8")
    offload = Offload(device, ops, cache, reader, shapes, scratch=planned)
    random, arena = np.random.default_rng(1), offload._arena
    assert isinstance(arena, _Measured)
    for tokens in (1, 2, 257, STEP_TOKENS):
        ids = np.stack([random.permutation(count)[:chosen] for _ in range(tokens)])
        with ops.temporaries():
            x = ops.zeros(tokens, width)
            weights = np.zeros(ids.shape, np.float32)
            assert offload.begin(x, x, x, 0, Routing(ids, weights, 0, 0), ops) is not None
            offload.finish(x)
        assert arena.nbytes == aligned(planned)
    assert planned - (1 << 20) < arena.most <= planned
    offload.close()
    pool.close()


@pytest.mark.parametrize(
    "name", ["qwen3moe/qwen3moe.BF16", "mixtral/mixtral.Q4_0", "gpt-oss/gpt-oss.MXFP4"]
)
@pytest.mark.parametrize("layers", [0, 2])
def test_experts_compute_in_the_memory_that_was_planned(
    mini: Path, opened: Opened, name: str, layers: int
) -> None:
    with opened(mini / f"{name}.gguf", HostBackend(execute), 1.0, layers) as engine:
        arena = offload(engine)._arena
        planned = arena.nbytes
        for count in (1, 2, 257, STEP_TOKENS):
            engine.logits(IDS[:count])
        assert arena.nbytes == planned


class _Broken(HostBackend):
    """A device that fails from some time on."""

    failing = False

    def record(self, stream: HostStream, *, sleep: bool = False) -> HostEvent:
        if self.failing:
            raise DeviceError("unspecified launch failure")
        return super().record(stream, sleep=sleep)


@pytest.mark.parametrize("layers", [0, 2])
def test_an_engine_whose_device_broke_can_be_closed(
    model: Path, opened: Opened, layers: int
) -> None:
    device = _Broken(execute)
    engine = opened(model, device, 0.5, layers)
    with engine:
        device.failing = True
        with pytest.raises(DeviceError):
            engine.logits(IDS[:5])
    assert not [t for t in threading.enumerate() if t.name == "colibri-upload"]
    free, total = device.memory_info()
    assert free == total
