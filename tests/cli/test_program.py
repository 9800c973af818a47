"""The program as a whole: help, version, exit statuses, one-line errors."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from program import ROOT, Colibri

from colibri_mmap import __version__

HEAVY = (
    *("numpy", "numba", "torch", "cupy", "tokenizers", "jinja2", "prompt_toolkit", "gguf"),
    *("huggingface_hub", "httpx2"),
)
NAMES = (
    *("chat", "pull", "list", "rm", "pack", "verify"),
    *("inspect", "plan", "doctor", "tune", "bench", "warmup", "cache"),
)
COMMANDS = ([], *([name] for name in NAMES))


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from colibri_mmap.cli import app\n"
        f"for command in {COMMANDS}:\n"
        "    try: app([*command, '--help'])\n"
        "    except SystemExit as end: assert end.code == 0\n"
        f"print(*sorted(set(sys.modules) & set({HEAVY})), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0
    assert done.stdout.count("Usage: ") == len(COMMANDS)
    assert done.stderr.strip() == ""


def test_help_is_quick(colibri: Colibri) -> None:
    """In seconds of processor time, which other work on the machine does not lengthen."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert colibri("--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_version(colibri: Colibri) -> None:
    assert colibri("--version").stdout.decode() == f"colibri-mmap {__version__}\n"


def test_a_wrong_option_is_status_2_with_a_hint(colibri: Colibri) -> None:
    done = colibri("chat", "--temprature", "1")
    assert done.returncode == 2
    assert b"--temprature" in done.stderr
    assert b"for help" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["chat", "-m", "absent.gguf", "-p", "Hi"],
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


@pytest.mark.parametrize("arguments", [["inspect"], ["chat", "-p", "Hi", "-m"]])
def test_a_broken_file_is_one_line_and_status_1(
    colibri: Colibri, data: Path, arguments: list[str]
) -> None:
    path = data / "hostile" / "t_off_overlap.gguf"
    done = colibri(*arguments, path)
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
    assert b"colibri-mmap pull owner/name" in done.stderr
    assert done.stderr.count(b"\n") == 4


def test_one_model_is_asked_for() -> None:
    """By every command that takes one, whether none is named or two are."""
    code = (
        "import sys; from colibri_mmap.cli import app\n"
        "for command in sys.argv[1:]:\n"
        "    last = ['x.gguf'] if command == 'pack' else []\n"
        "    for named in ([], ['a.gguf', *last, '-m', 'b.gguf'], ['a.gguf', *last, 'b.gguf']):\n"
        "        try: app([command, *named])\n"
        "        except SystemExit as end: print(command, end.code)\n"
    )
    needing = ["bench", "inspect", "pack", "plan", "tune", "verify"]
    done = subprocess.run(
        [sys.executable, "-c", code, *needing], capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == [f"{name} 2" for name in needing for _ in range(3)]
    said = " ".join(done.stderr.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", "").split())
    assert said.count("'MODEL': there is none: name a GGUF file") == len(needing)
    assert said.count("'MODEL': a.gguf is one, and b.gguf behind -m is another") == len(needing)


def test_a_prompt_in_place_of_a_model(colibri: Colibri) -> None:
    done = colibri("chat", "Why is the sky blue?", text=b"Hi")
    assert done.returncode == 1
    assert b"goes behind -p" in done.stderr


def test_help_breaks_lines_only_where_they_end(colibri: Colibri) -> None:
    """Docstrings are wrapped for another width than the terminal's."""
    text = colibri("plan", "-h", COLUMNS="200").stdout.decode()
    assert "A model that memory cannot hold the always needed parts of is refused" in text
    assert "[OPTIONS] [MODEL]" in text
    assert "--json  <bool>" not in " ".join(text.split(" "))


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
