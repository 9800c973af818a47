"""Finding the settings that are fastest for a model on this machine, by measuring pairs in turn.

Each trial opens the model, reads a fixed prompt, and times a fixed number of greedy tokens; where
not all experts fit, it starts with none of them in memory. A setting is compared with the best so
far in interleaved pairs, and kept only when its median gain exceeds the spread of the gains.
Settings only move bytes: all trials compute the same tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from statistics import median

from ..errors import ArgumentError
from ..format.experts import expert_layers
from ..format.gguf import GGUF, open_gguf
from .engine import Engine
from .ops import Mode
from .processor import default_threads
from .profile import Profile, save_profile
from .ram import RamSettings
from .rates import measure_rates
from .sampling import Sampling
from .sources import IoMode
from .weights import Weights

Progress = Callable[[str, int, int], None]

_PAIRS = 3
_HOPELESS = 0.85  # a first gain below which no further pair is measured
_FEWEST_TOKENS, _MOST_TOKENS = 8, 128  # per trial; as many come before, untimed
_CONTEXT = 1024  # tokens: for the prompt and those of a trial
_PROMPT = (
    "A bird in the hand is worth two in the bush, they say, but nobody has asked the bird what it "
    "thinks of hands, of bushes, or of being counted at all."
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is varied."""

    threads: int
    io: IoMode = "mmap"
    prefetch: int = 0
    prefetch_threads: int = 2


@dataclass(frozen=True, slots=True)
class Comparison:
    """A change to the best setting so far: speeds over that one's, pair by pair; the verdict."""

    name: str
    gains: tuple[float, ...]

    @property
    def kept(self) -> bool:
        """Whether all pairs were measured and the median gain exceeds their spread."""
        spread = max(self.gains) - min(self.gains)
        return len(self.gains) == _PAIRS and median(self.gains) - 1 > spread


@dataclass(frozen=True, slots=True)
class Tuning:
    """The result; `untried` were left out when time was up or the system could not do them."""

    profile: Profile
    comparisons: tuple[Comparison, ...]
    untried: tuple[str, ...]


def tune(
    model: str | PathLike[str],
    *,
    seconds: float,
    ram: str | None = None,
    mode: Mode = "int8",
    progress: Progress,
    report: Callable[[Comparison], None],
) -> Tuning:
    """Measure the machine and compare settings for about so long; stores the profile.

    `report` is told of every comparison as soon as it is made.
    """
    deadline = time.monotonic() + seconds
    gguf = open_gguf(model)
    most = default_threads()
    rates = measure_rates(gguf, most, mode, progress)
    trials = _Trials(gguf, ram, mode)
    best = Setting(most)
    candidates = list(_candidates(best, gguf, trials.all_fit(best)))
    progress("a first trial", 0, 0)
    trials.choose_length(best, deadline - time.monotonic(), len(candidates))
    comparisons: list[Comparison] = []
    untried: list[str] = []
    for number, (name, change) in enumerate(candidates):
        progress(f"trying {name}", number, len(candidates))
        other = change(best)
        comparison = trials.compare(name, best, other, deadline)
        if comparison is None:
            untried.append(name)
            continue
        comparisons.append(comparison)
        report(comparison)
        if comparison.kept:
            best = other
    profile = Profile(
        best.threads, best.io, best.prefetch, best.prefetch_threads, rates, ram, trials.speed(best)
    )
    save_profile(gguf, profile)
    return Tuning(profile, tuple(comparisons), tuple(untried))


Change = Callable[[Setting], Setting]


def _candidates(best: Setting, gguf: GGUF, all_fit: bool) -> Iterator[tuple[str, Change]]:
    """What is tried, in this order; only the number of threads matters if all experts fit."""

    def change(**fields: object) -> Change:
        return lambda setting: replace(setting, **fields)  # type: ignore[arg-type]

    for threads in sorted({best.threads // 4, best.threads // 2, best.threads * 3 // 4} - {0}):
        if threads < best.threads:
            yield f"{threads} thread{'s' * (threads > 1)}", change(threads=threads)
    if all_fit:
        return
    yield "io direct", change(io="direct")
    fewest = min(layer.n_experts for layer in expert_layers(gguf).values())
    for count in (2, 4):
        if count < fewest:
            yield f"prefetch {count}", change(prefetch=count)
    for threads in (1, 4):
        yield f"prefetch threads {threads}", change(prefetch_threads=threads)


class _Trials:
    """Runs of one model under different settings."""

    def __init__(self, gguf: GGUF, ram: str | None, mode: Mode) -> None:
        self._gguf, self._ram, self._mode = gguf, ram, mode
        self._tokens = _FEWEST_TOKENS
        self._cold = False
        self._speeds: dict[Setting, list[float]] = {}

    def all_fit(self, setting: Setting) -> bool:
        """Whether all experts fit in memory; trials start cold if they do not."""
        with self._open(setting) as engine:
            self._cold = engine.memory_plan.evict
        return not self._cold

    def choose_length(self, setting: Setting, seconds: float, candidates: int) -> None:
        """Make trials as long as lets all candidates be compared in so many seconds."""
        started = time.monotonic()
        speed = self._run(setting)
        timed = 2 * self._tokens / speed
        beside = max(0.0, time.monotonic() - started - timed)
        share = seconds / (2 * _PAIRS * max(1, candidates)) - beside
        self._tokens = max(_FEWEST_TOKENS, min(_MOST_TOKENS, int(share * speed / 2)))
        if not self._cold:
            self._run(setting)  # brings what all trials use into memory
        self._speeds.clear()

    def compare(
        self, name: str, best: Setting, other: Setting, deadline: float
    ) -> Comparison | None:
        """Both in turn; less often if the first pair leaves no hope, None if there is no time."""
        gains: list[float] = []
        for _ in range(_PAIRS):
            if time.monotonic() > deadline:
                return None
            try:
                before, after = self._run(best), self._run(other)
            except ArgumentError:  # a file system without direct reads
                return None
            gains.append(after / before)
            if gains[0] < _HOPELESS:
                break
        return Comparison(name, tuple(gains))

    def speed(self, setting: Setting) -> float:
        """The median of what was measured, in tokens per second."""
        if setting not in self._speeds:  # there was nothing to compare it with
            self._run(setting)
        return median(self._speeds[setting])

    def _run(self, setting: Setting) -> float:
        if self._cold:
            self._forget_experts()
        with self._open(setting) as engine:
            ids = engine.tokenizer.encode(_PROMPT)
            sampling = Sampling(temperature=0.0, ignore_eos=True)
            before = self._generate(engine, ids, sampling)
            self._generate(engine, before, sampling)
            speed = engine.stats.decode_tokens_per_second
        self._speeds.setdefault(setting, []).append(speed)
        return speed

    def _generate(self, engine: Engine, ids: Sequence[int], sampling: Sampling) -> list[int]:
        tokens = engine.generate(ids, max_tokens=self._tokens, sampling=sampling)
        return [*ids, *(token.id for token in tokens)]

    def _open(self, setting: Setting) -> Engine:
        memory = RamSettings(
            ram=self._ram,
            io=setting.io,
            prefetch=setting.prefetch,
            prefetch_threads=setting.prefetch_threads,
            learn=False,
        )
        return Engine.open(
            self._gguf.path,
            mode=self._mode,
            threads=setting.threads,
            ctx=_CONTEXT,
            memory=memory,
            profile=False,
        )

    def _forget_experts(self) -> None:
        """Let the page cache forget all experts."""
        weights = Weights(self._gguf)
        try:
            for layer in weights.expert_layers.values():
                for expert in range(layer.n_experts):
                    for extent in layer.extents(expert):
                        weights.files[extent.shard].evict(extent.offset, extent.nbytes)
        finally:
            weights.close()
