"""A server with two small models, shared by the tests, and clients for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import anthropic
import httpx
import openai
import pytest
from serverprocess import ServerProcess

TEMPLATE = Path(__file__).parent / "tools.jinja"


@pytest.fixture(scope="session")
def qwen(mini: Path) -> Path:
    """A small model with experts and a byte-level tokenizer."""
    return mini / "qwen3moe" / "qwen3moe.BF16.gguf"


@pytest.fixture(scope="session")
def mixtral(mini: Path) -> Path:
    """A small model with experts and a SentencePiece tokenizer."""
    return mini / "mixtral" / "mixtral.Q4_0.gguf"


@pytest.fixture(scope="session")
def server(
    qwen: Path, mixtral: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Two models, one open at a time; they answer to `qwen`, `also-qwen` and `mixtral`."""
    arguments = ["-m", f"qwen={qwen}", "-m", f"mixtral={mixtral}", "--alias", "also-qwen"]
    arguments += ["--chat-template-file", str(TEMPLATE), "--threads", "1", "--parallel", "4"]
    with ServerProcess(tmp_path_factory.mktemp("server"), *arguments) as server:
        server.wait_for("qwen is open")
        yield server


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """OpenAI's client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    """Anthropic's client."""
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client
