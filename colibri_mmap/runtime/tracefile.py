"""Routing on file: which experts each forward pass chose, to be replayed through cache policies.

Layout, little-endian:

    magic          8 bytes "COLIBRI\\x01"
    header length  uint32
    header         JSON: architecture, name, layers (their numbers in the model), n_experts, top_k,
                   expert_bytes (of one expert, per layer)
    records, one per forward pass:
        tokens     uint32, T
        checksum   uint32, CRC-32 of the tokens field and the ids
        ids        uint16 [layers, T, top_k], in router order

A record is written at once. One that is cut short or damaged ends the trace: what follows is
dropped when the file is read, and overwritten when it is continued.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, FormatError
from ..format.experts import expert_layers
from ..format.gguf import GGUF

MAGIC = b"COLIBRI\x01"

_LENGTH = struct.Struct("<I")
_RECORD = struct.Struct("<II")
_MAX_HEADER = 1 << 20
_ID = np.dtype("<u2")


@dataclass(frozen=True, slots=True)
class TraceHeader:
    """The model of a trace: `layers` are those with experts, `expert_bytes` has one for each."""

    architecture: str
    name: str
    layers: tuple[int, ...]
    n_experts: int
    top_k: int
    expert_bytes: tuple[int, ...]

    @classmethod
    def of(cls, gguf: GGUF) -> TraceHeader:
        """The header for traces of a model; ArgumentError if it has no experts."""
        layers = expert_layers(gguf)
        if not layers:
            raise ArgumentError(f"{gguf.path}: has no experts, so there is no routing to record")
        n_experts = max(layer.n_experts for layer in layers.values())
        return cls(
            gguf.architecture,
            gguf.str("general.name", ""),
            tuple(layers),
            n_experts,
            gguf.int(".expert_used_count", minimum=1, maximum=n_experts),
            tuple(layer.expert_bytes for layer in layers.values()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """A trace in memory: `passes` are the expert ids uint16 [layers, T, k] of each forward pass."""

    header: TraceHeader
    passes: tuple[NDArray[np.uint16], ...]

    @property
    def tokens(self) -> int:
        """All tokens of all passes."""
        return sum(ids.shape[1] for ids in self.passes)


class TraceWriter:
    """Appends forward passes to a trace file, new or of the same model; a context manager."""

    def __init__(self, path: str | PathLike[str], header: TraceHeader) -> None:
        self._header = header
        path = Path(path)
        try:
            continued = path.exists() and path.stat().st_size > 0
            self._file: IO[bytes] = path.open("r+b" if continued else "wb")
        except OSError as error:
            raise ArgumentError(f"{path}: cannot be written ({error.strerror})") from error
        try:
            if continued:
                self._continue(path)
            else:
                self._file.write(_packed_header(header))
        except BaseException:
            self._file.close()
            raise

    def write(self, experts: Mapping[int, NDArray[np.int64]]) -> None:
        """Append one forward pass: per layer the ids [T, k] of all its tokens."""
        ids = np.stack([experts[layer] for layer in self._header.layers]).astype(_ID)
        assert ids.shape[2] == self._header.top_k
        data, tokens = ids.tobytes(), ids.shape[1]
        self._file.write(_RECORD.pack(tokens, _checksum(tokens, data)) + data)
        self._file.flush()

    def close(self) -> None:
        """End the trace."""
        self._file.close()

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _continue(self, path: Path) -> None:
        """Check that the file is of this model and go to the end of its last whole record."""
        header = _read_header(self._file, path)
        if header != self._header:
            raise ArgumentError(f"{path}: is a trace of another model: choose another file")
        end = self._file.tell()
        for _ in _records(self._file, header):
            end = self._file.tell()
        self._file.seek(end)
        self._file.truncate()


def read_trace(path: str | PathLike[str]) -> RoutingTrace:
    """A whole trace file; FormatError if it is none, ArgumentError if it cannot be read."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            header = _read_header(file, path)
            return RoutingTrace(header, tuple(_records(file, header)))
    except OSError as error:
        raise ArgumentError(f"{path}: cannot be read ({error.strerror})") from error


def _records(file: IO[bytes], header: TraceHeader) -> Iterator[NDArray[np.uint16]]:
    """The whole and sound records from the file's position on."""
    layers, k = len(header.layers), header.top_k
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        tokens, checksum = _RECORD.unpack(head)
        nbytes = layers * tokens * k * _ID.itemsize
        data = file.read(nbytes)
        if len(data) < nbytes or _checksum(tokens, data) != checksum:
            return
        ids = np.frombuffer(data, _ID).reshape(layers, tokens, k)
        if ids.size and int(ids.max()) >= header.n_experts:
            return
        yield ids


def _checksum(tokens: int, data: bytes) -> int:
    return zlib.crc32(data, zlib.crc32(_LENGTH.pack(tokens)))


def _packed_header(header: TraceHeader) -> bytes:
    text = json.dumps(asdict(header)).encode()
    return MAGIC + _LENGTH.pack(len(text)) + text


def _read_header(file: IO[bytes], path: Path) -> TraceHeader:
    """The header, checked; the file is then at its first record."""

    def fail(reason: str) -> FormatError:
        return FormatError(path, "header", reason)

    start = file.read(len(MAGIC) + _LENGTH.size)
    if not start.startswith(MAGIC) or len(start) < len(MAGIC) + _LENGTH.size:
        raise fail("is not a routing trace: record one with the command trace")
    (length,) = _LENGTH.unpack(start[len(MAGIC) :])
    text = file.read(min(length, _MAX_HEADER))
    try:
        fields = json.loads(text)
        header = TraceHeader(
            str(fields["architecture"]),
            str(fields["name"]),
            tuple(int(layer) for layer in fields["layers"]),
            int(fields["n_experts"]),
            int(fields["top_k"]),
            tuple(int(size) for size in fields["expert_bytes"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise fail("is damaged: record the trace again") from error
    sane = 1 <= header.top_k <= header.n_experts <= 1 << 16
    if not sane or not header.layers or len(header.layers) != len(header.expert_bytes):
        raise fail("is damaged: record the trace again")
    return header
