"""A file system with one file whose bytes can be made unreadable: the other side of /dev/fuse.

It serves a copy of a file from a process of its own: a page fault that waits for this side must
not hold what this side needs. Protocol: include/uapi/linux/fuse.h of Linux.
"""

from __future__ import annotations

import ctypes
import errno
import os
import select
import stat
import struct
import subprocess
import sys
from pathlib import Path
from types import TracebackType

import pytest

_libc = ctypes.CDLL(None, use_errno=True)
_MNT_DETACH = 2
_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _RELEASE, _FLUSH, _INIT = 1, 2, 3, 14, 15, 18, 25, 26
_INTERRUPT, _BATCH_FORGET = 36, 42
_ROOT, _FILE = 1, 2  # node ids
_FOR_EVER = 10**6  # seconds
_MOST_READ = 128 << 10  # bytes


class FaultyFile:
    """A copy of a file in which ranges of bytes can fail; `path` is where it is."""

    def __init__(self, source: Path, folder: Path) -> None:
        if os.geteuid() != 0 or not Path("/dev/fuse").exists():
            pytest.skip("mounting a file system needs root and /dev/fuse")
        self._folder = folder / "faulty"
        self._folder.mkdir()
        self.path = self._folder / source.name
        device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if _libc.mount(b"faulty", bytes(self._folder), b"fuse", 0, options) != 0:
            os.close(device)
            pytest.skip(f"mounting is refused: {os.strerror(ctypes.get_errno())}")
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(device), source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[device],
            text=True,
        )
        os.close(device)

    def fail(self, offset: int, nbytes: int) -> None:
        """From now on reads that touch this range, and no other, give EIO."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(offset, offset + nbytes, file=self._server.stdin, flush=True)
        assert self._server.stdout.readline() == "understood\n"

    def heal(self) -> None:
        """From now on all bytes can be read."""
        self.fail(0, 0)

    def __enter__(self) -> FaultyFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _libc.umount2(bytes(self._folder), _MNT_DETACH)
        self._server.kill()
        self._server.communicate()


class _Server:
    def __init__(self, device: int, source: Path) -> None:
        self._device, self._content, self._name = device, source.read_bytes(), source.name
        self._failing = (0, 0)

    def run(self) -> None:
        """Answer the system, and commands on the standard input, until that closes."""
        while True:
            ready, _, _ = select.select([self._device, sys.stdin], [], [])
            if sys.stdin in ready:
                line = sys.stdin.readline()
                if not line:
                    return
                begin, end = map(int, line.split())
                self._failing = begin, end
                print("understood", flush=True)
            if self._device in ready:
                try:
                    request = os.read(self._device, _MOST_READ + 4096)
                except OSError as error:
                    if error.errno == errno.ENODEV:  # unmounted
                        return
                    raise
                self._answer(request)

    def _answer(self, request: bytes) -> None:
        _, operation, unique, node = struct.unpack_from("=IIQQ", request)
        if operation in (_FORGET, _BATCH_FORGET, _INTERRUPT):
            return
        code, answer = 0, b""
        if operation == _INIT:
            size = _MOST_READ
            answer = struct.pack("=IIIIHHII", 7, 31, size, 0, 12, 9, size, 1) + bytes(36)
        elif operation == _LOOKUP and request[40:-1].decode() == self._name:
            answer = struct.pack("=QQQQQ", _FILE, 0, _FOR_EVER, _FOR_EVER, 0) + self._status(_FILE)
        elif operation == _LOOKUP:
            code = errno.ENOENT
        elif operation == _GETATTR:
            answer = struct.pack("=QQ", _FOR_EVER, 0) + self._status(node)
        elif operation == _OPEN:
            answer = bytes(16)
        elif operation == _READ:
            _, offset, size = struct.unpack_from("=QQI", request, 40)
            answer = self._content[offset : offset + size]
            begin, end = self._failing
            if offset < end and begin < offset + size:
                code, answer = errno.EIO, b""
        elif operation not in (_RELEASE, _FLUSH):
            code = errno.ENOSYS
        os.write(self._device, struct.pack("=IiQ", 16 + len(answer), -code, unique) + answer)

    def _status(self, node: int) -> bytes:
        mode, size = stat.S_IFDIR | 0o755, 0
        if node == _FILE:
            mode, size = stat.S_IFREG | 0o644, len(self._content)
        times = bytes(3 * 8 + 3 * 4)
        return (
            struct.pack("=QQQ", node, size, -(-size // 512))
            + times
            + struct.pack("=IIIIIII", mode, 1, 0, 0, 0, 4096, 0)
        )


if __name__ == "__main__":
    _Server(int(sys.argv[1]), Path(sys.argv[2])).run()
