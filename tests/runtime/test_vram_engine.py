"""Whole engines with the VRAM tier on, host memory in place of a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import GREEDY, Running
from test_reference_models import QUANTISED, Case, each

from colibri_mmap import Engine
from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.device import DeviceBackend
from colibri_mmap.runtime.hostdevice import open_host_device
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.usage import load_usage
from colibri_mmap.runtime.vramsettings import VramSettings
from colibri_mmap.runtime.vramtier import VramTier

FORGETFUL = RamSettings(learn=False)
NO_GPU = VramSettings("off")
IDS = [1, 17, 300, 45, 45, 212, 9, 130, 77, 5, 260, 31, 8, 99, 150, 3, 201, 64, 2, 118]
QUICK = {"mixtral-kq.Q4_K_M.gguf", "gpt-oss.MXFP4_MOE.gguf", "deepseek-v3.Q8_0.gguf"}


@pytest.fixture(autouse=True)
def _host_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_DEVICE", "host")


def tier_of(engine: Engine) -> VramTier:
    assert engine._vram is not None
    return engine._vram


def settle(engine: Engine) -> None:
    """Wait for the uploads that are under way."""
    if (offload := tier_of(engine).offload) is not None:
        offload.cache.drain()
        offload.cache.check_integrity()


def settings(path: Path, share: float, layers: int | None) -> VramSettings:
    """VRAM for that share of the experts, beside what else is needed for `layers` blocks."""
    with Engine.open(path, gpu=VramSettings("auto", layers), memory=FORGETFUL) as engine:
        plan = tier_of(engine).plan
    always = plan.trunk_bytes + plan.kv_bytes + plan.scratch_bytes
    return VramSettings(str(always + int(plan.expert_bytes * share)), layers)


def noise_and_straying(case: Case) -> tuple[float, float]:
    """How far the CPU's logits move by the size of steps alone, a mean as the engine's tests print
    it, and how far they are from those with the tier on, a mean over several of its settings.

    The last bits of a sum turn an activation's rounding, which changes what comes behind it.
    """
    ids = case.read()["ids_2"].tolist()
    with Running(case.model, "int8") as run:
        expected = run.in_chunks(ids, len(ids))
        noise = [np.abs(run.in_chunks(ids, size) - expected).mean() for size in (1, 5, 17)]
    strayed = []
    for share, layers in ((0.3, 0), (0.5, None), (0.3, 1), (1.0, None)):
        gpu = settings(case.model, share, layers)
        with Engine.open(case.model, memory=FORGETFUL, gpu=gpu) as engine:
            for _ in ("cold", "warm"):
                strayed.append(np.abs(engine.logits(ids) - expected).mean())
                settle(engine)
            assert tier_of(engine).counts()[0] > 0
    return float(np.mean(noise)), float(np.mean(strayed))


# The CPU has no rounded products for this type and computes it exactly; a device rounds as always.
UNROUNDED = {"mixtral-kq.IQ4_XS.gguf"}
WITH_EXPERTS = [
    case
    for case in QUANTISED
    if "dense" not in case.model.name and case.model.name not in UNROUNDED
]


@pytest.mark.fixtures
@each([case for case in WITH_EXPERTS if case.model.name in QUICK])
def test_logits_stray_less_than_by_rounding(case: Case) -> None:
    _, strayed = noise_and_straying(case)
    assert case.int8_error is not None
    assert strayed <= case.int8_error / 2


@pytest.mark.fixtures
@pytest.mark.slow
def test_logits_are_those_of_the_cpu(shared_fixtures: Path, measured) -> None:
    """All reference models together stray at most twice as far as by the size of steps.

    A single one is all or nothing: within a prompt a rounding is turned early, or none is.
    """
    found = {case.model.name: noise_and_straying(case) for case in WITH_EXPERTS}
    for name, (noise, strayed) in found.items():
        measured(
            "VRAM tier: mean |logits - those of the CPU|, and the noise floor",
            f"{name}: {strayed:.1e} {noise:.1e}",
        )
    noise, strayed = np.sum(list(found.values()), axis=0)
    assert strayed <= 2 * noise


MODELS = ("mixtral/mixtral.Q4_0", "gpt-oss/gpt-oss.MXFP4", "qwen3moe/qwen3moe.BF16")


@pytest.mark.parametrize("layers", [0, 1, None])
@pytest.mark.parametrize("name", [*MODELS, "deepseek-v3/deepseek-v3.BF16"])
def test_replies_are_those_of_the_cpu(mini: Path, name: str, layers: int | None) -> None:
    path = mini / f"{name}.gguf"
    with Engine.open(path, gpu=NO_GPU, memory=FORGETFUL) as engine:
        expected = [token.id for token in engine.generate(IDS, 16, GREEDY)]
        assert engine.stats.vram_hits == engine.stats.vram_misses == 0
    for share in (0.3, 1.0):
        with Engine.open(path, gpu=settings(path, share, layers), memory=FORGETFUL) as engine:
            replies = 0  # where processors are busy, one may end before an upload does
            while replies < 2 or (replies < 20 and not engine.stats.vram_hits):
                assert [token.id for token in engine.generate(IDS, 16, GREEDY)] == expected
                settle(engine)
                engine.reset()
                replies += 1
            stats = engine.stats
            assert stats.vram_hits > 0
            assert (stats.vram_misses == 0) == (share == 1.0)
            # Those that the CPU computed are the ones that VRAM missed.
            assert stats.expert_hits + stats.expert_misses == stats.vram_misses
            settle(engine)


def test_uses_in_vram_are_learned_too(mixtral: Path) -> None:
    """What is known of a model does not depend on where it ran."""
    counts = []
    for gpu in (NO_GPU, VramSettings()):
        with Engine.open(mixtral, gpu=gpu, memory=FORGETFUL) as engine:
            list(engine.generate(IDS, 16, GREEDY))
            assert engine._pager is not None
            counts.append(engine._pager.policy.heat())
    assert counts[0].sum() > 0
    assert np.array_equal(*counts)


def test_what_was_used_most_is_uploaded_first(mixtral: Path) -> None:
    with Engine.open(mixtral, gpu=NO_GPU) as engine:
        list(engine.generate(IDS, 16, GREEDY))
    hottest = load_usage(open_gguf(mixtral)).hottest()
    with Engine.open(mixtral, gpu=settings(mixtral, 0.25, 0)) as engine:
        settle(engine)
        offload = tier_of(engine).offload
        assert offload is not None
        resident = {
            (layer, int(expert))
            for layer, experts in offload.resident().items()
            for expert in np.flatnonzero(experts)
        }
    assert len(resident) == 4
    assert resident == set(hottest[:4])


def test_pinned_experts_are_there(mixtral: Path) -> None:
    memory = RamSettings(learn=False, pin=((0, 6), (1, 3)))
    with Engine.open(mixtral, gpu=settings(mixtral, 0.25, 0), memory=memory) as engine:
        list(engine.generate(IDS, 16, GREEDY))
        settle(engine)
        offload = tier_of(engine).offload
        assert offload is not None
        resident = offload.resident()
    assert resident[0][6]
    assert resident[1][3]


# ------------------------------------------------------------------------------ what cannot be had
def test_too_little_vram_is_an_error_only_where_it_was_asked_for(mixtral: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"the GPU needs .* 0.01 MB of .* can be used \(--vram\)"
    ):
        Engine.open(mixtral, gpu=VramSettings("10000"))


def test_without_a_gpu(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLIBRI_DEVICE", "none")
    with Engine.open(mixtral) as engine:
        assert engine.device_report() is None
        assert len(list(engine.generate(IDS, 4, GREEDY))) == 4
    for asked in (VramSettings("1G"), VramSettings(gpu_layers=1)):
        with pytest.raises(ArgumentError, match="no GPU can be used: COLIBRI_DEVICE=none"):
            Engine.open(mixtral, gpu=asked)


def test_exact_mode_computes_on_the_cpu(mixtral: Path) -> None:
    with Engine.open(mixtral, mode="exact") as engine:
        assert engine.device_report() is None
    with pytest.raises(ArgumentError, match="mode exact computes everything on the CPU"):
        Engine.open(mixtral, mode="exact", gpu=VramSettings("1G"))


def test_layers_that_a_gpu_cannot_run_are_named(mini: Path) -> None:
    path = mini / "deepseek-v3" / "deepseek-v3.BF16.gguf"
    with Engine.open(path, gpu=VramSettings(gpu_layers=2)) as engine:
        assert any("--gpu-layers 2: 0 of" in notice for notice in engine.notices)


@pytest.mark.parametrize("text", ["much", "-1", "0"])
def test_settings_that_are_none(text: str) -> None:
    with pytest.raises(ArgumentError):
        VramSettings(text)


def test_memory_is_given_back(mixtral: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[DeviceBackend] = []

    def remember(*_: object) -> DeviceBackend:
        devices.append(open_host_device())
        return devices[-1]

    monkeypatch.setattr("colibri_mmap.runtime.engine.find_device", remember)
    with Engine.open(mixtral) as engine:
        list(engine.generate(IDS, 4, GREEDY))
        free, total = devices[0].memory_info()
        assert free < total
    free, total = devices[0].memory_info()
    assert free == total


def test_a_context_that_outgrows_the_gpu_goes_on_on_the_cpu(
    mixtral: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same tokens, and what the GPU had of the context."""
    ids = IDS * 50
    with Engine.open(mixtral, gpu=NO_GPU) as engine:
        expected = [token.id for token in engine.generate(ids, 40, GREEDY)]
    device = open_host_device()
    monkeypatch.setattr("colibri_mmap.runtime.engine.find_device", lambda *_: device)
    with Engine.open(mixtral, gpu=VramSettings(gpu_layers=1)) as engine:
        replies = engine.generate(ids, 40, GREEDY)
        said = [next(replies).id for _ in range(10)]  # the first 1,024 positions have room
        taken = device.allocate(device.memory_info()[0])
        said += [token.id for token in replies]
        assert said == expected
        assert "attention goes on on the CPU: the GPU has no room" in engine.notices[-1]
        report = engine.device_report()
        assert report is not None
        assert report.layers == 0
        assert engine.stats.vram_hits > 0
        taken.free()
