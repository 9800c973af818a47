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
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            reason = "another pack is writing this file; wait for it"
            raise ResourceError(f"{path}: {reason}") from error
        kept = self._whole_lines(identity) if resumable else 0
        self._file.truncate(kept)
        if not kept:
            self._append({"identity": identity})

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def finish(self, unit: str, checksums: list[int]) -> None:
        """Note durably that a unit is done."""
        self._append({"unit": unit, "checksums": checksums})
        self.finished[unit] = checksums

    def remove(self) -> None:
        """Delete the journal: the job is complete."""
        self.path.unlink()

    def _append(self, entry: dict[str, object]) -> None:
        self._file.write(json.dumps(entry).encode() + b"\n")
        os.fsync(self._file.fileno())

    def _whole_lines(self, identity: str) -> int:
        """Take over what an earlier run of the same job finished; the bytes of its whole lines."""
        self._file.seek(0)
        kept = 0
        for line in self._file.read().splitlines(keepends=True):
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not line.endswith(b"\n") or entry.get("identity", identity) != identity:
                break
            if "unit" in entry:
                self.finished[entry["unit"]] = entry["checksums"]
            kept += len(line)
        return kept
