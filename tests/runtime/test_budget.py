"""Memory plans: worked examples, and promises that hold for any numbers."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_mmap.errors import ArgumentError, ResourceError
from colibri_mmap.runtime.budget import SLACK_EXPERTS, MemoryPlan, parse_size, plan_memory

MB = 10**6


def plan(**changes: int | None) -> MemoryPlan:
    """A plan of a model of 1000 experts of 2 MB, 300 MB of trunk, unless changed."""
    numbers: dict[str, int | None] = {
        "available_bytes": 1500 * MB,
        "trunk_bytes": 300 * MB,
        "expert_bytes_total": 2000 * MB,
        "largest_expert": 2 * MB,
        "top_k": 8,
        "anonymous_bytes": 100 * MB,
        "kv_bytes": 50 * MB,
        "reserve": 40 * MB,
    }
    return plan_memory(**(numbers | changes))  # type: ignore[arg-type]


def test_what_remains_goes_to_the_experts() -> None:
    # 1500 - 40 kept free - 450 always there = 1010; 24 experts of 2 MB are 48, 40 of which are free
    made = plan()
    assert (made.limit, made.expert_budget, made.evict) == (1460 * MB, 1002 * MB, True)
    assert made.expert_share == 0.501
    assert made.notices == ()


def test_a_model_that_fits_is_never_evicted() -> None:
    exactly = 2000 + 450 + 40
    assert plan(available_bytes=exactly * MB).expert_budget == 2000 * MB
    assert not plan(available_bytes=exactly * MB).evict
    assert plan(available_bytes=exactly * MB - 1).evict


def test_ram_bounds_the_program_and_leaves_room_for_overshooting() -> None:
    made = plan(available_bytes=8000 * MB, ram=1000 * MB)
    assert (made.limit, made.expert_budget) == (1000 * MB, 550 * MB)
    assert made.notices == ()


def test_ram_beyond_the_machine_is_a_notice() -> None:
    made = plan(ram=64_000 * MB)
    assert dataclasses.replace(made, notices=()) == plan()
    assert made.notices == (
        "--ram 64.00 GB is more than the 1.46 GB that can be used here; going on with 1.46 GB",
    )


def test_the_smallest_plan_and_the_refusal_below_it() -> None:
    least = 300 + 100 + 50 + 8 * 2
    made = plan(available_bytes=(least + 40) * MB)
    assert (made.expert_budget, made.evict) == (16 * MB, True)
    with pytest.raises(ResourceError) as refusal:
        plan(available_bytes=(least + 40) * MB - 1)
    for part in ("0.47 GB", "0.30 GB", "0.02 GB", "0.10 GB", "0.05 GB", "0.04 GB kept free"):
        assert part in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_refusal_tells_whether_ram_is_what_bounds() -> None:
    with pytest.raises(ResourceError, match=r"1\.00 MB can be used \(--ram\)"):
        plan(ram=MB)
    with pytest.raises(ResourceError, match=r"0\.00 MB can be used \(0\.04 GB kept free\)"):
        plan(available_bytes=MB, ram=2000 * MB)


def test_a_dense_model_needs_no_experts() -> None:
    made = plan(expert_bytes_total=0, largest_expert=0, top_k=0)
    assert (made.expert_budget, made.evict, made.expert_share) == (0, False, 1.0)


@settings(deadline=None)
@given(
    available=st.integers(0, 5000),
    trunk=st.integers(0, 500),
    experts=st.integers(1, 300),
    size=st.integers(1, 10),
    top_k=st.integers(1, 8),
    anonymous=st.integers(0, 100),
    kv=st.integers(0, 100),
    reserve=st.integers(0, 200),
    ram=st.none() | st.integers(1, 6000),
)
def test_every_plan_keeps_its_promises(
    available: int,
    trunk: int,
    experts: int,
    size: int,
    top_k: int,
    anonymous: int,
    kv: int,
    reserve: int,
    ram: int | None,
) -> None:
    total, always = experts * size, trunk + anonymous + kv
    try:
        made = plan(
            available_bytes=available,
            trunk_bytes=trunk,
            expert_bytes_total=total,
            largest_expert=size,
            top_k=top_k,
            anonymous_bytes=anonymous,
            kv_bytes=kv,
            reserve=reserve,
            ram=ram,
        )
    except ResourceError:
        usable = max(0, available - reserve)
        assert always + min(top_k * size, total) > (usable if ram is None else min(ram, usable))
        return
    assert made.limit + reserve <= available
    assert ram is None or made.limit <= ram
    assert always + made.expert_budget <= made.limit
    assert min(top_k * size, total) <= made.expert_budget <= total
    assert made.evict == (made.expert_budget < total)
    if made.evict and made.expert_budget > top_k * size:
        assert always + made.expert_budget + SLACK_EXPERTS * size <= available


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500000", 1_500_000),
        ("8G", 8 << 30),
        ("8g", 8 << 30),
        ("8GB", 8 << 30),
        ("8 GiB", 8 << 30),
        ("1.5K", 1536),
        (" 512MiB ", 512 << 20),
        ("2T", 2 << 40),
        ("12B", 12),
        ("40%", 400),
        ("12.5 %", 125),
        ("200%", 2000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, 1000) == size


@pytest.mark.parametrize(
    "text", ["", "G", "-1G", "8X", "8G%", "1e9", "0", "0%", "8 G B", "nan", "8iB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ArgumentError, match="give bytes, a number with"):
        parse_size(text, 1000)
