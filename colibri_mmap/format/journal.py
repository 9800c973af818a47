"""The note of what an interrupted pack has finished, beside the file it is writing.

One JSON object per line: first the identity of the job, then per finished unit its name and the
checksums of its records. A line is appended after the unit's bytes are durable; a torn last line,
left by a crash, is dropped.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from colibri_mmap.errors import ResourceError


class Journal:
    """An open journal, locked against a second writer; `finished` maps unit names to checksums."""

    def __init__(self, path: Path, identity: str, resumable: bool) -> None:
        self.path = path
        self.finished: dict[str, list[int]] = {}
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not (resumable and self._resume(identity)):
                self.finished.clear()
                os.ftruncate(self._fd, 0)
                self._append({"identity": identity})
        except BlockingIOError as error:
            self.close()
            raise ResourceError(
                f"{path}: another pack is writing this file; wait for it"
            ) from error
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def finish(self, unit: str, checksums: list[int]) -> None:
        """Note durably that a unit is done."""
        self._append({"unit": unit, "checksums": checksums})
        self.finished[unit] = checksums

    def remove(self) -> None:
        """Delete the journal: the job is complete."""
        self.path.unlink()

    def _append(self, entry: dict[str, object]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        os.write(self._fd, line)
        os.fsync(self._fd)

    def _resume(self, identity: str) -> bool:
        """Take over the whole lines of an earlier run; False if it was a different job."""
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = 0
        for number, line in enumerate(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n"):
                break
            if number == 0:
                if entry.get("identity") != identity:
                    return False
            else:
                self.finished[entry["unit"]] = entry["checksums"]
            kept += len(line)
        os.ftruncate(self._fd, kept)
        return kept > 0
