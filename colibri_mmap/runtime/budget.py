"""From bytes of memory to what lives where: pure arithmetic, which the pager obeys."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..errors import ArgumentError, ResourceError

SLACK_EXPERTS = 24  # room for what is read before eviction has caught up

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(?:(%)|([KMGT])(?:i?B)?|B)?\s*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What lives where, in bytes.

    `limit` is what the program may use in all. The trunk, `anonymous_bytes` and `kv_bytes` are
    always in memory, and experts up to `expert_budget`, at least `least_expert_bytes`. `evict`: not
    all experts fit, so some must leave. `reserve` stays free. `notices` are for the user.
    """

    limit: int
    trunk_bytes: int
    anonymous_bytes: int
    kv_bytes: int
    expert_bytes: int
    expert_budget: int
    evict: bool
    least_expert_bytes: int
    reserve: int
    notices: tuple[str, ...] = ()

    @property
    def expert_share(self) -> float:
        """The part of the experts' bytes that fits, 0 to 1."""
        return self.expert_budget / self.expert_bytes if self.expert_bytes else 1.0


def plan_memory(
    *,
    available_bytes: int,
    trunk_bytes: int,
    expert_bytes_total: int,
    largest_expert: int,
    top_k: int,
    anonymous_bytes: int,
    kv_bytes: int,
    reserve: int,
    ram: int | None = None,
) -> MemoryPlan:
    """Divide memory; ResourceError if not even one layer's chosen experts fit beside the rest.

    `available_bytes` leaves out what others hold but counts page cache as free, `reserve` of it
    stays unused. `ram` bounds what the program uses, page cache included. Experts overshoot their
    budget briefly: what lies beyond the limit takes SLACK_EXPERTS of them, else the budget shrinks
    by what is missing.
    """
    usable = max(0, available_bytes - reserve)
    limit = usable if ram is None else min(ram, usable)
    notices = []
    if ram is not None and ram > usable:
        notices.append(
            f"--ram {_giga(ram)} is more than the {_giga(usable)} that can be used here; "
            f"going on with {_giga(usable)}"
        )
    always = trunk_bytes + anonymous_bytes + kv_bytes
    least = min(top_k * largest_expert, expert_bytes_total)
    if limit < always + least:
        bound = "--ram" if ram is not None and ram <= usable else f"{_giga(reserve)} kept free"
        raise ResourceError(
            f"the model needs {_giga(always + least)} of memory: {_giga(trunk_bytes)} of weights "
            f"that every token uses, {_giga(least)} for the experts of one layer, "
            f"{_giga(anonymous_bytes)} to compute with and {_giga(kv_bytes)} for the context; "
            f"{_giga(limit)} can be used ({bound}): "
            "free or allow more memory, or choose a smaller context with --ctx-size"
        )
    room = limit - always
    evict = expert_bytes_total > room
    if evict:
        beyond = max(0, available_bytes - limit)
        slack = max(0, SLACK_EXPERTS * largest_expert - beyond)
        budget = max(least, room - slack)
    else:
        budget = expert_bytes_total
    return MemoryPlan(
        limit=limit,
        trunk_bytes=trunk_bytes,
        anonymous_bytes=anonymous_bytes,
        kv_bytes=kv_bytes,
        expert_bytes=expert_bytes_total,
        expert_budget=budget,
        evict=evict,
        least_expert_bytes=least,
        reserve=reserve,
        notices=tuple(notices),
    )


def parse_size(text: str, whole: int) -> int:
    """Bytes of "8G", "512MiB", "1500000" or "40%" (of `whole`); ArgumentError if it is none.

    K, M, G, T count in 1024s, as they do in the limits of cgroups and containers.
    """
    match = _SIZE.fullmatch(text)
    size = 0
    if match:
        number, percent, unit = float(match[1]), match[2], match[3] or ""
        size = int(
            number / 100 * whole if percent else number * 1024 ** " KMGT".index(unit.upper())
        )
    if not size:
        raise ArgumentError(
            f"size {text!r}: give bytes, a number with K, M, G or T, or a share as 40%"
        )
    return size


def _giga(size: int) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e7 else f"{size / 1e6:.2f} MB"
