"""Models that are opened and closed while requests come and go."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from appserver import AppServer, opener

from colibri_mmap.errors import FormatError
from colibri_mmap.server.app import Settings
from colibri_mmap.server.loaded import Serving

BODY = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}


def ask(url: str, model: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/chat/completions", json={**BODY, "model": model}, timeout=60)


def states(url: str) -> dict[str, str]:
    listed = httpx.get(f"{url}/v1/models", timeout=60).json()["data"]
    return {model["id"]: model["state"] for model in listed}


class Gate:
    """Openings wait here until they are let through."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.waiting = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def __call__(self, name: str) -> None:
        self.opened.append(name)
        self.waiting.release()
        assert self.passes.acquire(timeout=60)


def test_health_says_that_the_model_is_loading(qwen: Path) -> None:
    gate = Gate()
    with AppServer({"a": qwen}, opener(gate)) as server:
        assert gate.waiting.acquire(timeout=60)
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert states(server.url) == {"a": "loading"}
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask, server.url, "a") for _ in range(4)]
            gate.passes.release()
            assert {request.result().status_code for request in asked} == {200}
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert (health.status_code, health.json()["status"]) == (200, "ok")
    assert gate.opened == ["a"]  # once, for all of them


def test_the_model_unused_for_longest_makes_room(qwen: Path, mixtral: Path) -> None:
    opened: list[str] = []
    models = {"a": qwen, "b": mixtral, "c": qwen}
    with AppServer(models, opener(opened.append), Settings(most_loaded=2)) as server:
        for name in ("a", "b", "a", "c"):
            assert ask(server.url, name).status_code == 200
        assert states(server.url) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert ask(server.url, "b").status_code == 200
        assert states(server.url) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
    assert opened == ["a", "b", "c", "b"]


def test_a_model_is_not_closed_under_a_request(qwen: Path, mixtral: Path) -> None:
    long = {
        **BODY,
        "model": "a",
        "max_tokens": 1500,
        "stream": True,
        "logit_bias": {"310": -100, "312": -100},
    }
    with AppServer({"a": qwen, "b": mixtral}, opener()) as server, ThreadPoolExecutor() as pool:
        url = f"{server.url}/v1/chat/completions"
        with httpx.stream("POST", url, json=long, timeout=60) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            other = pool.submit(ask, server.url, "b")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert other.result().status_code == 200


def test_requests_for_two_models_at_once_are_all_answered(qwen: Path, mixtral: Path) -> None:
    with AppServer({"a": qwen, "b": mixtral}, opener()) as server, ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server.url, "ab"[i % 2]) for i in range(16)]
        replies = [request.result() for request in asked]
    assert {reply.status_code for reply in replies} == {200}
    texts = {(r.json()["model"], r.json()["choices"][0]["message"]["content"]) for r in replies}
    assert len(texts) == 2


def test_a_model_that_cannot_be_opened(qwen: Path, mixtral: Path) -> None:
    broken = True

    def before(name: str) -> None:
        if name == "b" and broken:
            raise FormatError("b.gguf", "header", "is damaged")

    with AppServer({"a": qwen, "b": mixtral}, opener(before)) as server:
        assert ask(server.url, "a").status_code == 200
        for _ in range(2):
            reply = ask(server.url, "b")
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "model_load_failed"
            assert "b.gguf: header: is damaged" in reply.json()["error"]["message"]
        assert states(server.url)["b"] == "failed"
        assert ask(server.url, "a").status_code == 200
        broken = False
        assert ask(server.url, "b").status_code == 200


def test_health_says_why_there_is_no_model(qwen: Path) -> None:
    def before(name: str) -> None:
        raise FormatError("a.gguf", "header", "is damaged")

    with AppServer({"a": qwen, "b": qwen}, opener(before)) as server:
        assert ask(server.url, "a").status_code == 503
        health = httpx.get(f"{server.url}/health", timeout=60)
        assert health.status_code == 503
        assert health.json()["status"] == "error"
        assert "is damaged" in health.json()["message"]


def test_the_end_comes_while_a_model_is_loading(qwen: Path) -> None:
    gate = Gate()
    with AppServer({"a": qwen}, opener(gate)) as server, ThreadPoolExecutor() as pool:
        assert gate.waiting.acquire(timeout=60)
        asked = pool.submit(ask, server.url, "a")
        server.end()
        gate.passes.release()
        assert asked.exception() or asked.result().status_code in (200, 503)


def test_the_end_comes_while_a_model_waits_for_another(qwen: Path, mixtral: Path) -> None:
    """Replies that take longer than the server waits end with an error."""
    endless = {**BODY, "model": "a", "max_tokens": 4000, "stream": True, "n": 4}
    serving = Serving(parallel=1)
    with (
        AppServer({"a": qwen, "b": mixtral}, opener(serving=serving)) as server,
        ThreadPoolExecutor() as pool,
        httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=endless, timeout=60
        ) as stream,
    ):
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        other = pool.submit(ask, server.url, "b")
        while states(server.url)["a"] != "unloading":
            assert not other.done()
        server.end()
        rest = [line for line in lines if line]
        assert "server_ending" in rest[-1] or rest[-1] == "data: [DONE]"
        assert other.result().status_code in (200, 503)
