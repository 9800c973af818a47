"""The conversation in a terminal: a prompt, streamed replies, and commands that start with `/`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import WordCompleter
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output.defaults import create_output
from rich.table import Table

from colibri_mmap.cli.console import messages, printable
from colibri_mmap.cli.conversation import Conversation
from colibri_mmap.cli.liveline import LiveLine
from colibri_mmap.cli.opening import tell_notices
from colibri_mmap.cli.reply import (
    ReplySettings,
    full_context_hint,
    progress_line,
    stream_reply,
    summary,
)
from colibri_mmap.errors import ArgumentError, ColibriError, ContextLengthError

if TYPE_CHECKING:
    from colibri_mmap.cli.session import Session
    from colibri_mmap.runtime.engine import Engine


class Command(NamedTuple):
    """One `/command`: what stands after its name, what it does, and the method that does it."""

    argument: str
    help: str
    run: Callable[[Interactive, str], None]


class Interactive:
    """One conversation of a person with a model, until /exit, Ctrl-D or Ctrl-C twice."""

    def __init__(
        self,
        engine: Engine,
        settings: ReplySettings,
        conversation: Conversation,
        session: Session | None = None,
    ) -> None:
        """Go on with a conversation, and keep it in the session."""
        self._engine = engine
        self._settings = settings
        self._conversation = conversation
        self._session = session
        self._repeats = 0  # replies to the last message that /regen has replaced
        self._console = messages()
        self._replied = False
        self._leaving = False

    def run(self) -> None:
        """Read messages and commands, and answer them."""
        self._say(f"{_title(self._engine)}\n/help lists the commands, Ctrl-D leaves\n")
        self._show_history()
        prompt: PromptSession[str] = PromptSession(
            history=_history(),
            multiline=True,
            key_bindings=_key_bindings(),
            prompt_continuation="  ",
            completer=WordCompleter(list(COMMANDS), sentence=True),
            complete_while_typing=False,
            output=create_output(always_prefer_tty=True),
        )
        asked_to_leave = False
        while not self._leaving:
            try:
                text = prompt.prompt("> ").strip()
            except KeyboardInterrupt:
                empty = not prompt.default_buffer.text
                if empty and asked_to_leave:
                    return
                if empty:
                    self._say("Ctrl-C again or Ctrl-D leaves")
                asked_to_leave = empty
                continue
            except EOFError:
                return
            asked_to_leave = False
            if text:
                self._answer(text)

    def _answer(self, text: str) -> None:
        """Do one thing a person asked for; an error costs this one thing only."""
        try:
            if text.startswith("/"):
                self._run_command(text)
            else:
                self._repeats = 0
                self._reply(self._conversation.asking(text))
        except ColibriError as error:
            self._console.print(f"error: {error}", markup=False)

    def _run_command(self, text: str) -> None:
        name, *rest = text.split(maxsplit=1)
        command = COMMANDS.get(name)
        if command is None:
            raise ArgumentError(f"unknown command {name}: /help lists the commands")
        argument = rest[0] if rest else ""
        if argument and not command.argument:
            raise ArgumentError(f"{name} takes nothing after its name")
        if command.argument == "FILE" and not argument:
            raise ArgumentError(f"{name} needs a file name: {name} {command.argument}")
        command.run(self, argument)

    def _reply(self, conversation: Conversation) -> None:
        """Stream the reply to the last message; without one the conversation stays as it was."""
        try:
            with LiveLine(lambda: progress_line(self._engine)) as line:
                reply = stream_reply(
                    self._engine,
                    conversation.messages(),
                    self._settings.again(self._repeats),
                    lambda text, reasons: line.write(printable(text), dim=reasons),
                )
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}; /clear begins a new conversation") from None
        if reply.interrupted and not reply.text:
            self._say("stopped before the first token: the message is taken back")
            return
        if not reply.text.endswith("\n"):
            print(flush=True)
        self._conversation = conversation.answered(reply.text)
        self._replied = True
        self._say(summary(self._engine) + (" · stopped" if reply.interrupted else ""))
        tell_notices(self._engine)
        if self._engine.stats.finish_reason == "context":
            self._say(f"{full_context_hint(self._engine)}; /clear begins a new conversation")
        self._keep()
        self._say("")

    def _keep(self) -> None:
        """Write the conversation as it is now, if it has a session."""
        if self._session is not None:
            self._session.keep(self._conversation)
            for notice in self._session.take_notices():
                self._say(f"note: {notice}")

    def _show_history(self) -> None:
        """What was said in earlier runs."""
        for turn in self._conversation.turns:
            mark = "> " if turn["role"] == "user" else ""
            self._console.print(
                printable(f"{mark}{turn['content']}"), markup=False, highlight=False
            )
            if not mark:
                self._say("")

    def _help(self, _: str) -> None:
        table = Table.grid(padding=(0, 3))
        for name, command in COMMANDS.items():
            table.add_row(f"{name} {command.argument}", command.help)
        table.add_row("Alt-Enter, or \\ Enter", "new line in a message")
        table.add_row("Ctrl-C", "stop the reply; what there is of it stays")
        self._console.print(table, markup=False)

    def _clear(self, _: str) -> None:
        self._conversation = Conversation(self._conversation.system)
        self._keep()
        self._say("a new conversation")

    def _regenerate(self, _: str) -> None:
        conversation = self._conversation.unanswered()
        if not conversation.turns:
            raise ArgumentError("there is no message to reply to yet")
        self._repeats += 1
        self._reply(conversation)

    def _system(self, text: str) -> None:
        if text:
            system = None if text == "none" else text
            self._conversation = replace(self._conversation, system=system)
            self._keep()
        self._say(f"system prompt: {self._conversation.system or 'none'}")

    def _stats(self, _: str) -> None:
        if not self._replied:
            self._say("no reply yet")
            return
        table = Table.grid(padding=(0, 3))
        for name, value in self._engine.stats.as_dict().items():
            table.add_row(name.replace("_", " "), _shown(value))
        if gpu := self._engine.device_report():
            table.add_row("GPU", printable(gpu.name))
            there = f"{gpu.layers} layers, {gpu.experts:,} of {gpu.experts_in_all:,} experts"
            table.add_row("in VRAM", there)
            table.add_row("experts there, by layer", _bars(gpu.shares))
        self._console.print(table, markup=False)

    def _save(self, name: str) -> None:
        path = Path(name).expanduser()
        self._conversation.save(path)
        self._say(f"saved {len(self._conversation.turns)} messages to {path}")

    def _load(self, name: str) -> None:
        path = Path(name).expanduser()
        self._conversation = Conversation.load(path)
        self._keep()
        self._say(f"loaded {len(self._conversation.turns)} messages from {path}")

    def _exit(self, _: str) -> None:
        self._leaving = True

    def _say(self, text: str) -> None:
        self._console.print(printable(text), style="dim", markup=False)


COMMANDS = {
    "/help": Command("", "this list", Interactive._help),
    "/clear": Command("", "start a new conversation; the system prompt stays", Interactive._clear),
    "/regen": Command("", "another reply to the last message", Interactive._regenerate),
    "/system": Command(
        "[TEXT]", "show or set the system prompt ('none': no prompt)", Interactive._system
    ),
    "/stats": Command("", "numbers of the last reply", Interactive._stats),
    "/save": Command("FILE", "write the conversation to a JSON file", Interactive._save),
    "/load": Command("FILE", "go on with a saved conversation", Interactive._load),
    "/exit": Command("", "leave; so do Ctrl-D and Ctrl-C twice", Interactive._exit),
}


def _title(engine: Engine) -> str:
    """Model, arithmetic and size of the context in one line."""
    name = engine.gguf.str("general.name", "") or engine.gguf.path.name
    return f"{name} · {engine.mode} · {engine.threads} threads · context {engine.context_length}"


def _bars(shares: Sequence[float]) -> str:
    """A column for each share, 0 to 1; a space is nothing."""
    steps = " ▁▂▃▄▅▆▇█"
    return "".join(steps[-(-round(share * 1000) * 8 // 1000)] for share in shares)


def _shown(value: object) -> str:
    """One statistic for people."""
    match value:
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3f}"
        case _:
            return "none" if value is None else str(value)


def _key_bindings() -> KeyBindings:
    """Enter sends; Alt-Enter, and Enter after a backslash, begin a new line; pastes stay whole."""
    bindings = KeyBindings()

    @bindings.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.current_line_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings


def _history() -> History:
    """What was typed in earlier runs, for its owner only; without a file, in memory."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    path = Path(state) / "colibri-mmap" / "history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        with path.open("ab"):
            return FileHistory(str(path))
    except OSError:
        return InMemoryHistory()
