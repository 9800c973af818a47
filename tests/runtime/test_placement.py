"""The last blocks of models on a device: logits, caches, memory, order of streams."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest
from running import Running
from shim import Shim

from colibri_mmap.errors import ResourceError
from colibri_mmap.runtime import scheduler
from colibri_mmap.runtime.device import DeviceBackend, OutOfDeviceMemory
from colibri_mmap.runtime.devicekv import DeviceCache
from colibri_mmap.runtime.hostdevice import HostBackend
from colibri_mmap.runtime.hostkernels import execute
from colibri_mmap.runtime.kv import STEP_TOKENS, KVCache, Trace

FLOAT_MODELS = [  # their products are float32 on both sides: only the order of sums differs
    *("dbrx", "dots1", "ernie45moe", "glm4moe", "granitemoe", "hunyuan-moe", "llama-dense"),
    *("llama4", "minimax-m2", "mixtral", "olmoe", "phimoe", "qwen2moe", "qwen3-dense", "qwen3moe"),
]
CPU_MODELS = {
    "deepseek-v3": "block 1: LatentAttention runs on the CPU only",
    "lfm2moe": "block 2: ShortConvolution runs on the CPU only",
    "qwen3next": "block 1: GatedAttention runs on the CPU only",
}
TOKENS = 40


def model_file(mini: Path, name: str, kind: str = "*16") -> Path:
    return next((mini / name).glob(f"*.{kind}.gguf"))


def some_ids(seed: int = 0, count: int = TOKENS) -> list[int]:
    return np.random.default_rng(seed).integers(3, 250, count).tolist()


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max())


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> DeviceBackend:
    """Host memory in a device's place, or a GPU."""
    return request.getfixturevalue("gpu") if request.param == "gpu" else HostBackend(execute)


# ------------------------------------------------------------------------------ logits
@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_float_models_have_the_logits_of_the_cpu(
    mini: Path, device: DeviceBackend, name: str
) -> None:
    """Whole and in part, for a prompt and for steps of few tokens, cached as float32."""
    ids = some_ids()
    with Running(model_file(mini, name), "int8", "f32") as run:
        expected = run.in_chunks(ids, TOKENS)
        layers = run.supported_layers()
        assert layers.reason == ""
        for placed in (1, layers.layers):
            trunk = run.place(device, placed)
            for size in (TOKENS, 17, 6, 1):
                assert difference(run.in_chunks(ids, size), expected) < 3e-5, (placed, size)
            trunk.close()


@pytest.mark.parametrize(
    ("name", "kind"), [("mixtral", "Q4_0"), ("mixtral", "Q8_0"), ("gpt-oss", "MXFP4")]
)
def test_quantised_models_stray_less_than_by_rounding(
    mini: Path, device: DeviceBackend, name: str, kind: str
) -> None:
    """Activations are rounded as on the CPU: last bits of a sum turn some of them the other way.

    That changes a token's logits, by a jump where it changes its experts; most stay.
    """
    path, ids = model_file(mini, name, kind), some_ids()
    with Running(path, "exact") as run:
        exact = run.in_chunks(ids, TOKENS)
    with Running(path, "int8", "f32") as run:
        rounded = run.in_chunks(ids, TOKENS)
        run.place(device)
        for size in (TOKENS, 16, 5, 1):
            strayed = np.abs(run.in_chunks(ids, size) - rounded)
            assert np.median(strayed.max(axis=1)) < 1e-4, size
            assert strayed.mean() < np.abs(rounded - exact).mean() / 2, size


@pytest.mark.parametrize("name", ["llama-dense", "qwen3moe"])
def test_no_logits_are_wanted_of_the_first_parts_of_a_prompt(
    mini: Path, device: DeviceBackend, name: str
) -> None:
    ids = some_ids()
    with Running(model_file(mini, name), "int8", "f32") as run:
        expected = run.in_chunks(ids, TOKENS)[-1:]
        run.place(device)
        sequence = run.sequence()
        for part in (ids[:17], ids[17:18]):
            assert run.step((sequence, part), wanted="none").size == 0
        found = run.step((sequence, ids[18:]), wanted="last")
        assert difference(found, expected) < 3e-5 or device.kind == "cuda"


def test_routing_is_decided_by_the_cpu(mini: Path) -> None:
    ids = some_ids()
    with Running(model_file(mini, "glm4moe"), "int8", "f32") as run:
        traces = [Trace(), Trace()]
        run.step((run.sequence(), ids), trace=traces[0])
        run.place(HostBackend(execute))
        run.step((run.sequence(), ids), trace=traces[1])
        assert traces[0].experts.keys() == traces[1].experts.keys()
        for layer, chosen in traces[0].experts.items():
            assert np.array_equal(chosen, traces[1].experts[layer])


@pytest.mark.parametrize(("name", "kind"), [("qwen3moe", "BF16"), ("mixtral", "Q4_0")])
def test_the_cuda_kernels_themselves(mini: Path, shim: Shim, name: str, kind: str) -> None:
    ids = some_ids(count=20)
    with Running(model_file(mini, name, kind), "int8") as run:
        trunk = run.place(HostBackend(execute))
        expected = run.in_chunks(ids, 4)
        trunk.close()
        run.place(HostBackend(shim))
        assert difference(run.in_chunks(ids, 4), expected) < 1e-3


@pytest.mark.parametrize("name", CPU_MODELS)
def test_what_stays_on_the_cpu_has_a_reason(mini: Path, name: str) -> None:
    with Running(model_file(mini, name), "int8") as run:
        assert run.supported_layers() == (0, CPU_MODELS[name])


def test_exact_mode_stays_on_the_cpu(mixtral: Path) -> None:
    with Running(mixtral, "exact") as run:
        assert run.supported_layers() == (0, "mode exact computes on the CPU")


# ------------------------------------------------------------------------------ sequences
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
def test_several_sequences_in_one_step(mini: Path, device: DeviceBackend, name: str) -> None:
    """Tokens of some, a prompt of another: as each on its own."""
    path = model_file(mini, name, "*[146]")
    prompts = [some_ids(seed, count) for seed, count in ((1, 5), (2, 8), (3, 4))]
    with Running(path, "int8", "f32") as run:
        run.place(device)
        expected = [run.in_chunks(ids, len(ids)) for ids in prompts]
        sequences = [run.sequence() for _ in prompts]
        first = run.step(*[(s, p[:-2]) for s, p in zip(sequences, prompts, strict=True)])
        second = run.step(*[(s, p[-2:-1]) for s, p in zip(sequences, prompts, strict=True)])
        third = run.step(*[(s, p[-1:]) for s, p in zip(sequences, prompts, strict=True)])
        start = 0
        for number, logits in enumerate(expected):
            length = len(logits) - 2
            assert difference(first[start : start + length], logits[:-2]) < 1e-4
            assert difference(second[number], logits[-2]) < 1e-4
            assert difference(third[number], logits[-1]) < 1e-4
            start += length


def test_steps_are_kept_while_they_are_the_same(mini: Path, device: DeviceBackend) -> None:
    """Alone and beside another, by turns, past the lengths at which attention is cut anew."""
    ids = some_ids(count=150)
    with Running(model_file(mini, "qwen2moe"), "int8", "f32") as run:
        expected = run.in_chunks(ids, 150, run.sequence(256))
        trunk = run.place(device)
        runs = []
        for _ in range(2):
            first, second = run.sequence(256), run.sequence(256)
            run.in_chunks(ids[:100], 10, first)
            run.in_chunks(ids[:60], 10, second)
            logits = []
            for n in range(50):
                if n % 3:
                    logits.append(run.step((first, ids[100 + n : 101 + n])))
                else:
                    beside = (second, ids[60 + n : 61 + n])
                    second.rewind(60)
                    logits.append(run.step((first, ids[100 + n : 101 + n]), beside)[:1])
            runs.append(np.concatenate(logits))
        assert difference(runs[0], expected[100:]) < 3e-5
        assert np.array_equal(runs[1], runs[0])
        trunk.close()


def test_a_cut_sequence_goes_on(mini: Path, device: DeviceBackend) -> None:
    ids, others = some_ids(), some_ids(5)
    with Running(model_file(mini, "gpt-oss", "MXFP4"), "int8", "f32") as run:
        run.place(device)
        sequence = run.sequence()
        run.in_chunks([*ids[:20], *others], 15, sequence)
        sequence.rewind(20)
        found = run.in_chunks(ids[20:], 1, sequence)
        assert difference(found, run.in_chunks(ids, 1)[20:]) < 1e-4


class _Interrupting(Trace):
    """Ends a step in its middle."""

    def record(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        raise KeyboardInterrupt


def test_a_step_that_was_given_up_changes_nothing(mini: Path, device: DeviceBackend) -> None:
    ids = some_ids()
    with Running(model_file(mini, "mixtral"), "int8", "f32") as run:
        run.place(device)
        sequence = run.sequence()
        run.step((sequence, ids[:10]))
        with pytest.raises(KeyboardInterrupt):
            run.step((sequence, some_ids(7)), trace=_Interrupting())
        sequence.rewind(10)
        found = run.in_chunks(ids[10:], 10, sequence)
        assert difference(found, run.in_chunks(ids, 10)[10:]) < 1e-4


# ------------------------------------------------------------------------------ caches
@pytest.mark.parametrize("name", ["mixtral", "gpt-oss"])
@pytest.mark.parametrize("layers", [1, 2])
def test_a_copied_cache_goes_on_as_the_first(
    mini: Path, device: DeviceBackend, name: str, layers: int
) -> None:
    """Through the host's memory, which is what a snapshot is made of."""
    ids = some_ids()
    with Running(model_file(mini, name, "*[146]"), "int8") as run:
        run.place(device, layers)
        first, second = run.sequence(), run.sequence()
        run.step((first, ids[:30]))
        second.cache.copy(first.cache, 30)
        second.ids = ids[:30]
        assert np.array_equal(run.step((second, ids[30:])), run.step((first, ids[30:])))


def test_the_caches_of_device_and_cpu_hold_the_same(mini: Path) -> None:
    """Float32 on both sides: bytes differ by the last bits of what was computed."""
    ids = some_ids()
    with Running(model_file(mini, "qwen3moe"), "int8", "f32") as run:
        on_cpu, on_device = run.sequence(), run.sequence()
        run.step((on_cpu, ids))
        run.place(HostBackend(execute))
        run.step((on_device, ids))
        for mirror in on_device.cache.mirrors:
            mirror.to_host(TOKENS)
        views = zip(on_cpu.cache.span(0, 32), on_device.cache.span(0, 32), strict=True)
        for expected, found in views:
            assert difference(found.view(np.float32), expected.view(np.float32)) < 1e-5
            assert np.abs(expected.view(np.float32)).max() > 0.01


def mirror_bytes(cache: KVCache) -> int:
    """Device memory that a sequence's cache holds."""
    (mirror,) = (each for each in cache.mirrors if isinstance(each, DeviceCache))
    return sum(layer.memory.nbytes for layer in mirror._layers if layer.memory is not None)


def test_a_cache_grows_with_its_sequence(mini: Path, device: DeviceBackend) -> None:
    ids = some_ids(count=1300)
    with Running(model_file(mini, "mixtral"), "int8") as run:
        trunk = run.place(device)
        large, growing = run.sequence(4096), run.sequence(4096)
        trunk.attach(large.cache, 4096)
        expected = run.in_chunks(ids, 512, large)
        before = device.memory_info()[0]
        found, held, taken = [], [], []
        for start in range(0, len(ids), 512):
            found.append(run.step((growing, ids[start : start + 512])))
            held.append(mirror_bytes(growing.cache))
            taken.append(before - device.memory_info()[0])
        assert np.array_equal(np.concatenate(found), expected)
        assert 0 < held[0] == held[1] < held[2] < mirror_bytes(large.cache)
        if device.kind == "host":  # a GPU tells what is free in steps of megabytes
            assert taken == held


def test_memory_is_given_back_with_the_sequence_and_with_the_trunk(mini: Path) -> None:
    device = HostBackend(execute)
    with Running(model_file(mini, "mixtral"), "int8") as run:
        trunk = run.place(device)
        run.in_chunks(some_ids(), TOKENS)
        before = device.memory_info()[0]
        sequence = run.sequence()
        trunk.attach(sequence.cache, 64)
        assert device.memory_info()[0] < before
        del sequence
        gc.collect()
        assert device.memory_info()[0] == before
        kept = run.sequence()
        run.step((kept, some_ids()))
        trunk.close()
        free, total = device.memory_info()
        assert free == total
        run.in_chunks(some_ids(), TOKENS)  # on the CPU again
        assert device.memory_info()[0] == total


@pytest.mark.parametrize("name", FLOAT_MODELS)
def test_steps_compute_in_the_memory_that_was_planned(mini: Path, name: str) -> None:
    """The largest step, single tokens, several sequences at once."""
    with Running(model_file(mini, name), "int8") as run:
        trunk = run.place(HostBackend(execute))
        planned = trunk.ops.arena.nbytes
        ids = some_ids(count=STEP_TOKENS)
        run.step((run.sequence(STEP_TOKENS), ids))
        several = [run.sequence() for _ in range(8)]
        run.step(*[(sequence, ids[:1]) for sequence in several])
        run.step((several[0], ids[:1]), wanted="last")
        assert trunk.ops.arena.nbytes == planned


def test_too_little_memory_is_said(mini: Path) -> None:
    with Running(model_file(mini, "mixtral"), "int8") as run:
        with pytest.raises(OutOfDeviceMemory):
            run.place(HostBackend(execute, memory=50_000))
        trunk = run.place(HostBackend(execute, memory=40 << 20))
        with pytest.raises(ResourceError, match=r"200000 tokens .* smaller --ctx-size"):
            trunk.attach(run.sequence(200_000).cache, 200_000)


# ------------------------------------------------------------------------------ streams
@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_read_before_it_is_there(mini: Path, seed: int) -> None:
    """A device that runs its streams late, in random order, computes the same bits."""
    ids = some_ids()
    with Running(model_file(mini, "qwen2moe"), "int8") as run:
        trunk = run.place(HostBackend(execute), 1 + seed % 2)
        expected = _mixed_steps(run, ids)
        trunk.close()
        run.place(HostBackend(execute, deferred=True, seed=seed), 1 + seed % 2)
        assert np.array_equal(_mixed_steps(run, ids), expected)


def _mixed_steps(run: Running, ids: list[int]) -> np.ndarray:
    first, second = run.sequence(), run.sequence()
    parts = [
        run.step((first, ids[:20])),
        run.step((first, ids[20:21]), (second, ids[:3])),
        run.step((second, ids[3:4]), (first, ids[21:22])),
    ]
    copied = scheduler.Sequence(run.sequence().cache)
    copied.cache.copy(first.cache, 22)
    copied.ids = ids[:22]
    return np.concatenate([*parts, run.step((copied, ids[22:]))])
