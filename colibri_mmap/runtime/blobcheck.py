"""Files of the hub's cache against the checksums that their contents are named by."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..format.stream import StreamReader

_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Compared:
    """What was read, and the files whose content is not what its name says."""

    checked_bytes: int
    damaged: tuple[Path, ...]


def compare_with_names(
    paths: Sequence[Path], progress: Callable[[int, int], None]
) -> Compared | None:
    """Read files to their end and compare them with the checksums that name their contents.

    None, and nothing is read, unless all of them have one: they lie elsewhere. `progress` is
    called with the bytes so far and in all. ModelReadError.
    """
    names = [_checksum_in_name(path) for path in paths]
    sizes = [path.stat().st_size for path in paths]
    if None in names:
        return None
    done, damaged = 0, []
    with StreamReader(tuple(paths)) as reader:
        for number, (name, size) in enumerate(zip(names, sizes, strict=True)):
            digest = hashlib.sha256()
            for chunk in reader.chunks(number, 0, size):
                digest.update(chunk)
                done += len(chunk)
                progress(done, sum(sizes))
            if digest.hexdigest() != name:
                damaged.append(paths[number])
    return Compared(done, tuple(damaged))


def _checksum_in_name(path: Path) -> str | None:
    """The name of the content that a path in a snapshot links to, if it is a sha256."""
    content = path.resolve()
    named = content.parent.name == "blobs" and _SHA256.fullmatch(content.name)
    return content.name if named else None
