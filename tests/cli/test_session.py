"""Named sessions: kept between runs, and what can be wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from program import Colibri

from colibri_mmap import Engine, Sampling
from colibri_mmap.cli.session import Session
from colibri_mmap.errors import ArgumentError
from colibri_mmap.runtime.state import state_directory

NAME = "разговор-1.b"
QUESTIONS = ("Hello", "How are you?", "And now?")


@pytest.fixture(scope="module")
def model(mini: Path) -> Path:
    return mini / "mixtral" / "mixtral.Q8_0.gguf"


@pytest.fixture
def sessions(tmp_path: Path) -> Path:
    """Where the command of these tests keeps sessions."""
    return tmp_path / "state" / "colibri-mmap" / "sessions"


def ask(colibri: Colibri, model: Path, question: str, *more: str) -> dict[str, Any]:
    arguments = ("--session", NAME, "-n", "12", "--temp", "0", "--json", *more)
    done = colibri("chat", "-m", model, *arguments, "-p", question)
    assert done.returncode == 0, done.stderr
    assert b"note:" not in done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def uninterrupted(model: Path) -> list[tuple[str, int]]:
    """The replies of one process, and how many tokens each of them did not read again."""
    said: list[dict[str, str]] = [{"role": "system", "content": "Be kind"}]
    replies = []
    with Engine.open(model) as engine:
        for question in QUESTIONS:
            said.append({"role": "user", "content": question})
            pieces = engine.chat(said, 12, Sampling(temperature=0.0))
            said.append({"role": "assistant", "content": "".join(p.text for p in pieces)})
            replies.append((said[-1]["content"], engine.stats.cached_tokens))
    return replies


def test_runs_are_one_conversation(colibri: Colibri, model: Path, sessions: Path) -> None:
    answers = [ask(colibri, model, question, "-sys", "Be kind") for question in QUESTIONS]
    assert [(a["reply"], a["stats"]["cached_tokens"]) for a in answers] == uninterrupted(model)
    assert answers[1]["stats"]["cached_tokens"] > 20
    saved = json.loads((sessions / f"{NAME}.json").read_text())
    assert [m["content"] for m in saved["messages"]][1::2] == list(QUESTIONS)
    assert (sessions / f"{NAME}.json").stat().st_mode & 0o077 == 0
    assert sessions.stat().st_mode & 0o077 == 0


def test_a_bad_name(colibri: Colibri) -> None:
    done = colibri("chat", "-m", "nothing.gguf", "-p", "Hi", "--session=../x")
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: --session '../x': ")
    assert b"begins with a letter or digit" in done.stderr
    assert done.stderr.count(b"\n") == 1


@pytest.mark.parametrize("name", ["", "a/b", ".hidden", "-x", "a b", "x" * 51, "a\nb", "a\n"])
def test_bad_names(name: str) -> None:
    with pytest.raises(ArgumentError, match="begins with a letter or digit") as raised:
        Session(name)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", [b"", b"{", b'{"messages": [1]}', b"\xff\xfe"])
def test_a_damaged_session_is_not_replaced(content: bytes) -> None:
    path = state_directory("sessions") / "damaged.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(ArgumentError, match=r"damaged\.json: ") as raised:
        Session("damaged")
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == content


def test_tokens_that_are_not_those_of_the_model(
    colibri: Colibri, model: Path, mini: Path, sessions: Path
) -> None:
    """Another model takes the conversation over, and nonsense for tokens harms nobody."""
    ask(colibri, model, "Hello")
    other = mini / "mixtral" / "mixtral.Q4_0.gguf"
    assert ask(colibri, other, "Go on")["stats"]["cached_tokens"] == 0
    path = sessions / f"{NAME}.json"
    document = json.loads(path.read_text())
    document["tokens"]["ids"][3] = 10**9
    path.write_text(json.dumps(document))
    ask(colibri, other, "Go on")


def test_a_session_is_open_once() -> None:
    session = Session("twice")
    with pytest.raises(ArgumentError, match="open in another terminal"):
        Session("twice")
    session.close()
    Session("twice").close()


def test_a_place_that_cannot_be_written(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "colibri-mmap").write_text("in the way")
    done = colibri("chat", "-m", model, "-p", "Hi", "--session", NAME)
    assert done.returncode == 1
    assert b"cannot be used" in done.stderr
    assert done.stderr.count(b"\n") == 1
