"""NVRTC through ctypes: CUDA text to machine code without a driver (wheel nvidia-cuda-nvrtc)."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from importlib.metadata import files
from pathlib import Path
from typing import Any

_REPORT = re.compile(
    r"Compiling entry function '(\w+)'[\s\S]*?(\d+) bytes spill stores[\s\S]*?Used (\d+) registers"
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """Machine code, and of each kernel (registers, bytes spilled)."""

    code: bytes
    usage: dict[str, tuple[int, int]]


class Nvrtc:
    """The compiler; `PackageNotFoundError` where its wheel is not installed."""

    def __init__(self) -> None:
        names = [str(f.locate()) for f in files("nvidia-cuda-nvrtc") or () if _is_library(f.name)]
        self._library: Any = ctypes.CDLL(names[0])

    def compile(self, source: str, architecture: str) -> Compiled:
        """For such as `sm_86`; AssertionError with the compiler's messages."""
        program = ctypes.c_void_p()
        self._do("CreateProgram", ctypes.byref(program), source.encode(), b"k.cu", 0, None, None)
        options = [b"-std=c++17", b"--ptxas-options=-v", f"-arch={architecture}".encode()]
        listed = (ctypes.c_char_p * len(options))(*options)
        failed = self._library.nvrtcCompileProgram(program, len(options), listed)
        log = self._text("ProgramLog", program).decode()
        assert not failed, log
        usage = {name: (int(used), int(spilled)) for name, spilled, used in _REPORT.findall(log)}
        compiled = Compiled(self._text("CUBIN", program), usage)
        self._do("DestroyProgram", ctypes.byref(program))
        return compiled

    def _text(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._do(f"Get{what}Size", program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        self._do(f"Get{what}", program, text)
        return text.raw.rstrip(b"\0") if what == "ProgramLog" else text.raw

    def _do(self, function: str, *arguments: Any) -> None:
        status = getattr(self._library, f"nvrtc{function}")(*arguments)
        assert status == 0, f"nvrtc{function} gives {status}"


def _is_library(name: str) -> bool:
    return Path(name).name.startswith("libnvrtc.so")
