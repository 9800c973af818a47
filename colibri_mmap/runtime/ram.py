"""Opening the RAM tier of a model: what may stay in memory, and where experts are read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from ..format.experts import ExpertLayer
from ..format.gguf import GGUF
from ..quantities import byte_size
from .budget import MemoryPlan, parse_size, plan_memory
from .learning import Learning
from .limits import MemoryLimits, memory_limits
from .pager import ExpertPager
from .policy import ExpertPolicy, Key
from .profile import Profile
from .sources import IO_MODES, BufferedExperts, ExpertNumbers, ExpertSource, IoMode, MappedExperts
from .trunk import Range, Trunk, mark_embedding, may_lock, trunk_ranges
from .usage import Usage, load_usage

if TYPE_CHECKING:
    from .weights import Weights  # `plan` does without the kernels behind it

PLANNED_CONTEXT = 4096  # tokens of context that memory is kept for, unless told how many
_ANONYMOUS_BYTES = 256 << 20  # code, tables, and the temporaries of a prefill chunk; measured
_PREFETCH_THREADS = 2
# Pages of the interpreter, numpy, numba and LLVM, measured 123 to 152 MB. They are page cache too:
# pushed out, each step would fault on them, and with a large read-ahead read megabytes around each.
_CODE_BYTES = 144 << 20
_SMALL_RESERVE, _LARGE_RESERVE = 64 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class RamSettings:
    """How memory is used; none of it changes a result.

    ram: for the whole process, as "8G" or "40%" of what there is; None for what the machine leaves.
    io: how experts are read (mmap). lfu_weight: frequency against recency in what is kept, 0 to 1.
    pin: (layer, expert) that stay. prefetch: experts of the next layer to guess and read while the
    disk would idle (0). prefetch_threads: how many wait for the disk (2). learn: count the uses of
    experts over all runs, and start from what is known of them. None stands for what `tune` found
    best, or the default in brackets.
    """

    ram: str | None = None
    io: IoMode | None = None
    prefetch: int | None = None
    prefetch_threads: int | None = None
    lfu_weight: float = 0.3
    pin: tuple[Key, ...] = ()
    learn: bool = True

    def __post_init__(self) -> None:
        if self.io is not None and self.io not in IO_MODES:
            raise ArgumentError(f"--io {self.io}: choose {', '.join(IO_MODES)}")
        if self.prefetch is not None and self.prefetch < 0:
            raise ArgumentError(f"--prefetch {self.prefetch}: give off, auto, or how many experts")
        if self.prefetch_threads is not None and not 1 <= self.prefetch_threads <= 64:
            raise ArgumentError(f"--prefetch-threads {self.prefetch_threads}: choose 1 to 64")
        if not 0 <= self.lfu_weight <= 1:
            raise ArgumentError(f"--lfu-weight {self.lfu_weight}: choose 0 to 1")

    def tuned(self, profile: Profile | None) -> RamSettings:
        """These settings; what they leave open is as in the profile."""
        if profile is None:
            return self
        return replace(
            self,
            io=self.io or profile.io,
            prefetch=profile.prefetch if self.prefetch is None else self.prefetch,
            prefetch_threads=self.prefetch_threads or profile.prefetch_threads,
        )


@dataclass(frozen=True, slots=True)
class RamTier:
    """The open RAM tier of a model; a model without experts has no pager."""

    plan: MemoryPlan
    limits: MemoryLimits
    trunk: Trunk
    pager: ExpertPager | None
    learning: Learning | None
    opening_notices: tuple[str, ...]
    shared_bytes: int  # for experts and everything anonymous together

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user should know, complete when the trunk was waited for."""
        if not self.plan.evict or self.trunk.locked:
            return self.opening_notices
        return (
            *self.opening_notices,
            f"the {byte_size(self.plan.trunk_bytes)} of weights that every token uses cannot be "
            "locked in memory; raise the limit with ulimit -l or LimitMEMLOCK to keep them there",
        )

    @property
    def sequence_room(self) -> int:
        """What all sequences may take, where mapped experts give way down to the least."""
        plan = self.plan
        buffered = self.pager is not None and self.pager.source.is_buffer
        experts = plan.expert_budget if buffered else plan.least_expert_bytes
        return plan.limit - plan.trunk_bytes - plan.anonymous_bytes - experts

    def maintain(self) -> None:
        """Give the experts what the program's own memory leaves, which the plan could only guess,
        and compare the pager's book with the page cache; to be called every few tokens."""
        if self.learning is not None:
            self.learning.save_now_and_then()
        if self.pager is not None:
            self.pager.audit()
        if self.plan.evict and self.pager is not None and not self.pager.source.is_buffer:
            self.pager.policy.budget = max(
                self.plan.least_expert_bytes, self.shared_bytes - anonymous_bytes()
            )

    def close(self) -> None:
        """End all threads and keep what was learned."""
        self.trunk.close()
        if self.pager is not None:
            self.pager.close()
        if self.learning is not None:
            self.learning.save()


def plan_ram(
    gguf: GGUF,
    layers: Mapping[int, ExpertLayer],
    trunk: list[Range],
    kv_bytes: int,
    ram: str | None,
    limits: MemoryLimits,
) -> MemoryPlan:
    """What of a model lives where, for `kv_bytes` of context, within `limits` and `ram`."""
    sizes = [layer.expert_bytes for layer in layers.values()]
    total = sum(layer.expert_bytes * layer.n_experts for layer in layers.values())
    held = anonymous_bytes()
    reserve = min(max(_SMALL_RESERVE, limits.total * 3 // 100), _LARGE_RESERVE)
    return plan_memory(
        available_bytes=limits.available + held,  # what is held now is part of the plan
        trunk_bytes=sum(r.nbytes for r in trunk),
        expert_bytes_total=total,
        largest_expert=max(sizes, default=0),
        top_k=gguf.int(".expert_used_count", 0),
        anonymous_bytes=max(_ANONYMOUS_BYTES, held),
        kv_bytes=kv_bytes,
        reserve=reserve + _CODE_BYTES,
        ram=None if ram is None else parse_size(ram, limits.total),
    )


def resident_trunk(
    gguf: GGUF, layers: Mapping[int, ExpertLayer], limits: MemoryLimits
) -> list[Range]:
    """The trunk, or nothing for a dense model larger than memory: each token reads all of it."""
    ranges = trunk_ranges(gguf)
    oversized = not layers and sum(r.nbytes for r in ranges) > limits.available
    return [] if oversized else ranges


def open_ram_tier(weights: Weights, kv_bytes: int, settings: RamSettings) -> RamTier:
    """Plan, start reading the trunk, and make the pager of the experts."""
    limits, gguf, layers = memory_limits(), weights.gguf, weights.expert_layers
    if not layers and (settings.pin or settings.prefetch or settings.io not in (None, "mmap")):
        raise ArgumentError(
            f"{gguf.path}: has no experts, so --pin, --prefetch and --io make no sense: leave them "
            "out"
        )
    ranges = resident_trunk(gguf, layers, limits)
    plan = plan_ram(gguf, layers, ranges, kv_bytes, settings.ram, limits)
    notices = list(plan.notices)
    if not ranges:
        notices.append("the model is dense and larger than memory: each token reads all of it")
    lock = plan.evict and may_lock(plan.trunk_bytes)
    mark_embedding(gguf, weights.files)
    trunk = Trunk(weights.files, ranges, lock=lock)
    try:
        usage = load_usage(gguf) if settings.learn and layers else None
        pager = _open_pager(weights, plan, settings, usage) if layers else None
    except BaseException:
        trunk.close()
        raise
    learning = None
    if usage is not None and pager is not None:
        notices += usage.notices
        learning = Learning(gguf, pager)
        learning.warm(usage)
    own = plan.anonymous_bytes + plan.kv_bytes
    return RamTier(plan, limits, trunk, pager, learning, tuple(notices), plan.expert_budget + own)


def _open_pager(
    weights: Weights, plan: MemoryPlan, settings: RamSettings, usage: Usage | None
) -> ExpertPager:
    layers = weights.expert_layers
    numbers = ExpertNumbers(tuple(layers), max(layer.n_experts for layer in layers.values()))
    if (settings.prefetch or 0) > numbers.count:
        raise ArgumentError(
            f"--prefetch {settings.prefetch}: a layer has {numbers.count} experts, choose fewer"
        )
    source: ExpertSource
    io = settings.io or "mmap"
    if io == "mmap":
        source = MappedExperts(numbers, layers, weights.files)
    else:
        budget = plan.expert_budget
        source = BufferedExperts(numbers, layers, weights.files, budget, direct=io == "direct")
    sizes = source.sizes.reshape(len(numbers.layers), numbers.count)
    pinned = [_pinned(weights.gguf, numbers, key) for key in settings.pin]
    room = plan.expert_budget - plan.least_expert_bytes
    if plan.evict and sum(int(sizes[key]) for key in set(pinned)) > room:
        raise ArgumentError(
            f"--pin: {len(set(pinned))} experts do not fit in the {room / 1e9:.2f} GB that memory "
            "leaves for them: pin fewer, or allow more with --ram"
        )
    policy = ExpertPolicy(
        sizes,
        plan.expert_budget if plan.evict else int(source.sizes.sum()),
        settings.lfu_weight,
        pinned,
        None if usage is None else usage.rates()[list(numbers.layers)],
    )
    return ExpertPager(
        numbers,
        source,
        policy,
        threads=settings.prefetch_threads or _PREFETCH_THREADS,
        distrusts=plan.evict,
    )


def _pinned(gguf: GGUF, numbers: ExpertNumbers, key: Key) -> Key:
    layer, expert = key
    if layer not in numbers.layers or not 0 <= expert < numbers.count:
        raise ArgumentError(
            f"--pin {layer}:{expert}: {gguf.path.name} has experts 0 to {numbers.count - 1} in "
            f"layers {numbers.layers[0]} to {numbers.layers[-1]}"
        )
    return numbers.layers.index(layer), expert


def anonymous_bytes() -> int:
    """Anonymous memory of this process so far, in bytes; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else 0
