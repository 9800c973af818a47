"""One reply in a pipe: what goes to stdout, and how it ends."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

import numba
import pytest
from program import COMMAND, Colibri, environment

from colibri_mmap import Engine, Sampling
from colibri_mmap.demo.model import PACKED_NAME

MODEL = Path("mixtral/mixtral.Q8_0.gguf")
GREEDY = ("--temp", "0", "-n", "12")


@pytest.fixture(scope="module")
def model(mini: Path) -> Path:
    return mini / MODEL


def greedy_reply(model: Path, messages: list[dict[str, str]]) -> str:
    """The reply of the Python API."""
    with Engine.open(model) as engine:
        pieces = engine.chat(messages, max_tokens=12, sampling=Sampling(temperature=0.0))
        return "".join(piece.text for piece in pieces)


def test_nothing_but_the_reply_on_stdout(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be kind"},
        {"role": "user", "content": "Translate:\n\nBonjour 🐦\nle monde"},
    ]
    expected = (greedy_reply(model, messages).rstrip("\n") + "\n").encode()
    (tmp_path / "text.txt").write_text("Bonjour 🐦\nle monde\n")
    piped = (tmp_path / "text.txt").read_bytes()
    for arguments, text in (
        (["-p", "Translate:", "-f", "text.txt"], b""),
        (["-p", "Translate:"], piped),
        ([], b"Translate:\n\n" + piped),
    ):
        done = colibri("chat", "-m", model, "-sys", "Be kind", *GREEDY, *arguments, text=text)
        assert done.returncode == 0
        assert done.stdout == expected
        assert b"\x1b" not in done.stderr
        assert b"tok/s" not in done.stderr


def test_json(colibri: Colibri, model: Path) -> None:
    arguments = ("chat", "-m", model, "-p", "Hello", "--json", "--ignore-eos", "-s", "7")
    first = json.loads(colibri(*arguments, "-n", "6").stdout)
    assert first["stats"]["generated_tokens"] == 6
    assert first["stats"]["finish_reason"] == "length"
    longer = json.loads(colibri(*arguments, "-n", "30").stdout)["reply"]
    assert longer.startswith(first["reply"])
    stop = re.findall("[A-Za-z]+", longer)[-1]
    stopped = json.loads(colibri(*arguments, "-n", "30", "--stop", stop).stdout)
    assert stopped["reply"] == longer[: longer.index(stop)]
    assert stopped["stats"]["finish_reason"] == "stop"


def test_logit_bias_forces_a_token(colibri: Colibri, model: Path) -> None:
    with Engine.open(model) as engine:
        token = engine.tokenizer.encode("Hello", add_special=False)[-1]
        expected = engine.tokenizer.decode([token] * 3)
    done = colibri("chat", "-m", model, "-p", "Hi", "-n", "3", "-l", f"{token}+1000")
    assert done.stdout.decode().strip() == expected.strip()


def test_a_template_of_the_users_own(colibri: Colibri, model: Path, tmp_path: Path) -> None:
    jinja = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
    (tmp_path / "own.jinja").write_text(jinja)
    arguments = ("chat", "-m", model, *GREEDY, "-p", "Hello", "--json")
    given = json.loads(colibri(*arguments, "--chat-template-file", "own.jinja").stdout)
    default = json.loads(colibri(*arguments).stdout)
    assert given["stats"]["prompt_tokens"] < default["stats"]["prompt_tokens"]
    refusing = "{{ raise_exception('only poems') }}"
    done = colibri(*arguments, "--chat-template", refusing)
    assert done.returncode == 1
    assert b"only poems" in done.stderr
    assert done.stderr.startswith(b"error: ")


def test_a_prompt_longer_than_the_context(colibri: Colibri, model: Path) -> None:
    done = colibri("chat", "-m", model, "-c", "64", text=b"word " * 200)
    assert done.returncode == 1
    assert done.stdout == b""
    assert b"-c" in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_a_reply_that_fills_the_context(colibri: Colibri, model: Path) -> None:
    done = colibri("chat", "-m", model, "-p", "Hello", "-c", "64", "--ignore-eos", "--verbose")
    assert done.returncode == 0
    assert b"tok/s" in done.stderr
    assert b"tok/s" not in done.stdout
    assert b"the context of 64 tokens is full" in done.stderr


def test_the_demo_says_what_it_is(colibri: Colibri, mini: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "colibri-mmap"
    cache.mkdir(parents=True)
    (cache / "kernels").symlink_to(Path(numba.config.CACHE_DIR).parent)
    assert colibri("pack", mini / MODEL, cache / PACKED_NAME).returncode == 0
    done = colibri("chat", "--demo", "-p", "Hi", "-n", "2", XDG_CACHE_HOME=str(cache.parent))
    assert done.returncode == 0
    assert b"not a capable assistant" in done.stderr


def test_the_demo_is_served(colibri: Colibri, mini: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "colibri-mmap"
    cache.mkdir(parents=True)
    assert colibri("pack", mini / MODEL, cache / PACKED_NAME).returncode == 0
    place = {"XDG_CACHE_HOME": str(cache.parent)}
    done = colibri("serve", "--demo", "-m", f"demo={mini / MODEL}", **place)
    assert b"not a capable assistant" in done.stderr
    assert b"two models are called demo" in done.stderr  # or it would serve for ever


def start(model: Path, directory: Path) -> subprocess.Popen[bytes]:
    """A reply that has begun and would go on for long."""
    process = subprocess.Popen(
        [*COMMAND, "chat", "-m", str(model), "-p", "Hello", "--ignore-eos"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(directory / "state"),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


def test_a_reader_that_goes_away(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 1


def test_ctrl_c_ends_with_status_130(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == 130
        assert b"Traceback" not in errors
