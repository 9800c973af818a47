"""How a GPU is used, and whether there is one to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import ArgumentError
from .budget import parse_size
from .device import DeviceBackend, probe

if TYPE_CHECKING:  # which would import numba, where only a plan is made
    from .ops import Mode


@dataclass(frozen=True, slots=True)
class VramSettings:
    """How a GPU is used; none of it changes the model.

    vram: "off", "auto" for all but a reserve if there is a GPU, or a size as "6G" or "50%" of what
    it has. gpu_layers: how many of the last blocks have attention and context there; None for as
    many as fit.
    """

    vram: str = "auto"
    gpu_layers: int | None = None

    def __post_init__(self) -> None:
        if self.gpu_layers is not None and self.gpu_layers < 0:
            raise ArgumentError(f"--gpu-layers {self.gpu_layers}: give auto, or how many layers")
        self.limit(1 << 40)

    @property
    def demanded(self) -> bool:
        """Whether a missing GPU is an error."""
        return self.vram not in ("off", "auto") or bool(self.gpu_layers)

    def limit(self, total: int) -> int | None:
        """Bytes that may be used of `total`; None: what is free but for a reserve."""
        return None if self.vram in ("off", "auto") else parse_size(self.vram, total)


def find_device(settings: VramSettings, mode: Mode) -> DeviceBackend | None:
    """The device to use, if any; ArgumentError if one was asked for that cannot be used."""
    if settings.vram == "off":
        if settings.gpu_layers:
            raise ArgumentError("--gpu-layers needs VRAM: leave out --vram off")
        return None
    found: DeviceBackend | str = "mode exact computes everything on the CPU"
    if mode == "int8":
        found = probe()
    if not isinstance(found, str):
        return found
    if settings.demanded:
        raise ArgumentError(f"no GPU can be used: {found}; leave out --vram and --gpu-layers")
    return None
