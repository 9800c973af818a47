"""The page's own endpoints: the file, what is told of a model, and the stream of what it does."""

from __future__ import annotations

import base64
import json
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from serverprocess import ServerProcess

from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf

SHORT = {
    "model": "qwen",
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 12,
    "temperature": 0,
    "logit_bias": {"256": -100, "257": -100, "258": -100},
}


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Names and documents of server-sent events."""
    name = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def test_the_page_is_one_file_that_fetches_nothing(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/html")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"(src|href)=\"(?!data:)", response.text)
    assert "innerHTML" not in response.text


def test_what_is_told_of_a_model(http: httpx.Client, qwen: Path) -> None:
    http.post("/v1/chat/completions", json=SHORT).raise_for_status()
    gguf = open_gguf(qwen)
    layers = expert_layers(gguf)
    state = http.get("/api/state", params={"model": "also-qwen"}).json()
    assert (state["model"], state["state"]) == ("qwen", "loaded")
    assert state["file"] == qwen.name
    assert state["bytes"] == qwen.stat().st_size
    assert state["architecture"] == "qwen3moe"
    assert state["experts"] == {
        "layers": list(layers),
        "count": next(iter(layers.values())).n_experts,
        "used": gguf.int(".expert_used_count"),
        "sizes": [layer.expert_bytes for layer in layers.values()],
    }
    assert http.get("/api/state", params={"model": "nothing"}).status_code == 404
    assert http.get("/api/events", params={"model": "nothing"}).status_code == 404


def test_the_stream_tells_what_the_experts_do(server: ServerProcess, http: httpx.Client) -> None:
    http.post("/v1/chat/completions", json=SHORT).raise_for_status()
    experts = http.get("/api/state", params={"model": "qwen"}).json()["experts"]
    total = len(experts["layers"]) * experts["count"]
    asking = threading.Thread(
        target=httpx.post,
        args=(f"{server.url}/v1/chat/completions",),
        kwargs={"json": SHORT, "timeout": 60},
    )
    used: set[int] = set()
    cells = None
    before = tokens = None
    with httpx.stream(
        "GET", f"{server.url}/api/events", params={"model": "qwen"}, timeout=60
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        for name, event in events(response):
            if name == "map":
                cells = np.frombuffer(base64.b64decode(event["cells"]), np.uint8)
            if name == "tick":
                used |= set(np.frombuffer(base64.b64decode(event["used"]), "<u4").tolist())
                if before is None:
                    before = event["tokens"]
                    asking.start()
                tokens = event["tokens"]
                if tokens - before >= SHORT["max_tokens"] and cells is not None:
                    break
    asking.join()
    assert event["queued"] == 0
    assert event["speed"] > 0
    assert 0 < event["ram_share"] <= 1
    assert event["vram_share"] == 0
    assert cells is not None
    assert len(cells) == total
    assert set((cells >> 6).tolist()) <= {0, 1}  # there is no VRAM here
    assert used <= set(range(total))
    # Each layer has chosen its experts for each token.
    for layer in range(len(experts["layers"])):
        mine = [n for n in used if n // experts["count"] == layer]
        assert len(mine) >= experts["used"]
        assert (cells[mine] & 63 > 0).any()


def test_a_model_that_is_not_open_is_no_error(server: ServerProcess, http: httpx.Client) -> None:
    state = http.get("/api/state", params={"model": "mixtral"}).json()
    if state["state"] == "unloaded":
        assert "experts" not in state
        with httpx.stream(
            "GET", f"{server.url}/api/events", params={"model": "mixtral"}, timeout=60
        ) as response:
            name, event = next(events(response))
        assert (name, event["state"]) == ("state", "unloaded")


def test_who_watches_needs_the_key_and_holds_no_end_up(qwen: Path, tmp_path: Path) -> None:
    with ServerProcess(tmp_path, "-m", f"qwen={qwen}", "--api-key", "secret") as server:
        server.wait_for("is open")
        assert httpx.get(f"{server.url}/").status_code == 200
        assert httpx.get(f"{server.url}/api/state").status_code == 401
        assert httpx.get(f"{server.url}/api/events").status_code == 401
        key = {"authorization": "Bearer secret"}
        with httpx.stream("GET", f"{server.url}/api/events", headers=key, timeout=60) as response:
            watched = events(response)
            assert next(watched)[0] == "state"
            started = time.monotonic()
            assert server.end(signal.SIGTERM) == 0
            assert time.monotonic() - started < 4  # replies would get more, this is none
            list(watched)  # the stream ended as it should
