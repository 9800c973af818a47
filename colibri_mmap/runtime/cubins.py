"""Machine code of GPU kernels, kept between runs beside the CPU's."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable

from .state import kernel_directory, replace_file

_DIGEST_BYTES = 32


def kept_code(key: str, make: Callable[[], bytes]) -> bytes:
    """What `make` gives; what it gave an earlier run for the same key, if that is still whole."""
    path = kernel_directory() / "gpu" / f"{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        digest, code = _parted(path.read_bytes())
        if hashlib.sha256(code).digest() == digest:
            return code
    code = make()
    with contextlib.suppress(OSError):  # then the next run makes it anew
        replace_file(path, hashlib.sha256(code).digest() + code)
    return code


def _parted(content: bytes) -> tuple[bytes, bytes]:
    return content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
