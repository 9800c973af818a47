"""Streams that take their time, and streams that break."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import httpx
import openai
import pytest
from appserver import AppServer, opener

from colibri_mmap.server.loaded import Serving

USER = [{"role": "user", "content": "Hi"}]


def test_progress_of_a_prompt(client: openai.OpenAI) -> None:
    asked = [{"role": "user", "content": "something quite long to read " * 60}]
    chunks = client.chat.completions.create(
        model="qwen",
        messages=asked,
        max_tokens=2,
        stream=True,
        extra_body={"return_progress": True},
    )
    progress = [c.model_extra["prompt_progress"] for c in chunks if not c.choices]
    assert len(progress) > 2
    done = [step["processed"] for step in progress]
    assert done == sorted(done)
    assert progress[-1]["processed"] == progress[-1]["total"] > 512


def test_weights_that_cannot_be_read(qwen: Path, mixtral: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(qwen, model)
    body = {"messages": USER, "max_tokens": 3, "temperature": 0}
    with (
        AppServer({"a": model, "b": mixtral}, opener()) as server,
        httpx.Client(timeout=60) as http,
    ):
        url = f"{server.url}/v1/chat/completions"
        first = http.post(url, json=body).json()
        os.truncate(model, model.stat().st_size // 2)
        reply = http.post(url, json=body)
        assert reply.status_code == 500
        assert reply.json()["error"]["code"] == "ModelReadError"
        with http.stream("POST", url, json={**body, "stream": True}) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "server_error"
        messages = f"{server.url}/v1/messages"
        with http.stream("POST", messages, json={**body, "stream": True}) as stream:
            events = [line for line in stream.iter_lines() if line]
        assert events[-2] == "event: error"
        assert json.loads(events[-1].removeprefix("data: "))["error"]["type"] == "api_error"

        shutil.copy(qwen, model)  # there again, and opened anew after another model
        assert http.post(url, json={**body, "model": "b"}).status_code == 200
        assert http.post(url, json=body).json()["choices"] == first["choices"]


@pytest.mark.slow
def test_who_waits_is_told_so(qwen: Path) -> None:
    ends = {"310": -100, "312": -100}  # do not come
    endless = {"messages": USER, "max_tokens": 4000, "n": 8, "stream": True, "logit_bias": ends}
    short = {"messages": USER, "max_tokens": 2, "stream": True}
    with (
        AppServer({"a": qwen}, opener(serving=Serving(parallel=1))) as server,
        httpx.Client(base_url=server.url, timeout=120) as http,
        http.stream("POST", "/v1/chat/completions", json=endless) as running,
    ):
        lines = running.iter_lines()  # the stream is closed with its iterator
        next(lines)
        with (
            http.stream("POST", "/v1/chat/completions", json=short) as first,
            http.stream("POST", "/v1/messages", json=short) as second,
        ):
            assert next(first.iter_lines()) == ": waiting"
            assert next(second.iter_lines()) == "event: ping"
