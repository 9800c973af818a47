"""The memory and GPU options of a command as settings of the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from colibri_mmap.cli.options import IoMode, count_or_none
from colibri_mmap.errors import ArgumentError

if TYPE_CHECKING:
    from colibri_mmap.runtime.ram import RamSettings
    from colibri_mmap.runtime.vramsettings import VramSettings

_PIN = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?:(\d{1,5})(?:-(\d{1,5}))?")


def ram_settings(
    *,
    ram: str | None,
    io: IoMode | None,
    prefetch: str,
    prefetch_threads: int,
    lfu_weight: float,
    pins: Sequence[str] | None,
    no_learn: bool,
) -> RamSettings:
    """The settings that the options of these names stand for; ArgumentError names a wrong one."""
    from colibri_mmap.runtime.ram import RamSettings

    return RamSettings(
        ram=ram,
        io=io,
        prefetch=_prefetch(prefetch),
        prefetch_threads=count_or_none(prefetch_threads),
        lfu_weight=lfu_weight,
        pin=tuple(key for text in pins or () for key in _pins(text)),
        learn=not no_learn,
    )


def vram_settings(vram: str, gpu_layers: str) -> VramSettings:
    """The settings that the options of these names stand for; ArgumentError names a wrong one."""
    from colibri_mmap.runtime.vramsettings import VramSettings

    if gpu_layers != "auto" and not gpu_layers.isdecimal():
        raise ArgumentError(f"--gpu-layers {gpu_layers}: give auto, or how many layers")
    return VramSettings(vram, None if gpu_layers == "auto" else int(gpu_layers))


def _prefetch(text: str) -> int | None:
    if text in ("off", "auto"):
        return 0 if text == "off" else None
    if not text.isdecimal():
        raise ArgumentError(f"--prefetch {text}: give off, auto, or how many experts")
    return int(text)


def _pins(text: str) -> Iterator[tuple[int, int]]:
    """(layer, expert) of one --pin: numbers or ranges, by commas."""
    for part in text.split(","):
        match = _PIN.fullmatch(part.strip())
        if match is None:
            raise ArgumentError(f"--pin {text}: expected LAYER:EXPERT, as 3:17 or 0-3:5-8")
        first_layer, last_layer, first, last = match.groups()
        for layer in range(int(first_layer), int(last_layer or first_layer) + 1):
            for expert in range(int(first), int(last or first) + 1):
                yield layer, expert
