"""What a GPU gives a whole model: prompts and replies with more and more of it there.

    python bench/gpu_engine.py model.gguf [--rounds 3] [--seconds 200] [--json out.json]

cpu         no GPU
experts     half of the experts on the GPU, all layers on the CPU
layers      all layers on the GPU, and half of the experts
all         everything

The settings take turns, each opened anew, so that what changes on the machine meets all of them.
A row has medians and, in brackets, the spread over the rounds. Half of the experts are those that
a first reply brought there. Of a token of the reply, `up` experts were uploaded and `cold` ones
were not in the CPU's memory. `strays`: by how much the logits of a prompt differ from the CPU's, in
the median and at most; `same`: how many tokens of the greedy reply are the CPU's until one differs.
COLIBRI_DEVICE=host rehearses without a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from colibri_mmap import Engine, Sampling
from colibri_mmap.format.gguf import open_gguf
from colibri_mmap.runtime.device import DeviceBackend, probe
from colibri_mmap.runtime.ram import RamSettings
from colibri_mmap.runtime.vramsettings import VramSettings
from colibri_mmap.runtime.vramtier import plan_device

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
COMPARED = 64  # tokens whose logits are compared


@dataclass(frozen=True, slots=True)
class Setting:
    """`experts`: the part of them that VRAM is given for; None: no GPU."""

    name: str
    experts: float | None
    layers: int | None = None


SETTINGS = (
    Setting("cpu", None),
    Setting("experts", 0.5, 0),
    Setting("layers", 0.5),
    Setting("all", 1.0),
)


@dataclass(slots=True)
class Results:
    """Of one setting, a number a round."""

    prompt_rate: list[float] = field(default_factory=list)  # tokens per second
    reply_rate: list[float] = field(default_factory=list)
    hit_share: list[float] = field(default_factory=list)  # of chosen experts in VRAM
    cold: list[float] = field(default_factory=list)  # experts a token that the CPU had to fetch
    uploads: list[float] = field(default_factory=list)  # a token
    open_seconds: list[float] = field(default_factory=list)
    vram_bytes: list[int] = field(default_factory=list)  # taken while replying
    planned_bytes: int = 0
    strays: tuple[float, float] = (0.0, 0.0)  # median and largest difference of logits
    same: int = 0
    error: str = ""


class Bench:
    def __init__(self, device: DeviceBackend, options: argparse.Namespace) -> None:
        self.device, self.options = device, options
        self.path = Path(options.model)
        self.context = options.prompt + 2 * options.tokens + 64
        self.results = {setting.name: Results() for setting in SETTINGS}
        gguf = open_gguf(self.path)
        self.vocabulary = gguf.tensor("token_embd.weight").shape[-1]
        self.logits: np.ndarray | None = None  # of the CPU
        self.replies: dict[int, list[int]] = {}  # of the CPU, by the round

    def gpu(self, setting: Setting) -> VramSettings:
        if setting.experts is None:
            return VramSettings("off")
        gguf, (free, total) = open_gguf(self.path), self.device.memory_info()
        usual = VramSettings("auto", setting.layers)
        plan = plan_device(gguf, free, total, usual, context=self.context, kv_type="f16").plan
        always = plan.trunk_bytes + plan.kv_bytes + plan.scratch_bytes
        size = always + int(plan.expert_bytes * setting.experts)
        self.results[setting.name].planned_bytes = size
        return VramSettings(str(size), setting.layers)

    def ids(self, seed: int, count: int) -> list[int]:
        return np.random.default_rng(seed).integers(300, self.vocabulary, count).tolist()

    def measure(self, setting: Setting, number: int) -> None:
        """One round of one setting."""
        results, options = self.results[setting.name], self.options
        memory, free = RamSettings(learn=False), self.device.memory_info()[0]
        start = time.perf_counter()
        with Engine.open(
            self.path, ctx=self.context, memory=memory, gpu=self.gpu(setting), profile=False
        ) as engine:
            results.open_seconds.append(time.perf_counter() - start)
            if setting.experts == 1:
                bring_all(engine)
            self.compare(engine, setting, results)
            for _ in engine.generate(self.ids(7, 32), options.tokens, GREEDY):
                pass  # brings experts to VRAM, and launches what is launched again
            settle(engine)
            engine.reset()
            said, times = [], []
            start = time.perf_counter()
            for token in engine.generate(
                self.ids(100 + number, options.prompt), options.tokens + 1, GREEDY
            ):
                said.append(token.id)
                times.append(time.perf_counter())
            stats = engine.stats
            results.prompt_rate.append(options.prompt / (times[0] - start))
            results.reply_rate.append(options.tokens / (times[-1] - times[0]))
            results.cold.append(stats.expert_misses / options.tokens)
            results.uploads.append(stats.vram_uploads / options.tokens)
            asked = stats.vram_hits + stats.vram_misses
            results.hit_share.append(stats.vram_hits / asked if asked else 0.0)
            results.vram_bytes.append(free - self.device.memory_info()[0])
        expected = self.replies.setdefault(number, said)
        equal = [a == b for a, b in zip(said, expected, strict=True)]
        results.same = equal.index(False) if False in equal else len(equal)

    def compare(self, engine: Engine, setting: Setting, results: Results) -> None:
        """Logits of one prompt with those of the CPU, the first time."""
        if len(results.open_seconds) > 1:
            return
        logits = engine.logits(self.ids(5, COMPARED))
        if setting.experts is None:
            self.logits = logits
        elif self.logits is not None:
            apart = np.abs(logits - self.logits).max(axis=1)
            results.strays = float(np.median(apart)), float(apart.max())

    def run(self) -> None:
        end = time.monotonic() + self.options.seconds
        for number in range(self.options.rounds):
            for setting in SETTINGS:
                results = self.results[setting.name]
                if results.error or (number and time.monotonic() > end):
                    continue
                try:
                    self.measure(setting, number)
                except Exception as error:  # the others are measured all the same
                    results.error = f"{type(error).__name__}: {error}"
                    print(f"{setting.name}: {results.error}", file=sys.stderr, flush=True)
            if number == 0 or time.monotonic() < end:
                self.report(number + 1)

    def report(self, rounds: int) -> None:
        """What is known after so many rounds."""
        options, device, model = self.options, self.device.name, self.path.name
        what = f"{options.prompt} tokens, {options.tokens} in reply, {rounds} rounds"
        print(f"{device}; {model}, {what}", *table(self.results), sep="\n", flush=True)
        if options.json:
            found = {name: asdict(results) for name, results in self.results.items()}
            text = json.dumps({"device": device, "model": model, "settings": found})
            options.json.write_text(text + "\n")


def bring_all(engine: Engine) -> None:
    """Have all experts uploaded, as if all were known to be used."""
    tier = engine._vram
    if tier is not None and tier.offload is not None:
        cache = tier.offload.cache
        cache.policy.heat += 1e-3
        cache.warm()
        cache.drain()


def settle(engine: Engine) -> None:
    """Wait until the uploads under way have arrived."""
    tier = engine._vram
    if tier is not None and tier.offload is not None:
        tier.offload.cache.drain()


def table(results: dict[str, Results]) -> Iterator[str]:
    rates = f"{'prompt tok/s':>20s} {'reply tok/s':>20s}"
    yield f"{'':8s} {rates}  hits (up, cold)  open    VRAM GB (plan)   strays"
    for name, r in results.items():
        if r.error or not r.reply_rate:
            yield f"{name:8s} {r.error or 'not measured'}"
            continue
        yield (
            f"{name:8s} {_spread(r.prompt_rate):>20s} {_spread(r.reply_rate):>20s} "
            f"{statistics.median(r.hit_share):5.0%} "
            f"({statistics.median(r.uploads):3.1f}, {statistics.median(r.cold):4.1f}) "
            f"{statistics.median(r.open_seconds):4.1f} s "
            f"{statistics.median(r.vram_bytes) / 1e9:6.2f} ({r.planned_bytes / 1e9:5.2f})   "
            f"{r.strays[0]:.0e} {r.strays[1]:.0e}, same {r.same}"
        )


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="of a reply")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=200, help="then no round is begun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = probe()
    if isinstance(device, str):
        raise SystemExit(f"no GPU: {device}")
    bench = Bench(device, options)
    bench.run()
    device.close()
    if any(results.error for results in bench.results.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
