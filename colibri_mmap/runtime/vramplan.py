"""From bytes of VRAM to what lives there: pure arithmetic, which `plan` prints."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ResourceError

LEAST_RESERVE = 256 << 20
RESERVE_SHARE = 20  # one part in so many of the device stays free


@dataclass(frozen=True, slots=True)
class VramPlan:
    """What lives where, in bytes: the trunk's layers, their KV, room to compute in, experts.

    `limit` is what the program may use in all, `reserve` stays free. `notices` are for the user.
    """

    limit: int
    trunk_bytes: int
    kv_bytes: int
    scratch_bytes: int
    expert_bytes: int
    expert_budget: int
    reserve: int
    notices: tuple[str, ...] = ()

    @property
    def expert_share(self) -> float:
        """The part of the experts' bytes that fits, 0 to 1."""
        return self.expert_budget / self.expert_bytes if self.expert_bytes else 1.0


def default_reserve(total: int) -> int:
    """What is left to the desktop, the driver and fragments of a device of `total` bytes."""
    return max(LEAST_RESERVE, total // RESERVE_SHARE)


def plan_vram(
    *,
    free: int,
    total: int,
    trunk_bytes: int = 0,
    kv_bytes: int = 0,
    scratch_bytes: int = 0,
    expert_bytes: int,
    vram: int | None = None,
    reserve: int | None = None,
) -> VramPlan:
    """Divide the device's memory; ResourceError if what must be there does not fit.

    `free` of `total` bytes are not in use. `vram` bounds what this program takes.
    """
    kept = default_reserve(total) if reserve is None else reserve
    usable = max(0, free - kept)
    limit = usable if vram is None else min(vram, usable)
    notices = []
    if vram is not None and vram > usable:
        notices.append(
            f"--vram {_giga(vram)} is more than the {_giga(usable)} that can be used here "
            f"({_giga(free)} of {_giga(total)} free, {_giga(kept)} kept so); "
            f"going on with {_giga(usable)}"
        )
    always = trunk_bytes + kv_bytes + scratch_bytes
    if limit < always:
        bound = "--vram" if vram is not None and vram <= usable else f"{_giga(kept)} kept free"
        raise ResourceError(
            f"the GPU needs {_giga(always)}: {_giga(trunk_bytes)} of weights, {_giga(kv_bytes)} "
            f"for the context and {_giga(scratch_bytes)} to compute with; {_giga(limit)} of "
            f"{_giga(total)} can be used ({bound}): lower --gpu-layers or --ctx-size, or free "
            "VRAM by closing other programs"
        )
    return VramPlan(
        limit=limit,
        trunk_bytes=trunk_bytes,
        kv_bytes=kv_bytes,
        scratch_bytes=scratch_bytes,
        expert_bytes=expert_bytes,
        expert_budget=min(limit - always, expert_bytes),
        reserve=kept,
        notices=tuple(notices),
    )


def _giga(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
