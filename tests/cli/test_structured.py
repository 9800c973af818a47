"""Replies that follow a schema, and replies that begin with reasoning."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import jsonschema
import pexpect
import pytest
from program import COMMAND, Colibri, environment

from colibri_mmap import Engine, Sampling
from colibri_mmap.runtime.template import ChatTemplate

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green"]},
        "size": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["colour", "size"],
    "additionalProperties": False,
}
THINKS = "{{ messages[0].content }}<think>\n"


@pytest.fixture
def model(mini: Path) -> Path:
    return mini / "qwen3moe" / "qwen3moe.BF16.gguf"


def test_a_reply_that_follows_a_schema(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for option, value in (
        ("--json-schema", json.dumps(SCHEMA)),
        ("--json-schema-file", "schema.json"),
    ):
        done = colibri("chat", "-m", model, "-p", "Hi", option, value, "-n", "200", "-s", "3")
        assert done.returncode == 0
        jsonschema.validate(json.loads(done.stdout), SCHEMA)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--json-schema", "{"], "--json-schema is not JSON"),
        (["--json-schema", '{"not": {}}'], "the schema has 'not', which is not supported"),
        (["--json-schema", "{}", "--json-schema-file", "x"], "exclude each other"),
    ],
)
def test_schemas_that_make_no_sense(
    colibri: Colibri, model: Path, arguments: list[str], reason: str
) -> None:
    done = colibri("chat", "-m", model, "-p", "Hi", *arguments)
    assert done.returncode == 1
    assert done.stdout == b""
    error = done.stderr.decode()
    assert reason in error
    assert len(error.strip().splitlines()) == 1


def test_reasoning_is_no_part_of_the_reply(colibri: Colibri, model: Path) -> None:
    """In a pipe it does not appear; as JSON it stands apart."""
    with Engine.open(model) as engine:
        template = ChatTemplate.of(engine.tokenizer, THINKS)
        messages = [{"role": "user", "content": "Hi"}]
        tokens = engine.chat(messages, 12, Sampling(temperature=0), template=template)
        raw = "".join(token.text for token in tokens)
    arguments = ("chat", "-m", model, "-p", "Hi", "--temp", "0", "-n", "12")
    arguments = (*arguments, "--chat-template", THINKS)
    assert raw.strip()
    assert "</think>" not in raw
    assert colibri(*arguments).stdout == b"\n"
    told = json.loads(colibri(*arguments, "--json").stdout)
    assert told["reply"] == ""
    assert told["reasoning"] == raw.lstrip()


def test_a_terminal_shows_reasoning_dimmed(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    arguments = ["chat", "-m", str(model), "-p", "Hi", "--temp", "0", "-n", "12"]
    arguments += ["--chat-template", THINKS]
    reasoning = json.loads(colibri(*arguments, "--json").stdout)["reasoning"]
    shown = pexpect.run(
        shlex.join([*COMMAND, *arguments]), env=environment(tmp_path), timeout=60
    ).decode(errors="replace")
    dimmed = "".join(re.findall(r"\x1b\[2m(.*?)\x1b\[0m", shown, re.DOTALL))
    words = re.findall(r"[A-Za-z0-9]{3,}", reasoning)
    assert words
    assert all(word in dimmed for word in words)
