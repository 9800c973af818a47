"""K and V of the layers on a device: a mirror of a sequence's cache, grown as it is needed.

The bytes of a KV head are those of the host's cache (kernels/attention.py), so that a cache goes
from one to the other by plain copies; only the distance between heads differs while the device has
room for fewer positions.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from .arena import Rows
from .device import ContextOutgrew, DeviceBackend, DeviceError, DeviceMemory, OutOfDeviceMemory
from .kv import KVCache, LayerCache
from .snapshots import rounded
from .trunkkernels import PLACE_WORDS, copy_rows

_LEAST_POSITIONS = 1024  # that are made room for at a time


class _DeviceLayer:
    """K, then V, of one layer on the device, with room for `positions`."""

    def __init__(self, host: LayerCache, size: int) -> None:
        self.host, self.positions = host, 0
        self._size = size
        self.memory: DeviceMemory | None = None

    def rows(self) -> tuple[int, int]:
        """Bytes of a position in a head of K, and of V."""
        shape = self.host.shape
        return shape.key_size * self._size, shape.padded_value_size * self._size

    def nbytes(self, positions: int) -> int:
        return self.host.shape.heads * positions * sum(self.rows())

    def parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Of K and of V: address on the device, on the host, and the strides of a head on both."""
        assert self.memory is not None
        (key_row, value_row), heads = self.rows(), self.host.shape.heads
        address = int(self.memory.address)
        keys = self.positions * key_row
        yield address, self.host.keys, keys, self.host.key_head_stride
        values = address + heads * keys
        yield values, self.host.values, self.positions * value_row, self.host.value_head_stride

    def place(self) -> tuple[int, ...]:
        """The words of the struct Place in cuda/cache.cuh."""
        (keys, _, key_stride, _), (values, _, value_stride, _) = self.parts()
        return keys, values, key_stride, value_stride, self.positions


class DeviceCache:
    """The part of one KVCache that lies on a device; one of the cache's `mirrors`.

    Memory is freed with the last reference.
    """

    def __init__(self, backend: DeviceBackend, cache: KVCache, layers: Iterable[int]) -> None:
        self._backend, self._context = backend, cache.context
        size = 2 if cache.kv_type == "f16" else 4
        self._layers = [_DeviceLayer(cache.layers[layer], size) for layer in layers]
        self.places = np.zeros((len(self._layers), PLACE_WORDS), np.uint64)
        self._on_host = 0  # the host has these positions as the device has them
        self._end = weakref.finalize(self, _free, backend, self._layers)
        self._end.atexit = False  # the device may be gone by then

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens; ContextOutgrew where the device has none."""
        for index, layer in enumerate(self._layers):
            most = layer.host.positions
            if layer.positions < min(length, most):
                wanted = max(length, 2 * layer.positions, _LEAST_POSITIONS)
                self._grow(layer, min(-(-wanted // 64) * 64, most))
                self.places[index] = layer.place()

    def _grow(self, layer: _DeviceLayer, positions: int) -> None:
        try:
            memory = self._backend.allocate(layer.nbytes(positions))
        except OutOfDeviceMemory as error:
            raise ContextOutgrew(
                f"the GPU has no room for {positions} tokens of context: choose a smaller "
                f"--ctx-size, or fewer --gpu-layers ({error})"
            ) from error
        before, old = layer.memory, list(layer.parts()) if layer.memory else []
        layer.memory, layer.positions = memory, positions
        for (source, _, source_stride, _), (target, _, stride, _) in zip(
            old, layer.parts(), strict=False
        ):
            heads, width = layer.host.shape.heads, source_stride // 4
            launch = copy_rows(
                Rows(source, heads, width), Rows(target, heads, width, stride - source_stride)
            )
            self._backend.launch(*launch, self._backend.compute)
        if before is not None:
            self._finish()
            before.free()

    def close(self) -> None:
        """Give the memory back; safe to call twice."""
        self._end()

    def written(self, position: int) -> None:
        """A step writes from `position` on: the host does not have that."""
        self._on_host = min(self._on_host, position)

    # ------------------------------------------------------------------------------ Mirror
    def to_host(self, length: int) -> None:
        """Bring what belongs to the first `length` tokens into the host's cache."""
        if length > self._on_host:
            backend = self._backend
            self._transfer(
                self._on_host,
                length,
                lambda host, device: backend.download(host, device, backend.compute),
            )
        self._on_host = max(length, self._on_host)

    def to_device(self, length: int) -> None:
        """Take what belongs to the first `length` tokens from the host's cache."""
        self.reserve(length)
        backend = self._backend
        self._transfer(
            0, length, lambda host, device: backend.upload(device, host, backend.compute)
        )
        self._on_host = length

    def _transfer(
        self, start: int, length: int, copy: Callable[[NDArray[np.uint8], int], None]
    ) -> None:
        """Copy positions [start, length) of every layer; all that a layer with a window has."""
        for layer in self._layers:
            windowed = layer.host.shape.window
            first = 0 if windowed else start // 16 * 16
            last = min(rounded(length), layer.positions)
            for (device, host, stride, host_stride), row in zip(
                layer.parts(), layer.rows(), strict=True
            ):
                for head in range(layer.host.shape.heads if last > first else 0):
                    offset, nbytes = first * row, (last - first) * row
                    memory = (ctypes.c_uint8 * nbytes).from_address(
                        host + head * host_stride + offset
                    )
                    view = np.frombuffer(memoryview(memory), np.uint8)
                    copy(view, device + head * stride + offset)
        self._finish()

    def _finish(self) -> None:
        self._backend.synchronize(self._backend.record(self._backend.compute))


def _free(backend: DeviceBackend, layers: list[_DeviceLayer]) -> None:
    """Give the memory back once nothing that was launched can use it."""
    with suppress(DeviceError):  # it has been told already
        backend.synchronize(backend.record(backend.compute))
    for layer in layers:
        if layer.memory is not None:
            layer.memory.free()
