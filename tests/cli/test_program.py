"""The program as a whole: help, version, exit statuses, one-line errors."""

from __future__ import annotations

import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from program import ROOT, Colibri

HEAVY = ("numpy", "numba", "torch", "cupy", "tokenizers", "jinja2", "prompt_toolkit", "gguf")
COMMANDS = ("chat", "pack", "verify", "inspect", "bench", "warmup")


@pytest.mark.parametrize("arguments", [[], *([command] for command in COMMANDS)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from colibri_mmap.cli import app\n"
        f"try: app({[*arguments, '--help']})\n"
        f"finally: print(*sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert "Usage: " in done.stdout
    assert done.stderr.strip() == ""


def test_help_is_quick(colibri: Colibri) -> None:
    def seconds() -> float:
        start = time.perf_counter()
        assert colibri("--help").returncode == 0
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.5


def test_version(colibri: Colibri) -> None:
    assert colibri("--version").stdout.decode() == f"colibri-mmap {version('colibri-mmap')}\n"


def test_a_wrong_option_is_status_2_with_a_hint(colibri: Colibri) -> None:
    done = colibri("chat", "--temprature", "1")
    assert done.returncode == 2
    assert b"--temprature" in done.stderr
    assert b"for help" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-m", "absent.gguf", "-p", "Hi"],
        ["bench", "-m", "absent.gguf"],
        ["inspect", "absent.gguf"],
        ["verify", "absent.gguf"],
        ["pack", "absent.gguf", "packed.gguf"],
        ["chat", "-m", "absent.gguf", "-f", "absent.txt"],
    ],
)
def test_an_absent_file_is_one_line_and_status_1(colibri: Colibri, arguments: list[str]) -> None:
    done = colibri(*arguments)
    assert done.returncode == 1
    assert done.stdout == b""
    assert done.stderr.decode().startswith("error: absent.")
    assert done.stderr.count(b"\n") == 1


def test_a_traceback_is_shown_on_request(colibri: Colibri) -> None:
    assert b"Traceback" in colibri("inspect", "absent.gguf", "--verbose").stderr
    assert b"Traceback" in colibri("inspect", "absent.gguf", COLIBRI_DEBUG="1").stderr


@pytest.mark.parametrize("name", ["bad_magic_case", "big_endian", "t_off_overlap", "n_kv_huge"])
def test_a_broken_file_is_one_line_and_status_1(colibri: Colibri, data: Path, name: str) -> None:
    path = data / "hostile" / f"{name}.gguf"
    for arguments in (["inspect", path], ["chat", "-m", path, "-p", "Hi"]):
        done = colibri(*arguments)
        assert done.returncode == 1
        assert done.stdout == b""
        assert done.stderr.decode().startswith(f"error: {path}: ")
        assert done.stderr.count(b"\n") == 1


def test_chat_without_a_model_says_what_to_do(colibri: Colibri) -> None:
    done = colibri("chat")
    assert done.returncode == 2
    assert done.stdout == b""
    assert b"chat -m" in done.stderr
    assert b"chat --demo" in done.stderr
    assert done.stderr.count(b"\n") == 3


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["-m", "x.gguf", "--demo"], "--demo"),
        (["-m", "x.gguf", "-p", "Hi", "--logit-bias", "abc"], "abc"),
        (
            ["-m", "x.gguf", "-p", "Hi", "--chat-template", "a", "--chat-template-file", "b"],
            "--chat",
        ),
        (["-m", "x.gguf", "-p", ""], "prompt is empty"),
        (["-m", "x.gguf", "-p", "Hi", "--temp", "-1"], "temperature"),
    ],
)
def test_arguments_that_make_no_sense(colibri: Colibri, arguments: list[str], names: str) -> None:
    done = colibri("chat", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith(b"error: ")
    assert names in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1


def test_a_prompt_that_is_not_text(colibri: Colibri) -> None:
    done = colibri("chat", "-m", "x.gguf", text=b"\xff\xfe\x00")
    assert done.returncode == 1
    assert done.stderr == b"error: standard input is not UTF-8 text\n"
