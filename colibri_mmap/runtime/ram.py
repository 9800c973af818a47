"""Opening the RAM tier of a model: what may stay in memory, and where experts are read from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..errors import ArgumentError
from ..format.gguf import GGUF
from .budget import MemoryPlan, parse_size, plan_memory
from .limits import MemoryLimits, memory_limits
from .pager import ExpertPager
from .policy import ExpertPolicy, Key
from .sources import BufferedExperts, ExpertNumbers, ExpertSource, IoMode, MappedExperts
from .trunk import Range, Trunk, mark_embedding, may_lock, trunk_ranges
from .weights import Weights

IO_MODES = ("mmap", "pread", "direct")
_ANONYMOUS_BYTES = 256 << 20  # code, tables, and the temporaries of a prefill chunk; measured
_SMALL_RESERVE, _LARGE_RESERVE = 64 << 20, 1 << 30


@dataclass(frozen=True, slots=True)
class RamSettings:
    """How memory is used; none of it changes a result.

    ram: for the whole process, as "8G" or "40%" of what there is; None for what the machine leaves.
    io: how experts are read. lfu_weight: frequency against recency in what is kept, 0 to 1.
    pin: (layer, expert) that stay. prefetch: experts of the next layer to guess and read while the
    disk would idle. prefetch_threads: how many wait for the disk.
    """

    ram: str | None = None
    io: IoMode = "mmap"
    prefetch: int = 0
    prefetch_threads: int = 2
    lfu_weight: float = 0.3
    pin: tuple[Key, ...] = ()

    def __post_init__(self) -> None:
        if self.io not in IO_MODES:
            raise ArgumentError(f"--io {self.io}: choose {', '.join(IO_MODES)}")
        if not 1 <= self.prefetch_threads <= 64:
            raise ArgumentError(f"--prefetch-threads {self.prefetch_threads}: choose 1 to 64")
        if not 0 <= self.lfu_weight <= 1:
            raise ArgumentError(f"--lfu-weight {self.lfu_weight}: choose 0 to 1")


@dataclass(frozen=True, slots=True)
class RamTier:
    """The open RAM tier of a model; a model without experts has no pager."""

    plan: MemoryPlan
    limits: MemoryLimits
    trunk: Trunk
    pager: ExpertPager | None
    notices: tuple[str, ...]
    shared_bytes: int  # for experts and everything anonymous together

    def maintain(self) -> None:
        """Give the experts what the program's own memory leaves, which the plan could only guess,
        and compare the pager's book with the page cache; to be called every few tokens."""
        if self.pager is not None:
            self.pager.audit()
        if self.plan.evict and self.pager is not None and not self.pager.source.is_buffer:
            self.pager.policy.budget = max(
                self.plan.least_expert_bytes, self.shared_bytes - _anonymous_now()
            )

    def close(self) -> None:
        """End all threads."""
        self.trunk.close()
        if self.pager is not None:
            self.pager.close()


def plan_ram(
    weights: Weights, trunk: list[Range], kv_bytes: int, ram: str | None, limits: MemoryLimits
) -> MemoryPlan:
    """What of a model lives where, for `kv_bytes` of context, within `limits` and `ram`."""
    layers = weights.expert_layers.values()
    sizes = [layer.expert_bytes for layer in layers]
    total = sum(layer.expert_bytes * layer.n_experts for layer in layers)
    reserve = min(max(_SMALL_RESERVE, limits.total * 3 // 100), _LARGE_RESERVE)
    return plan_memory(
        available_bytes=limits.available,
        trunk_bytes=sum(r.nbytes for r in trunk),
        expert_bytes_total=total,
        largest_expert=max(sizes, default=0),
        top_k=weights.gguf.int(".expert_used_count", 0),
        anonymous_bytes=max(0, _ANONYMOUS_BYTES - _anonymous_now()),
        kv_bytes=kv_bytes,
        reserve=reserve,
        ram=None if ram is None else parse_size(ram, limits.total),
    )


def open_ram_tier(weights: Weights, kv_bytes: int, settings: RamSettings) -> RamTier:
    """Plan, start reading the trunk, and make the pager of the experts."""
    limits = memory_limits()
    ranges = trunk_ranges(weights.gguf)
    oversized = not weights.expert_layers and sum(r.nbytes for r in ranges) > limits.available
    if oversized:  # a dense model: every byte is read for every token, whatever is kept
        ranges = []
    plan = plan_ram(weights, ranges, kv_bytes, settings.ram, limits)
    notices = list(plan.notices)
    if oversized:
        notices.append("the model is dense and larger than memory: each token reads all of it")
    lock = plan.evict and may_lock(plan.trunk_bytes)
    if plan.evict and not lock:
        notices.append(
            f"the {plan.trunk_bytes / 1e6:.0f} MB of weights that every token uses cannot be "
            "locked in memory; raise the limit with ulimit -l or LimitMEMLOCK to keep them there"
        )
    mark_embedding(weights.gguf, weights.files)
    trunk = Trunk(weights.files, ranges, lock=lock)
    pager = _open_pager(weights, plan, settings) if weights.expert_layers else None
    own = plan.anonymous_bytes + plan.kv_bytes + _anonymous_now()
    return RamTier(plan, limits, trunk, pager, tuple(notices), plan.expert_budget + own)


def _open_pager(weights: Weights, plan: MemoryPlan, settings: RamSettings) -> ExpertPager:
    layers = weights.expert_layers
    numbers = ExpertNumbers(tuple(layers), max(layer.n_experts for layer in layers.values()))
    source: ExpertSource
    if settings.io == "mmap":
        source = MappedExperts(numbers, layers, weights.files)
    else:
        direct = settings.io == "direct"
        source = BufferedExperts(numbers, layers, weights.files, plan.expert_budget, direct=direct)
    policy = ExpertPolicy(
        source.sizes.reshape(len(numbers.layers), numbers.count),
        plan.expert_budget if plan.evict else int(source.sizes.sum()),
        settings.lfu_weight,
        [_pinned(weights.gguf, numbers, key) for key in settings.pin],
    )
    return ExpertPager(
        numbers, source, policy, threads=settings.prefetch_threads, distrusts=plan.evict
    )


def _pinned(gguf: GGUF, numbers: ExpertNumbers, key: Key) -> Key:
    layer, expert = key
    if layer not in numbers.layers or not 0 <= expert < numbers.count:
        raise ArgumentError(
            f"--pin {layer}:{expert}: {gguf.path.name} has experts 0 to {numbers.count - 1} in "
            f"layers {numbers.layers[0]} to {numbers.layers[-1]}"
        )
    return numbers.layers.index(layer), expert


def _anonymous_now() -> int:
    """Anonymous memory of this process so far, in bytes; 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:")]
    return found[0] if found else 0
