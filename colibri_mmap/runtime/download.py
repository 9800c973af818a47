"""Fetching a model from the hub into the shared cache: resumed, checked, complete or not at all.

huggingface_hub deletes what had arrived when a download ends early and compares no checksums, so
its cache is written here: the same files, links, locks and names (see modelstore.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path, PurePosixPath

from colibri_mmap.errors import ResourceError
from colibri_mmap.runtime.hub import HubFile, Repository, TransferError, transfer
from colibri_mmap.runtime.modelstore import (
    INCOMPLETE,
    TREE_VERSION,
    download_lock,
    repository_directory,
)

Progress = Callable[[str, int, int], None]
"""Called with what is done, its bytes so far and its bytes in total."""

SPAN_BYTES = 8 << 30  # of one request: the hub's servers refuse answers above 50 GB
WAITS = (1, 2, 4, 8, 15, 30, 30)  # seconds before each new try that follows one without a byte
_CHUNK = 1 << 20


def bytes_to_fetch(repository: Repository, files: Sequence[HubFile], cache: Path) -> int:
    """How much of the files is not in the cache."""
    return sum(_bytes_missing(repository, file, cache) for file in files)


def fetch(
    repository: Repository,
    files: Sequence[HubFile],
    cache: Path,
    progress: Progress,
    pause: Callable[[float], None] = time.sleep,
) -> list[Path]:
    """Bring files of a repository into the cache; their paths in its snapshot.

    What has arrived stays when this ends early, and the next call goes on there. A file appears
    under its name once its checksum agrees; one that does not is deleted. ResourceError for lack
    of space, a connection that stays broken, or a wrong checksum.
    """
    directory = repository_directory(cache, repository.name)
    try:
        _check_space(bytes_to_fetch(repository, files, cache), cache)
        _prepare(repository, directory)
        paths = []
        for number, file in enumerate(files, 1):
            name = PurePosixPath(file.path).name
            label = f"{number}/{len(files)} {name}" if len(files) > 1 else name
            link = directory / "snapshots" / repository.commit / file.path
            if not _is_here(link, file):
                blob = directory / "blobs" / file.blob
                with download_lock(cache, repository.name, file.blob):
                    if not _is_here(blob, file):
                        _fetch_blob(repository, file, blob, label, progress, pause)
                    _link(blob, link)
            paths.append(link)
    except OSError as error:
        raise ResourceError(
            f"{error.filename or cache}: {error.strerror}; what has arrived is kept, and the same "
            "command goes on from there"
        ) from error
    return paths


def _check_space(needed: int, cache: Path) -> None:
    place = next(path for path in (cache, *cache.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ResourceError(
            f"{cache}: {needed / 1e9:.2f} GB are to be downloaded, but only {free / 1e9:.2f} GB "
            "are free; make room, or set HF_HOME to a directory on a larger disk"
        )


def _prepare(repository: Repository, directory: Path) -> None:
    """Lay out the repository in the cache: its commit, and what the commit holds."""
    (directory / "blobs").mkdir(parents=True, exist_ok=True)
    (directory / "snapshots" / repository.commit).mkdir(parents=True, exist_ok=True)
    entries = {}
    for path, file in sorted(repository.files.items()):
        entry: dict[str, str | int] = {"size": file.nbytes, "blob_id": file.git_id}
        if file.sha256 is not None:
            entry |= {"lfs_sha256": file.sha256, "lfs_size": file.nbytes}
        entries[path] = entry
    tree = directory / "trees" / f"{repository.commit}.json"
    if not tree.exists():
        content = {"format_version": TREE_VERSION, "files": entries}
        _write(tree, json.dumps(content, indent=1))
    if repository.revision != repository.commit:
        _write(directory / "refs" / repository.revision, repository.commit)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)


def _is_here(path: Path, file: HubFile) -> bool:
    return path.is_file() and path.stat().st_size == file.nbytes


def _bytes_missing(repository: Repository, file: HubFile, cache: Path) -> int:
    directory = repository_directory(cache, repository.name)
    blob = directory / "blobs" / file.blob
    link = directory / "snapshots" / repository.commit / file.path
    if _is_here(blob, file) or _is_here(link, file):
        return 0
    partial = blob.with_name(blob.name + INCOMPLETE)
    return max(0, file.nbytes - (partial.stat().st_size if partial.is_file() else 0))


def _fetch_blob(
    repository: Repository,
    file: HubFile,
    blob: Path,
    label: str,
    progress: Progress,
    pause: Callable[[float], None],
) -> None:
    """Download and check the content of one file, which then appears as `blob`."""
    partial = blob.with_name(blob.name + INCOMPLETE)
    with FileIO(partial, "a") as out:
        _receive(repository, file, out, label, progress, pause)
        os.fsync(out.fileno())
    found = _digest(partial, file, f"checking {label}", progress)
    if found != file.blob:
        partial.unlink()
        raise ResourceError(
            f"{file.path}: its checksum is {found}, not {file.blob}: it was damaged on the way and "
            "has been deleted; pull it again"
        )
    partial.replace(blob)


def _receive(
    repository: Repository,
    file: HubFile,
    out: FileIO,
    label: str,
    progress: Progress,
    pause: Callable[[float], None],
) -> None:
    """Append the bytes that a file still lacks, over as many requests as it takes."""
    waits = iter(WAITS)
    if out.tell() > file.nbytes:
        out.truncate(0)
    while (have := out.seek(0, os.SEEK_END)) < file.nbytes:
        progress(label, have, file.nbytes)
        reason = "the connection was closed"
        try:
            with transfer(repository, file, have, min(have + SPAN_BYTES, file.nbytes)) as answer:
                start, chunks = answer
                if start != have:
                    out.truncate(start)
                for chunk in chunks:
                    _append(out, chunk)
                    progress(label, out.tell(), file.nbytes)
        except TransferError as error:
            reason = str(error)
        if out.tell() > have:
            waits = iter(WAITS)
            continue
        wait = next(waits, None)
        if wait is None:
            raise ResourceError(
                f"{file.path}: broke off at {have / file.nbytes:.0%} ({reason}); the same command "
                "goes on from there"
            )
        progress(f"{label}: {reason}, trying again", have, file.nbytes)
        pause(wait)


def _append(out: FileIO, chunk: bytes) -> None:
    """Write all of a chunk: a disk that is nearly full takes less, then refuses."""
    rest = memoryview(chunk)
    while rest:
        rest = rest[out.write(rest) :]


def _digest(path: Path, file: HubFile, label: str, progress: Progress) -> str:
    """The checksum of a file as the hub counts it: sha256, or git's where git keeps it."""
    digest = hashlib.sha256()
    if file.sha256 is None:
        digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    done = 0
    with path.open("rb") as source:
        while chunk := source.read(_CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(label, done, file.nbytes)
    return digest.hexdigest()


def _link(blob: Path, link: Path) -> None:
    """Let a path in a snapshot mean a blob; without symbolic links it becomes the file itself."""
    link.parent.mkdir(parents=True, exist_ok=True)
    temporary = link.with_name(f".{link.name}.{os.getpid()}")
    try:
        temporary.symlink_to(os.path.relpath(blob, link.parent))
    except OSError:  # exFAT, for one, has no links
        blob.replace(link)
    else:
        temporary.replace(link)
