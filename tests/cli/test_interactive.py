"""The conversation in a terminal, typed and read through a pseudo-terminal."""

from __future__ import annotations

import json
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest
from program import COMMAND, environment

# pexpect forks; the child executes the command at once, whatever threads other tests left here.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")

MODEL = Path("mixtral/mixtral.Q8_0.gguf")
PROMPT = "\x1b[?2004h"  # a prompt has begun to read: it asks for pastes to be marked
UP, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"
NUMBERS = (
    r"tok/s · TTFT [\d.]+ s · hits \d+% · [\d.]+ GB read/token( · waiting \d+%)? · \d+ tokens"
    r" · context \d+/\d+"
)


class Terminal:
    """A person at a terminal: types lines, waits for what appears."""

    def __init__(
        self, model: Path, directory: Path, arguments: list[str], variables: dict[str, str]
    ) -> None:
        self.directory = directory
        self.process: pexpect.spawn[str] = pexpect.spawn(
            COMMAND[0],
            [*COMMAND[1:], "chat", "-m", str(model), *arguments],
            env={**environment(directory / "state"), "PROMPT_TOOLKIT_NO_CPR": "1", **variables},
            cwd=directory,
            encoding="utf-8",
            timeout=60,
            dimensions=(40, 200),
        )
        self.shows("Ctrl-D leaves")

    def shows(self, text: str) -> None:
        self.process.expect_exact(text)

    def types(self, *texts: str) -> None:
        """At the next prompt, one key or text after the other."""
        self.shows(PROMPT)
        for text in texts:
            self.process.send(text)

    def enters(self, text: str) -> None:
        self.types(text + "\r")

    def interrupts(self) -> None:
        """Ctrl-C during a reply."""
        self.process.send(CTRL_C)

    def gets_reply(self) -> None:
        self.process.expect(NUMBERS)

    def saved(self) -> list[dict[str, str]]:
        """The messages so far, as `/save` writes them."""
        path = self.directory / "saved.json"
        self.enters(f"/save {path.name}")
        self.shows("saved ")
        self.shows(path.name)
        messages = json.loads(path.read_text())["messages"]
        assert isinstance(messages, list)
        return messages

    def leaves(self) -> None:
        """The program has ended well."""
        self.process.expect(pexpect.EOF)
        self.process.close()
        assert self.process.exitstatus == 0
        assert "Traceback" not in self.process.before


@pytest.fixture
def chat(mini: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    opened: list[Terminal] = []

    def start(*arguments: str, **variables: str) -> Terminal:
        opened.append(Terminal(mini / MODEL, tmp_path, list(arguments), variables))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.process.close(force=True)


def test_a_conversation(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat("-n", "8", "-sys", "Be brief", "--temp", "0")
    terminal.enters("/stats")
    terminal.shows("no reply yet")
    terminal.enters("/regen")
    terminal.shows("error: there is no message")
    terminal.enters("Hello")
    terminal.gets_reply()
    first = terminal.saved()
    assert [message["role"] for message in first] == ["system", "user", "assistant"]
    assert [first[0]["content"], first[1]["content"]] == ["Be brief", "Hello"]
    terminal.enters("/regen")
    terminal.gets_reply()
    assert terminal.saved() == first  # greedy: the same reply, in place of the other
    terminal.enters("And now?")
    terminal.gets_reply()
    second = terminal.saved()
    assert second[:3] == first
    assert len(second) == 5
    terminal.enters("/stats")
    terminal.shows("cached tokens")
    terminal.enters("/system Be long")
    terminal.shows("system prompt: Be long")
    terminal.enters("/clear")
    terminal.shows("new conversation")
    assert terminal.saved() == [{"role": "system", "content": "Be long"}]
    (tmp_path / "other.json").write_text(json.dumps({"messages": second}))
    terminal.enters("/load other.json")
    terminal.shows("loaded 4 messages")
    assert terminal.saved() == second
    terminal.enters("/nonsense")
    terminal.shows("error: unknown command /nonsense: /help")
    terminal.enters("/help")
    for name in ("/help", "/clear", "/regen", "/system", "/stats", "/save", "/load", "/exit"):
        terminal.shows(name)
    terminal.enters("/exit")
    terminal.leaves()


def test_files_that_cannot_be_used(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("keep me")
    (tmp_path / "roles.json").write_text('[{"role": "robot", "content": "Hi"}]')
    terminal = chat()
    for command, answer in (
        ("/save", "error: /save needs a file name"),
        ("/save notes.txt", "is not a saved conversation: choose another name"),
        ("/save absent/x.json", "error: absent/x.json: cannot be written"),
        ("/load absent.json", "error: absent.json: cannot be read"),
        ("/load notes.txt", "error: notes.txt: not a saved conversation"),
        ("/load roles.json", "error: roles.json: message 1 "),
    ):
        terminal.enters(command)
        terminal.shows(answer)
    assert (tmp_path / "notes.txt").read_text() == "keep me"
    terminal.types(CTRL_D)
    terminal.leaves()


def test_ctrl_c_stops_the_reply_only(chat: Callable[..., Terminal]) -> None:
    terminal = chat("--ignore-eos")
    terminal.enters("Hello")
    terminal.process.expect(r"\n[^\n]{20}")  # the reply is on its way
    terminal.interrupts()
    terminal.gets_reply()
    terminal.shows("stopped")
    user, assistant = terminal.saved()
    assert user == {"role": "user", "content": "Hello"}
    assert assistant["content"]
    terminal.types("half a message", CTRL_C)
    terminal.types(CTRL_C)
    terminal.shows("Ctrl-C again")
    terminal.types(CTRL_C)
    terminal.leaves()


def test_messages_of_several_lines(chat: Callable[..., Terminal]) -> None:
    terminal = chat("-n", "2")
    terminal.types("one\\\rtwo" + ALT_ENTER + "three", "\x1b[200~\nfour\nfive\x1b[201~", "\r")
    terminal.gets_reply()
    assert terminal.saved()[0]["content"] == "one\ntwo\nthree\nfour\nfive"


def test_the_history_outlives_the_program(chat: Callable[..., Terminal], tmp_path: Path) -> None:
    terminal = chat()
    terminal.enters("/system Remember")
    terminal.shows("system prompt: Remember")
    terminal.enters("/exit")
    terminal.leaves()
    history = tmp_path / "state" / "colibri-mmap" / "history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    terminal = chat()
    terminal.types(UP, UP, "\r")
    terminal.shows("system prompt: Remember")


def test_a_full_context_says_what_to_do(chat: Callable[..., Terminal]) -> None:
    terminal = chat("-c", "128", "-n", "4")
    terminal.enters("word " * 200)
    terminal.shows("error: ")
    terminal.shows("/clear")
    terminal.enters("Hello")
    terminal.gets_reply()
    assert terminal.saved()[0]["content"] == "Hello"
    terminal.enters("/exit")
    terminal.leaves()


def test_a_session_goes_on(chat: Callable[..., Terminal]) -> None:
    arguments = ("--session", "trip", "-n", "8", "-sys", "Be brief", "--temp", "0")
    terminal = chat(*arguments)
    terminal.enters("Where to?")
    terminal.gets_reply()
    terminal.enters("And then?")
    terminal.gets_reply()
    before = terminal.saved()
    terminal.types(CTRL_D)
    terminal.leaves()

    terminal = chat(*arguments)
    terminal.shows("> Where to?")
    terminal.shows("> And then?")
    assert terminal.saved() == before
    terminal.enters("What else?")
    terminal.gets_reply()
    assert terminal.saved()[:-2] == before
    terminal.enters("/stats")
    terminal.process.expect(r"cached tokens +(\d+)")
    assert int(terminal.process.match[1]) > 20
    terminal.enters("/clear")
    terminal.shows("a new conversation")
    terminal.process.kill(signal.SIGKILL)
    terminal.process.expect(pexpect.EOF)

    terminal = chat("--session", "trip", "-n", "8")
    assert terminal.saved() == [{"role": "system", "content": "Be brief"}]
    assert "Where to?" not in terminal.process.before


def test_what_is_on_the_gpu(chat: Callable[..., Terminal]) -> None:
    terminal = chat("-n", "8", "--temp", "0", COLIBRI_DEVICE="host")
    terminal.enters("Hello")
    terminal.shows("VRAM ")
    terminal.enters("/stats")
    terminal.process.expect(r"vram hits +(\d+)")
    assert int(terminal.process.match[1]) > 0
    terminal.shows("host memory in place of a GPU")
    terminal.shows("2 layers, ")
    terminal.process.expect(r"experts there, by layer +([▁▂▃▄▅▆▇█]{2})")
    terminal.enters("/exit")
    terminal.leaves()
