"""The command: keys, limits, clients that leave, and how it ends."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serverprocess import ROOT, ServerProcess

from colibri_mmap.cli import app
from colibri_mmap.errors import ColibriError

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
SHORT = {"messages": USER, "max_tokens": 2, "temperature": 0}
# End tokens of the small model do not come: it talks until the context is full.
LONG = {**SHORT, "max_tokens": 4000, "logit_bias": {"310": -100, "312": -100}}


@contextmanager
def serving(state: Path, *arguments: str | Path, **variables: str) -> Iterator[ServerProcess]:
    with ServerProcess(state, *arguments, "--threads", "1", **variables) as server:
        server.wait_for("is open")
        yield server


QUEUED = ("colibri_queued_requests", "qwen")
ACTIVE = ("colibri_active_sequences", "qwen")
CANCELLED = ("colibri_replies_total", "cancelled")
GENERATED = ("colibri_tokens_total", "generated")


def figures(server: ServerProcess, **headers: str) -> dict[tuple[str, ...], float]:
    """All samples of /metrics by name and label values."""
    text = httpx.get(f"{server.url}/metrics", headers=headers, timeout=60).text
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def wait_until_idle(server: ServerProcess, working: int = 0) -> None:
    """Wait until nobody is waiting and the server works on so many replies only."""
    deadline = time.monotonic() + 30
    while (now := figures(server))[QUEUED] or now[ACTIVE] > working:
        assert time.monotonic() < deadline, "the server is still working"
        time.sleep(0.01)


# ------------------------------------------------------------------------------ keys and origins
def test_keys(qwen: Path, tmp_path: Path) -> None:
    arguments = ["-m", qwen, "--api-key", "first", "--cors-origin", "http://page"]
    with serving(tmp_path, *map(str, arguments), "--api-key", "second") as server:
        assert "with an API key" in server.lines[0]
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
            assert httpx.get(server.url + path).status_code == 401
        for headers in (
            {"authorization": "Bearer third"},
            {"authorization": "Basic first"},
            {"x-api-key": "firs"},
            {"x-api-key": ""},
        ):
            reply = httpx.post(server.url + CHAT, json=SHORT, headers=headers)
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"authorization": "Bearer second"}, {"x-api-key": "first"}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        with (
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()

        preflight = {
            "origin": "http://page",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        reply = httpx.options(server.url + CHAT, headers=preflight)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "http://page"
        assert "authorization" in reply.headers["access-control-allow-headers"]
        refused = httpx.post(server.url + CHAT, json=SHORT, headers={"origin": "http://page"})
        assert refused.status_code == 401  # and the page may read why
        assert refused.headers["access-control-allow-origin"] == "http://page"
        elsewhere = {**preflight, "origin": "http://elsewhere"}
        reply = httpx.options(server.url + CHAT, headers=elsewhere)
        assert "access-control-allow-origin" not in reply.headers
        assert server.end(signal.SIGINT) == 0


# ------------------------------------------------------------------------------ limits
@pytest.fixture(scope="module")
def narrow(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One reply at a time, one request that waits."""
    arguments = ["-m", f"qwen={qwen}", "--parallel", "1", "--queue", "1"]
    with serving(tmp_path_factory.mktemp("narrow"), *arguments) as server:
        yield server


def test_a_full_queue(narrow: ServerProcess) -> None:
    url = narrow.url + CHAT
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as running:
        lines = running.iter_lines()
        next(lines)
        with httpx.stream("POST", url, json={**SHORT, "stream": True}, timeout=60) as waiting:
            reply = httpx.post(url, json=SHORT)
            assert reply.status_code == 429
            assert int(reply.headers["retry-after"]) > 0
            assert reply.json()["error"]["code"] == "queue_full"
            both = {**SHORT, "n": 2}
            assert httpx.post(url, json=both).status_code == 429
            running.close()
            assert [line for line in waiting.iter_lines() if line][-1] == "data: [DONE]"
    wait_until_idle(narrow)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(narrow: ServerProcess, stream: bool) -> None:
    url = narrow.url + CHAT
    before = figures(narrow)
    with httpx.stream("POST", url, json={**LONG, "stream": True}, timeout=60) as running:
        lines = running.iter_lines()  # the stream is closed with its iterator
        next(lines)
        leave(url, stream)  # from the queue
        wait_until_idle(narrow, working=1)
        leave(url, stream)  # there is room in the queue again
        wait_until_idle(narrow, working=1)
    wait_until_idle(narrow)
    leave(url, stream)  # while its reply is made
    wait_until_idle(narrow)
    assert httpx.post(url, json=SHORT, timeout=60).status_code == 200
    now = figures(narrow)
    assert now[CANCELLED] - before.get(CANCELLED, 0) == 4
    assert now[GENERATED] - before.get(GENERATED, 0) < 2 * 4000


def leave(url: str, stream: bool) -> None:
    """Ask for a long reply and hang up soon."""
    host, port = url.removeprefix("http://").partition("/")[0].split(":")
    body = json.dumps({**LONG, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        connection.settimeout(0.2)
        with contextlib.suppress(TimeoutError):
            connection.recv(4096)


def test_a_client_that_leaves_while_its_prompt_is_read(narrow: ServerProcess) -> None:
    long = {**SHORT, "messages": [{"role": "user", "content": "word " * 640}], "stream": True}
    with httpx.stream("POST", narrow.url + CHAT, json=long, timeout=60):
        pass  # the answer has begun, its first event is not waited for
    wait_until_idle(narrow)


def test_metrics_have_few_labels(narrow: ServerProcess) -> None:
    body = {**SHORT, "max_tokens": 8, "logit_bias": LONG["logit_bias"]}
    assert httpx.post(narrow.url + CHAT, json=body, timeout=60).status_code == 200
    for number in range(5):
        httpx.get(f"{narrow.url}/nothing/{number}")
        httpx.get(f"{narrow.url}/v1/models/{number}")
    samples = figures(narrow)
    endpoints = {key[2] for key in samples if key[0] == "colibri_requests_total"}
    assert endpoints <= {"other", CHAT, "/v1/models/{name:path}", "/metrics"}
    assert samples[("colibri_requests_total", "404", "other")] == 5
    assert samples[("colibri_model_loads_total",)] == 1
    assert samples[("colibri_expert_hits_total",)] > 0
    assert samples[("colibri_first_token_seconds_count",)] >= 1
    assert samples[("colibri_token_seconds_count",)] >= 1


def test_a_reply_that_takes_too_long(qwen: Path, tmp_path: Path) -> None:
    arguments = ["-m", str(qwen), "--timeout", "0.4"]
    key = {"authorization": "Bearer secret"}
    with serving(tmp_path, *arguments, COLIBRI_API_KEY="secret") as server:
        assert httpx.get(f"{server.url}/v1/models").status_code == 401
        reply = httpx.post(server.url + CHAT, json=LONG, headers=key, timeout=60)
        assert reply.status_code == 504
        assert reply.json()["error"]["code"] == "timeout"
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            stream = client.chat.completions.create(model="", stream=True, **LONG)
            said: list[str] = []
            with pytest.raises(openai.APIError, match="longer than the server allows"):
                said += (chunk.choices[0].delta.content or "" for chunk in stream)
        hello = [{"role": "user", "content": "Hello"}]  # to which the likeliest reply is endless
        body = {"messages": hello, "max_tokens": 4000, "stream": True, "temperature": 0}
        url = f"{server.url}/v1/messages"
        with httpx.stream("POST", url, json=body, headers=key, timeout=60) as reply:
            events = [line for line in reply.iter_lines() if line.startswith("event:")]
        assert events[0] == "event: message_start"
        assert events[-1] == "event: error"


# ------------------------------------------------------------------------------ the end
def test_running_replies_get_some_time(qwen: Path, tmp_path: Path) -> None:
    arguments = ["-m", str(qwen), "--threads", "1", "--host", "0.0.0.0"]
    with serving(tmp_path, *arguments) as server:
        server.wait_for("warning: everybody who reaches")
        url = server.url + CHAT
        body = {**SHORT, "max_tokens": 300, "logit_bias": LONG["logit_bias"], "stream": True}
        with httpx.stream("POST", url, json=body, timeout=60) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert server.process.wait(60) == 0
        server.wait_for("(ended)")
        assert not [line for line in server.lines if "Traceback" in line]


def test_a_conversation_survives_a_restart(qwen: Path, tmp_path: Path) -> None:
    arguments = ["-m", str(qwen), "--session-dir", str(tmp_path / "sessions")]
    asked = {"role": "user", "content": "This is a rather long beginning of a conversation " * 8}
    with serving(tmp_path, *arguments) as server:
        first = httpx.post(
            server.url + CHAT, json={**SHORT, "messages": [asked]}, timeout=60
        ).json()
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert server.end() == 0
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    more = {**SHORT, "messages": [asked, said, *USER]}
    with serving(tmp_path, *arguments) as server:
        second = httpx.post(server.url + CHAT, json=more, timeout=60).json()
    known = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert known > 0.8 * first["usage"]["prompt_tokens"]


# ------------------------------------------------------------------------------ mistakes at start
def test_mistakes_are_told_at_once(qwen: Path, tmp_path: Path, narrow: ServerProcess) -> None:
    port = narrow.url.rpartition(":")[2]
    twice = tmp_path / "twice" / qwen.name
    twice.parent.mkdir()
    shutil.copy(qwen, twice)
    for arguments, said in (
        (["-m", tmp_path / "no.gguf"], "no.gguf"),
        (["-m", __file__], "not a GGUF file"),
        (["-m", qwen, "--port", port], f":{port}: Address already in use; choose another --host"),
        (["-m", qwen, "-m", twice], "two models are called"),
        (["-m", qwen, "--cache-ram", "lots"], "lots"),
        (["-m", qwen, "--host", "no.such.host.example"], "cannot listen on"),
        (["-m", qwen, "--host", "long" * 20], "cannot listen on"),
        (["-m", qwen, "--chat-template", "{% if %}"], "the chat template is invalid"),
    ):
        with pytest.raises(ColibriError, match=said):
            app(["serve", *map(str, arguments)], standalone_mode=False)


def test_a_model_that_does_not_fit_ends_the_command(qwen: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "colibri_mmap.cli", "serve", "--port", "0"]
    done = subprocess.run(
        [*command, "-m", str(qwen), "--pin", "99:1"],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: --pin 99:1")
    assert done.stderr.count("--pin 99:1") == 1
    assert "Traceback" not in done.stderr


def test_one_of_two_models_that_does_not_fit_is_told(qwen: Path, tmp_path: Path) -> None:
    models = ["-m", f"one={qwen}", "-m", f"two={qwen}"]
    with ServerProcess(tmp_path, *models, "--pin", "99:1") as server:
        assert server.wait_for("error: one: --pin 99:1")
        assert httpx.get(f"{server.url}/health").json()["status"] == "error"
