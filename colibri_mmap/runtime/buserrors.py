"""Pages that vanish: what happens when a mapped model file is truncated or its disk fails.

The system answers the touch of such a page with SIGBUS, whose default ends the process. A native
handler (Python's own would run too late) maps zeros over the whole protected range and notes the
address, so that the computation finishes soon; `Protection.take_fault` is then asked before any
result leaves the engine. Other addresses go to the handler that was there before.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import threading
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.core import cgutils
from numba.extending import intrinsic

from .simd import load_i32, load_i64, store_i64

_SYMBOL = "colibri_bus_error_table"
_MOST_RANGES = 4096
_PREVIOUS, _COUNT, _FIRST = 0, 8, 16  # byte offsets in the table: a handler, a number, the entries
_BEGIN, _END, _FAULT, _ENTRY = 0, 8, 16, 24  # byte offsets in an entry, and its size
_SYS_MMAP = {"x86_64": 9}.get(platform.machine(), 222)
_PROT_READ, _PRIVATE_FIXED_ANONYMOUS = 1, 0x02 | 0x10 | 0x20
_SI_CODE, _SI_ADDR = 8, 16  # of siginfo_t, on 64-bit Linux
_SA_SIGINFO = 4
_I64 = ir.IntType(64)

_table = np.zeros((_FIRST + _ENTRY * _MOST_RANGES) // 8, np.int64)
_entries = _table[_FIRST // 8 :].reshape(-1, _ENTRY // 8)
# A symbol rather than a constant: the handler's machine code is cached across processes.
llvm.add_symbol(_SYMBOL, _table.ctypes.data)


@intrinsic
def _table_address(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        symbol = builder.module.globals.get(_SYMBOL)
        if symbol is None:
            symbol = ir.GlobalVariable(builder.module, _I64, _SYMBOL)
            symbol.linkage = "external"
        return builder.ptrtoint(symbol, _I64)

    return types.int64(), generate


@intrinsic
def _map_zeros(typing: Any, address: Any, nbytes: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        words = (_PROT_READ, _PRIVATE_FIXED_ANONYMOUS, -1, 0)
        constants = [ir.Constant(_I64, word) for word in words]
        return builder.call(function, [ir.Constant(_I64, _SYS_MMAP), *arguments, *constants])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _call_handler(typing: Any, handler: Any, number: Any, info: Any, context_address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32), _I64, _I64])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int32, types.int64, types.int64), generate


@intrinsic
def _restore_default(typing: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [ir.IntType(32), _I64])
        function = cgutils.get_or_insert_function(builder.module, kind, "signal")
        number = ir.Constant(ir.IntType(32), int(signal.SIGBUS))
        builder.call(function, [number, ir.Constant(_I64, 0)])
        return context.get_dummy_value()

    return types.void(), generate


def _on_bus_error(number, info, context):
    """Zeros over a protected range; anything else as it was before."""
    table = _table_address()
    address = load_i64(info + _SI_ADDR)
    if load_i32(info + _SI_CODE) > 0:  # else it was sent by a process, and there is no address
        for index in range(load_i64(table + _COUNT)):
            entry = table + _FIRST + _ENTRY * index
            begin, end = load_i64(entry + _BEGIN), load_i64(entry + _END)
            if begin <= address < end:
                store_i64(entry + _FAULT, address)
                _map_zeros(begin, end - begin)
                return
    previous = load_i64(table + _PREVIOUS)
    if previous > 1:
        _call_handler(previous, number, info, context)
    else:
        _restore_default()  # the same touch, right after this, then ends the process


class _Action(ctypes.Structure):
    """struct sigaction of the C library."""

    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


class _Handler:
    """The handler, installed while any range is protected."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._compiled: Any = None  # must outlive the signal handler that it is
        self._before: _Action | None = None
        self._sigaction = ctypes.CDLL(None).sigaction

    def install(self) -> None:
        if self._before is not None:
            return
        if self._compiled is None:
            kind = types.void(types.int32, types.int64, types.int64)
            self._compiled = cfunc(kind, nopython=True, cache=True)(_on_bus_error)
        self._before = _Action()
        action = _Action(handler=self._compiled.address, flags=_SA_SIGINFO)
        self._sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(self._before))
        _table[_PREVIOUS // 8] = self._before.handler or 0

    def remove(self) -> None:
        """Bring the previous handler back, unless another was installed since, on top of ours."""
        current = _Action()
        self._sigaction(int(signal.SIGBUS), None, ctypes.byref(current))
        if self._before is not None and current.handler == self._compiled.address:
            self._sigaction(int(signal.SIGBUS), ctypes.byref(self._before), None)
            self._before = None


_handler = _Handler()


class Protection:
    """From now until `release`, faults in [address, address + nbytes) read as zeros and are noted.

    The range begins at a page and is all zeros from the first fault on: the caller maps it anew.
    """

    def __init__(self, address: int, nbytes: int) -> None:
        assert address % mmap.PAGESIZE == 0
        with _handler.lock:
            free = np.flatnonzero(_entries[:, _END // 8] == 0)
            assert free.size, "too many ranges are protected"
            self._entry = _entries[free[0]]
            self._entry[_BEGIN // 8], self._entry[_FAULT // 8] = address, 0
            # the end last: a handler that runs meanwhile must not see half an entry
            self._entry[_END // 8] = address + -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
            _table[_COUNT // 8] = max(_table[_COUNT // 8], free[0] + 1)
            _handler.install()

    def take_fault(self) -> int:
        """The address of the latest fault since this was last asked; 0 if there was none."""
        fault = int(self._entry[_FAULT // 8])
        if fault:
            self._entry[_FAULT // 8] = 0
        return fault

    def release(self) -> None:
        """End the protection."""
        with _handler.lock:
            self._entry[_END // 8] = 0
            if not _entries[:, _END // 8].any():
                _handler.remove()
