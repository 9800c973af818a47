"""Many clients at once, some of which hang up: what they get, and what is left of them.

python tests/server/soak.py MODEL.gguf --seconds 120 --clients 50
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx
from serverprocess import ServerProcess

PROMPTS = (
    "Tell me",
    "Once upon a time",
    "What is it?",
    "Count with me: 1 2 3",
    "Good morning " * 40,
)
LENGTHS = (1, 7, 24, 48)
_BUSY = 429


@dataclass(slots=True)
class Footprint:
    """What a process holds of the machine."""

    threads: int
    files: int
    resident_bytes: int

    @classmethod
    def of(cls, process: int) -> Footprint:
        status = Path(f"/proc/{process}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return cls(
            int(fields["Threads"]),
            len(list(Path(f"/proc/{process}/fd").iterdir())),
            int(fields["VmRSS"].split()[0]) * 1024,
        )


@dataclass(slots=True)
class Report:
    """What happened; footprints are taken every half a second, the idle ones without clients."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    footprints: list[Footprint] = field(default_factory=list)
    idle_before: Footprint | None = None
    idle_after: Footprint | None = None
    slowest: float = 0.0

    @property
    def growth(self) -> float:
        """Memory in the last quarter of the time against the second one."""
        quarter = len(self.footprints) // 4
        early, late = self.footprints[quarter : 2 * quarter], self.footprints[-quarter:]
        return median(f.resident_bytes for f in late) / median(f.resident_bytes for f in early)


def body(prompt: str, tokens: int, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": prompt}]
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream}


class Soak:
    """Clients of one server for some time."""

    def __init__(self, server: ServerProcess, seconds: float, clients: int, seed: int) -> None:
        self._server, self._seconds, self._clients = server, seconds, clients
        self._random = random.Random(seed)
        self._expected: dict[tuple[str, int], str] = {}
        self.report = Report()

    async def run(self) -> Report:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self.report.idle_before = Footprint.of(self._server.process.pid)
        async with httpx.AsyncClient(
            base_url=self._server.url, timeout=120, limits=limits
        ) as client:
            for prompt in PROMPTS:  # each alone
                for tokens in LENGTHS:
                    self._expected[prompt, tokens] = await self._whole(client, prompt, tokens)
            end = time.monotonic() + self._seconds
            watching = asyncio.create_task(self._watch())
            await asyncio.gather(*(self._client(client, end) for _ in range(self._clients)))
            watching.cancel()
        await self._idle(self.report.idle_before.files)
        return self.report

    async def _watch(self) -> None:
        while True:
            self.report.footprints.append(Footprint.of(self._server.process.pid))
            await asyncio.sleep(0.5)

    async def _idle(self, most_files: int) -> None:
        """Wait until nothing is worked on and no connection open; what is stuck ends the test."""
        async with asyncio.timeout(60):
            while True:
                async with httpx.AsyncClient(base_url=self._server.url, timeout=60) as client:
                    text = (await client.get("/metrics")).text
                busy = [
                    line
                    for line in text.splitlines()
                    if line.startswith(("colibri_active_seq", "colibri_queued"))
                    and not line.endswith(" 0.0")
                ]
                await asyncio.sleep(0.02)
                self.report.idle_after = Footprint.of(self._server.process.pid)
                if not busy and self.report.idle_after.files <= most_files:
                    return

    async def _client(self, client: httpx.AsyncClient, end: float) -> None:
        while time.monotonic() < end:
            prompt, tokens = self._random.choice(PROMPTS), self._random.choice(LENGTHS)
            began = time.monotonic()
            try:
                match self._random.randrange(5):
                    case 0:
                        said = await self._left(client, prompt, tokens)
                    case 1:
                        said = await self._given_up(client, prompt, tokens)
                    case 2 | 3:
                        said = await self._streamed(client, prompt, tokens)
                    case _:
                        said = await self._whole(client, prompt, tokens)
            except httpx.HTTPStatusError as error:
                if error.response.status_code != _BUSY:
                    raise
                self.report.outcomes["busy"] += 1
                await asyncio.sleep(self._random.random())
                continue
            self.report.slowest = max(self.report.slowest, time.monotonic() - began)
            if said is None:
                self.report.outcomes["left"] += 1
            else:
                self.report.outcomes["answered"] += 1
                if said != self._expected[prompt, tokens]:
                    self.report.wrong.append(said)

    # -------------------------------------------------------------------------- kinds of clients
    async def _whole(self, client: httpx.AsyncClient, prompt: str, tokens: int) -> str:
        reply = await client.post("/v1/chat/completions", json=body(prompt, tokens, False))
        reply.raise_for_status()
        return reply.json()["choices"][0]["message"]["content"]

    async def _streamed(
        self, client: httpx.AsyncClient, prompt: str, tokens: int, most: int | None = None
    ) -> str | None:
        """A stream; only the first events of it, with `most`."""
        said, events = "", 0
        request = body(prompt, tokens, True)
        async with client.stream("POST", "/v1/chat/completions", json=request) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                said += json.loads(line[6:])["choices"][0]["delta"].get("content", "")
                events += 1
                if events == most:
                    return None
        return said

    async def _left(self, client: httpx.AsyncClient, prompt: str, tokens: int) -> str | None:
        most = self._random.randint(1, tokens)
        return await self._streamed(client, prompt, tokens, most)

    async def _given_up(self, client: httpx.AsyncClient, prompt: str, tokens: int) -> str | None:
        try:
            async with asyncio.timeout(self._random.random() * 0.5):
                return await self._whole(client, prompt, tokens)
        except TimeoutError:
            return None


def soak(server: ServerProcess, *, seconds: float, clients: int, seed: int = 1) -> Report:
    """Let clients loose on a server."""
    return asyncio.run(Soak(server, seconds, clients, seed).run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--clients", type=int, default=50)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as state,
        ServerProcess(Path(state), "-m", options.model, "--cache-ram", "4M") as server,
    ):
        server.wait_for("is open")
        report = soak(server, seconds=options.seconds, clients=options.clients)
    print(f"{dict(report.outcomes)}, {len(report.wrong)} wrong, slowest {report.slowest:.1f} s")
    print(f"idle before {report.idle_before}, after {report.idle_after}")
    print(f"memory in the last quarter against the second: {report.growth:.3f}")


if __name__ == "__main__":
    main()
