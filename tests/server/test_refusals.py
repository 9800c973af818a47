"""What is refused, and in which words."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from appserver import AppServer, opener

from colibri_mmap.server.app import Settings

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def call(arguments: str) -> dict[str, Any]:
    function = {"name": "clock", "arguments": arguments}
    calls = [{"id": "1", "type": "function", "function": function}]
    return {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}


WRONG_CHOICE = {"type": "function", "function": {"name": "x"}}
WRONG_SCHEMA = {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}
ARGUMENTS = "messages[0].tool_calls[0].function.arguments"


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


INVALID = [
    ({"messages": []}, "messages"),
    (said(role="pope", content="x"), "messages[0].role"),
    (said(role="user"), "messages[0].content"),
    (said(role="tool", content="x"), "messages[0].tool_call_id"),
    (call("no JSON"), ARGUMENTS),
    (call("[1]"), ARGUMENTS),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "1"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"n": 9}, "n"),
    ({"seed": -2}, "seed"),
    ({"stop": [""]}, "stop[0]"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]"),
    ({"logit_bias": {"99999": 1}}, None),
    ({"logit_bias": {"1": float("inf")}}, "logit_bias.1"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": WRONG_CHOICE}, "tool_choice"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"modalities": ["audio"]}, "modalities[0]"),
]
UNSUPPORTED = [
    (said(role="user", content=[IMAGE]), "messages[0].content"),
    ({"response_format": WRONG_SCHEMA}, "response_format"),
    ({"response_format": {"type": "json_object"}, "tools": [TOOL]}, "response_format"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
]
UNKNOWN = [({name: 1}, name) for name in ("frequency", "functions", "prediction", "audio")]


@pytest.mark.parametrize(
    ("changes", "param", "code"),
    [
        ({"messages": None}, "messages", "missing_field"),
        *((changes, param, "invalid_value") for changes, param in INVALID),
        *((changes, param, "unsupported_value") for changes, param in UNSUPPORTED),
        *((changes, param, "unsupported_field") for changes, param in UNKNOWN),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_mistake_is_named(
    http: httpx.Client, changes: dict[str, Any], param: str | None, code: str, stream: bool
) -> None:
    body = json.dumps({"messages": USER, "max_tokens": 2, "stream": stream, **changes})
    reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert (error["param"], error["code"]) == (param, code)
    assert error["message"]
    assert "\n" not in error["message"]


def test_what_means_nothing_here_is_accepted(http: httpx.Client) -> None:
    body = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        "max_tokens": 2,
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "logit_bias": None,
        "functions": None,
    }
    assert http.post(CHAT, json=body).status_code == 200


def test_a_template_that_refuses(client: openai.OpenAI) -> None:
    messages = [*USER, {"role": "system", "content": "late"}]
    with pytest.raises(openai.BadRequestError, match="the system speaks first") as raised:
        client.chat.completions.create(model="qwen", messages=messages)
    assert raised.value.code == "template_error"


def test_a_prompt_longer_than_the_context(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(openai.BadRequestError, match=r"\d{4,} tokens.* 4096 ") as raised:
        client.chat.completions.create(model="qwen", messages=long)
    assert raised.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as raised:
        client.completions.create(model="qwen", prompt=[5] * 4096)
    assert raised.value.code == "context_length_exceeded"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9") as raised:
        client.chat.completions.create(model="gpt-9", messages=USER)
    assert (raised.value.code, raised.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize("body", [b"{", b"", b"[]", b"null", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes) -> None:
    for path in (CHAT, "/v1/completions", "/v1/messages", "/tokenize"):
        reply = http.post(path, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["message"]


def test_other_content_types(http: httpx.Client) -> None:
    body = json.dumps({"messages": USER})
    reply = http.post(CHAT, content=body, headers={"content-type": "text/plain"})
    assert reply.status_code == 400
    assert "application/json" in reply.json()["error"]["message"]


def test_half_a_surrogate_pair(http: httpx.Client) -> None:
    body = '{"messages": [{"role": "user", "content": "x"}], "\\ud800": 1}'
    reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"]
    body = '{"messages": [{"role": "user", "content": "\\ud800"}], "max_tokens": 1}'
    reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 200


def test_unknown_paths_and_methods(http: httpx.Client) -> None:
    assert http.get("/v1/chats").status_code == 404
    assert "/v1/chats" in http.get("/v1/chats").json()["error"]["message"]
    assert http.get(CHAT).status_code == 405
    assert http.get("/v1/messages").json()["type"] == "error"


@pytest.mark.parametrize("announced", [True, False])
def test_a_huge_body_is_not_read(qwen: Path, announced: bool) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with (
        AppServer({"a": qwen}, opener(), Settings(most_bytes=3 << 20)) as server,
        socket.create_connection(server.address, timeout=60) as connection,
    ):
        if announced:
            connection.sendall(f"{head}Content-Length: {1 << 40}\r\n\r\n".encode())
        else:
            connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
            part = b"100000\r\n" + b" " * (1 << 20) + b"\r\n"
            for _ in range(3):
                connection.sendall(part)
            connection.sendall(b"1\r\n \r\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"body_too_large" in answer


def test_anthropics_words(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as raised:
        claude.messages.create(model="qwen", max_tokens=1, messages=USER, extra_body={"odd": 1})
    assert raised.value.body["type"] == "error"
    assert raised.value.body["error"]["type"] == "invalid_request_error"
    assert "odd" in raised.value.body["error"]["message"]
    image = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
    with pytest.raises(
        anthropic.BadRequestError, match=r"messages\[0\].content\[0\].type.*'image'"
    ):
        claude.messages.create(
            model="qwen", max_tokens=1, messages=[{"role": "user", "content": [image]}]
        )
    with pytest.raises(anthropic.NotFoundError, match="claude-9"):
        claude.messages.create(model="claude-9", max_tokens=1, messages=USER)
    long = [{"role": "user", "content": "word " * 5000}]
    with pytest.raises(anthropic.BadRequestError, match="4096"):
        claude.messages.create(model="qwen", max_tokens=1, messages=long)
