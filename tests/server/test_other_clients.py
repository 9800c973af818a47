"""The server as programs see it that people use with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import openai
import pytest
from pydantic import BaseModel
from serverprocess import ServerProcess

LOCAL = """\
- model_id: local
  model_name: qwen
  api_base: {url}/v1
  supports_schema: true
  supports_tools: true
"""


def run_llm(home: Path, *arguments: str) -> str:
    """What `llm` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "llm", *arguments],
        input="",
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LLM_USER_PATH": str(home), "OPENAI_API_KEY": "none"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def llm_home(server: ServerProcess, tmp_path: Path) -> Path:
    (tmp_path / "extra-openai-models.yaml").write_text(LOCAL.format(url=server.url))
    return tmp_path


def test_llm(llm_home: Path, client: openai.OpenAI) -> None:
    options = ["-m", "local", "-o", "temperature", "0", "-o", "max_tokens", "16"]
    reply = client.chat.completions.create(
        model="qwen", messages=USER, max_tokens=16, temperature=0
    )
    assert run_llm(llm_home, *options, "Tell me") == reply.choices[0].message.content + "\n"
    assert run_llm(llm_home, "-c", "--no-stream", "-o", "max_tokens", "4", "And?")


USER = [{"role": "user", "content": "Tell me"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Mark(BaseModel):
    """A mark."""

    grade: Literal["a", "b"]
    passed: bool


@pytest.fixture
def chat_model(server: ServerProcess):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        model="qwen",
        temperature=0,
        max_tokens=300,
        max_retries=0,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )


def test_langchain_chats(chat_model) -> None:
    short = chat_model.bind(max_tokens=12)
    reply = short.invoke("Tell me")
    assert reply.content
    assert reply.usage_metadata["output_tokens"] == 12
    streamed = list(short.stream("Tell me"))
    assert "".join(part.content for part in streamed) == reply.content


def test_langchain_calls_tools(chat_model) -> None:
    bound = chat_model.bind_tools([WEATHER], tool_choice="weather", parallel_tool_calls=False)
    reply = bound.invoke("How is the weather?")
    (call,) = reply.tool_calls
    assert call["name"] == "weather"
    assert call["args"]["city"] in ("Rome", "Oslo")
    answer = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    short = chat_model.bind(max_tokens=4)
    plain = short.invoke([("user", "How is it?")]).usage_metadata["input_tokens"]
    more = short.invoke([("user", "How is it?"), reply, answer]).usage_metadata["input_tokens"]
    assert more > plain + 50


def test_langchain_gets_objects(chat_model) -> None:
    structured = chat_model.with_structured_output(Mark, method="json_schema")
    assert isinstance(structured.invoke("Give a mark"), Mark)
