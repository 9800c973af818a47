"""What the experts of the models do, as a stream of events, made only while somebody watches.

`tick` comes several times a second and has the figures of the moment and the experts used since the
last one; `map` comes when a second has passed and something has changed, and has every expert's
place and heat; `state` says that the model is not open, or is open now.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.runtime.expertview import ExpertLook, ExpertView
from colibri_mmap.runtime.ram import anonymous_bytes

from .hosting import Hosting, Place
from .loaded import LoadedModel
from .problems import ApiError, encode_json

if TYPE_CHECKING:
    from colibri_mmap.runtime.vramtier import DeviceReport

TICK_SECONDS = 0.2
MAP_SECONDS = 1.0
_WINDOW_SECONDS = 10.0  # over which rates are told
_HEAT_BITS = 6
_MOST_WATCHERS = 64


@dataclass(frozen=True, slots=True)
class _Counted:
    """What had been counted at a time."""

    when: float
    tokens: int
    bytes_read: int
    wait_seconds: float
    hits: int
    misses: int
    vram_hits: int

    @classmethod
    def of(cls, model: LoadedModel) -> _Counted:
        counters = model.engine.counters()
        return cls(
            time.monotonic(),
            model.batcher.status().generated_tokens,
            counters.bytes_read,
            counters.wait_seconds,
            counters.expert_hits,
            counters.expert_misses,
            counters.vram_hits,
        )


class _Maker:
    """Makes the events of one open model."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self._view = model.engine.expert_view()
        self._history: deque[_Counted] = deque([_Counted.of(model)])
        self._map = b""
        self._map_at = 0.0

    def tick(self) -> list[bytes]:
        """The events of now; to be called in a thread."""
        look = None if self._view is None else self._view.look()
        events = [_event("tick", {**self._figures(), "used": _numbers(look)})]
        now = time.monotonic()
        if look is not None and now - self._map_at >= MAP_SECONDS:
            cells = _cells(look)
            if cells != self._map:
                self._map, self._map_at = cells, now
                events.append(self.map())
        return events

    def map(self) -> bytes:
        """The last map again, for who comes later."""
        return _event("map", {"cells": base64.b64encode(self._map).decode()})

    def _figures(self) -> dict[str, Any]:
        now, status = _Counted.of(self.model), self.model.batcher.status()
        self._history.append(now)
        while self._history[0].when < now.when - _WINDOW_SECONDS:
            self._history.popleft()
        before = self._history[0]
        tokens = now.tokens - before.tokens
        in_ram, in_vram = now.hits - before.hits, now.vram_hits - before.vram_hits
        asked = in_ram + in_vram + now.misses - before.misses
        seconds = now.when - before.when
        return {
            "speed": round(status.tokens_per_second, 3),
            "tokens": now.tokens,
            "queued": status.queued,
            "reading": status.reading,
            "decoding": status.decoding,
            "ram_share": in_ram / asked if asked else None,
            "vram_share": in_vram / asked if asked else None,
            "read": (now.bytes_read - before.bytes_read) / seconds if seconds else 0.0,
            "read_per_token": (now.bytes_read - before.bytes_read) / tokens if tokens else None,
            "anonymous": anonymous_bytes(),
            "waiting": (now.wait_seconds - before.wait_seconds) / seconds if seconds else 0.0,
        }


class _Stand:
    """The watchers of one model."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._maker: _Maker | None = None
        self._queues: set[asyncio.Queue[bytes | None]] = set()
        self._making: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def joined(self) -> Iterator[asyncio.Queue[bytes | None]]:
        """The events for one watcher; those that it is too slow for are left out, None: the end."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(maxsize=8)
        if self._maker is not None:
            queue.put_nowait(self._state())
            queue.put_nowait(self._maker.map())
        self._queues.add(queue)
        if self._making is None:
            self._making = asyncio.create_task(self._make())
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def close(self) -> None:
        """End the streams of all watchers."""
        for queue in self._queues:
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)

    async def _make(self) -> None:
        try:
            while self._queues:
                model = self._place.model
                if model is None or self._maker is None or self._maker.model is not model:
                    self._maker = None if model is None else await asyncio.to_thread(_Maker, model)
                    self._send(self._state())
                if self._maker is None:
                    await asyncio.sleep(MAP_SECONDS)
                    continue
                for event in await asyncio.to_thread(self._maker.tick):
                    self._send(event)
                await asyncio.sleep(TICK_SECONDS)
        finally:
            self._making = self._maker = None

    def _send(self, event: bytes) -> None:
        for queue in self._queues:
            with contextlib.suppress(asyncio.QueueFull):
                queue.put_nowait(event)

    def _state(self) -> bytes:
        place = self._place
        return _event("state", {"state": place.state, "stage": place.progress})


class Observatory:
    """Shows the models of a server to all who watch; for its event loop."""

    def __init__(self, hosting: Hosting) -> None:
        self._hosting = hosting
        self._stands = {place.spec.name: _Stand(place) for place in hosting.places}
        self._watchers = 0

    async def events(self, name: str) -> AsyncGenerator[bytes, None]:
        """Events about the model of this name, without end."""
        if self._watchers >= _MOST_WATCHERS:
            raise ApiError(429, f"{_MOST_WATCHERS} pages are watching already")
        stand = self._stands[self._hosting.place(name).spec.name]
        self._watchers += 1
        try:
            with stand.joined() as queue:
                while (event := await queue.get()) is not None:
                    yield event
        finally:
            self._watchers -= 1

    def close(self) -> None:
        """End all streams."""
        for stand in self._stands.values():
            stand.close()


def described(place: Place) -> dict[str, Any]:
    """What does not change while a model is open, as far as it is."""
    document: dict[str, Any] = {
        "model": place.spec.name,
        "state": place.state,
        "stage": place.progress,
        "error": place.error,
        "file": place.spec.path.name,
    }
    if place.model is None:
        return document
    engine, view = place.model.engine, place.model.engine.expert_view()
    plan = engine.memory_plan
    return {
        **document,
        "name": engine.gguf.str("general.name", ""),
        "architecture": engine.gguf.architecture,
        "bytes": sum(shard.size for shard in engine.gguf.shards),
        "context": engine.context_length,
        "threads": engine.threads,
        "arithmetic": engine.mode,
        "experts": None if view is None else _geometry(view),
        "memory": {
            "limit": plan.limit,
            "trunk": plan.trunk_bytes,
            "experts": plan.expert_budget,
        },
        "gpu": _device(engine.device_report()),
    }


def _geometry(view: ExpertView) -> dict[str, Any]:
    return {
        "layers": list(view.layers),
        "count": view.count,
        "used": view.used_per_token,
        "sizes": view.sizes[:, 0].tolist(),
    }


def _device(report: DeviceReport | None) -> dict[str, Any] | None:
    """What is on a GPU besides experts, if there is one."""
    if report is None:
        return None
    return {
        "name": report.name,
        "bytes": report.total_bytes,
        "layers": report.layers,
        "trunk": report.plan.trunk_bytes,
        "work": report.plan.kv_bytes + report.plan.scratch_bytes,
    }


def _cells(look: ExpertLook) -> bytes:
    """A byte per expert: its tier in the two high bits, the square root of its rate below."""
    most = (1 << _HEAT_BITS) - 1
    heat = np.rint(np.sqrt(np.clip(look.rates, 0, 1)) * most).astype(np.uint8)
    cells: NDArray[np.uint8] = look.tiers << np.uint8(_HEAT_BITS) | heat
    return cells.tobytes()


def _numbers(look: ExpertLook | None) -> str:
    """The numbers of the experts just used, as base64 of little-endian uint32."""
    used = np.empty(0, np.uint32) if look is None else look.used.astype("<u4")
    return base64.b64encode(used.tobytes()).decode()


def _event(name: str, document: Any) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + encode_json(document) + b"\n\n"
