"""Requests of any kind, made from the API's own description: none is an error of the server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import schemathesis
from schemathesis.generation import GenerationMode
from serverprocess import ServerProcess


@pytest.fixture
def server(qwen: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    """A model whose replies end soon, for lack of context."""
    arguments = ["-m", f"qwen={qwen}", "--ctx-size", "128", "--threads", "1"]
    template = Path(__file__).parent / "tools.jinja"
    with ServerProcess(tmp_path, *arguments, "--chat-template-file", template) as server:
        server.wait_for("qwen is open")
        yield server


def call_all(server: ServerProcess, examples: int) -> Counter[int]:
    """Call every operation so often, with what it expects and with what it does not; statuses."""
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema = schema.exclude(path="/api/events")  # which does not end
    for described in schema.get_all_operations():
        operation = described.ok()
        for mode in list(GenerationMode) if operation.body else [GenerationMode.POSITIVE]:

            @hypothesis.settings(
                max_examples=examples,
                deadline=None,
                database=None,
                derandomize=True,
                phases=[hypothesis.Phase.generate],
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def check(case: schemathesis.Case) -> None:
                if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
                    case.body["model"] = "qwen"  # else hardly a request would get beyond it
                response = case.call(timeout=60)
                assert response.status_code < 500, (case.as_curl_command(), response.text)
                statuses[response.status_code] += 1

            check()
    return statuses


def test_no_request_is_an_error_of_the_server(server: ServerProcess) -> None:
    statuses = call_all(server, 6)
    assert statuses[200] > 8
    assert statuses[400] > 15


@pytest.mark.slow
def test_no_request_of_many_is_an_error_of_the_server(server: ServerProcess) -> None:
    call_all(server, 150)
    assert server.process.poll() is None
