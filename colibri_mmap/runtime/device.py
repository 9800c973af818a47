"""What the VRAM tier asks of a device, and the search for one.

Two backends stand behind the protocol: the GPU (cuda.py) and, for tests and the curious, host
memory (hostdevice.py). Work on a stream runs in order, asynchronously to the host and to other
streams; events order streams among one another. Memory that a running operation reads or writes
must stay allocated and, on the host's side, unchanged until an event recorded after it is done.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, ResourceError

ALIGNMENT = 256  # bytes: of device memory, and of the parts of an expert within its slot

Stream: TypeAlias = Any
"""A queue of operations; opaque, made by the backend that takes it."""

Event: TypeAlias = Any
"""A place in a stream; opaque."""

Dimensions: TypeAlias = tuple[int, int, int]
"""x, y, z: blocks of a grid or threads of a block."""

DEVICE_VARIABLE = "COLIBRI_DEVICE"  # environment: cuda, host or none instead of a search


class Address(int):
    """A place in device memory: a kernel receives it as 64 bits, a plain integer as 32."""

    __slots__ = ()


class DeviceError(ResourceError):
    """The device or its driver failed."""


class OutOfDeviceMemory(DeviceError):
    """An allocation that the device has no room for; bytes."""

    def __init__(self, device: str, wanted: int, free: int, total: int) -> None:
        self.wanted, self.free, self.total = wanted, free, total
        super().__init__(
            f"{device}: {wanted / 1e6:.1f} MB do not fit, {free / 1e6:.1f} of {total / 1e6:.1f} MB "
            "are free: close other programs that use the GPU, or give less with --vram"
        )


class ContextOutgrew(ResourceError):
    """A device has no room for the keys and values of a longer context."""


class DeviceMemory(Protocol):
    """An allocation, aligned to ALIGNMENT; `free` may be called twice."""

    @property
    def address(self) -> Address: ...
    @property
    def nbytes(self) -> int: ...
    def free(self) -> None: ...


class KernelLaunch(NamedTuple):
    """The arguments of `launch`, except the stream."""

    kernel: str
    grid: Dimensions
    block: Dimensions
    arguments: tuple[int | float, ...]


class DeviceBackend(Protocol):
    """One device. Methods may be called from any thread, but kernels launched by one at a time.

    A failing device is a DeviceError, at the latest when the host waits for the work that failed.
    """

    @property
    def name(self) -> str:
        """Model and properties, for people."""
        ...

    @property
    def kind(self) -> Literal["cuda", "host"]: ...
    @property
    def compute(self) -> Stream:
        """The stream that kernels run on."""
        ...

    def memory_info(self) -> tuple[int, int]:
        """Bytes free and in all."""
        ...

    def allocate(self, nbytes: int) -> DeviceMemory:
        """Device memory of undefined content; OutOfDeviceMemory."""
        ...

    def allocate_staging(self, nbytes: int) -> NDArray[np.uint8]:
        """Pinned host memory [nbytes]: transfers from and to it are asynchronous."""
        ...

    def stream(self) -> Stream:
        """A stream that waits for no other, for transfers."""
        ...

    def upload(self, address: int, source: NDArray[np.uint8], stream: Stream) -> None:
        """Copy contiguous host bytes to the device."""
        ...

    def download(self, target: NDArray[np.uint8], address: int, stream: Stream) -> None:
        """Copy device bytes to contiguous host memory."""
        ...

    def prepare(self, kernels: Iterable[str]) -> None:
        """Compile what these need now rather than at their first launch; seconds once a machine."""
        ...

    def launch(
        self,
        kernel: str,
        grid: Dimensions,
        block: Dimensions,
        arguments: Sequence[int | float],
        stream: Stream,
    ) -> None:
        """Run a kernel. `Address` is passed as 64 bits, int as int32, float as float32."""
        ...

    def joined(self, launches: Sequence[KernelLaunch]) -> Callable[[], None]:
        """Launches on the compute stream as one; their kernels were launched before.

        What is returned gives them to the stream, from the thread that asked for it.
        """
        ...

    def matmul(
        self,
        out: int,
        x: int,
        w: int,
        tokens: int,
        rows: int,
        columns: int,
        stream: Stream,
    ) -> None:
        """out [tokens, rows] = x [tokens, columns] @ w [rows, columns].T, float32 at addresses.

        Computed as such, not in TF32.
        """
        ...

    def record(self, stream: Stream, *, sleep: bool = False) -> Event:
        """An event that is done when all work given to the stream so far is.

        `sleep`: the host shall sleep when it waits for it, instead of watching it, which is faster.
        """
        ...

    def wait(self, stream: Stream, event: Event) -> None:
        """Later work of the stream starts after the event; the host does not wait."""
        ...

    def done(self, event: Event) -> bool: ...
    def synchronize(self, event: Event) -> None:
        """The host waits for the event."""
        ...

    def close(self) -> None:
        """Wait for all work; memory and streams may not be used any more."""
        ...


def probe(environment: Mapping[str, str] = os.environ) -> DeviceBackend | str:
    """The device to use, or in one line why there is none.

    COLIBRI_DEVICE decides where it is set: `none`, `host` (the GPU's part is played by host memory,
    slowly), or `cuda`, which is what is looked for otherwise.
    """
    wanted = environment.get(DEVICE_VARIABLE, "cuda")
    if wanted == "none":
        return f"{DEVICE_VARIABLE}=none"
    if wanted == "host":
        from .hostdevice import open_host_device

        return open_host_device()
    if wanted != "cuda":
        raise ArgumentError(f"{DEVICE_VARIABLE}={wanted}: choose cuda, host or none")
    from .cuda import open_cuda
    from .cudasources import cuda_modules

    return open_cuda(cuda_modules().values())
