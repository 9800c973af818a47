"""The server as people run it: a process of its own, on a port of its own."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ADDRESS = re.compile(r"http://\S+?:\d+")
_SECONDS = 300  # until a server has to be there, or to have ended


class ServerProcess(AbstractContextManager["ServerProcess"]):
    """`colibri-mmap serve` with some arguments; `url` is its address.

    What it prints is in `lines`; `wait_for` waits until it has printed a text.
    """

    def __init__(self, state: Path, *arguments: str | Path, **variables: str) -> None:
        kept = {n: value for n, value in os.environ.items() if not n.startswith("COLIBRI_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "colibri_mmap.cli", "serve", "--port", "0", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**kept, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state), **variables},
        )
        self.lines: list[str] = []
        self._printed = threading.Condition()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        try:
            self.url = _ADDRESS.search(self.wait_for("http://"))[0]
        except BaseException:
            self.kill()
            raise

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                with self._printed:
                    self.lines.append(line)
                    self._printed.notify_all()
        with self._printed:
            self.lines.append("(ended)")
            self._printed.notify_all()

    def wait_for(self, text: str) -> str:
        """The first line with `text` in it, once it is printed."""

        def found() -> str | None:
            ended = self.lines[-1:] == ["(ended)"]
            return next((line for line in self.lines if text in line), "" if ended else None)

        with self._printed:
            self._printed.wait_for(lambda: found() is not None, _SECONDS)
            line = found()
        assert line, f"no {text!r} in {self.lines}"
        return line

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; the exit status."""
        self.process.send_signal(number)
        try:
            return self.process.wait(_SECONDS)
        finally:
            self.kill()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()

    def __exit__(self, *_: object) -> None:
        self.kill()
