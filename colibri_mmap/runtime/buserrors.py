"""Pages that vanish: what happens when a mapped model file is truncated or its disk fails.

The system answers the touch of such a page with SIGBUS, whose default ends the process. A native
handler (Python's own would run too late) maps a page of zeros over it and counts, so that the
computation finishes; `bus_error_count` is then looked at before any result leaves the engine.
Addresses outside the protected ranges go to the handler that was there before.
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

from .simd import load_i64, store_i64

_SYMBOL = "colibri_bus_error_table"
_MOST_RANGES = 1024
_COUNT, _LAST, _RANGES, _PREVIOUS, _FIRST = 0, 8, 16, 24, 32  # byte offsets in the table
_PAGE = mmap.PAGESIZE
_SYS_MMAP = {"x86_64": 9}.get(platform.machine(), 222)
_PROT_READ, _PRIVATE_FIXED_ANONYMOUS = 1, 0x02 | 0x10 | 0x20
_SI_ADDR = 16  # of siginfo_t, on 64-bit Linux
_SA_SIGINFO = 4
_I64 = ir.IntType(64)

_table = np.zeros(_FIRST // 8 + 2 * _MOST_RANGES, np.int64)
# A symbol rather than a constant: the handler's machine code is cached across processes.
llvm.add_symbol(_SYMBOL, _table.ctypes.data)
_lock = threading.Lock()


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
def _map_zeros(typing: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = ir.FunctionType(_I64, [_I64], var_arg=True)
        function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
        words = (_PAGE, _PROT_READ, _PRIVATE_FIXED_ANONYMOUS, -1, 0)
        constants = [ir.Constant(_I64, word) for word in words]
        return builder.call(function, [ir.Constant(_I64, _SYS_MMAP), arguments[0], *constants])

    return types.int64(types.int64), generate


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
    """Zeros over a protected page; anything else as it was before."""
    table = _table_address()
    address = load_i64(info + _SI_ADDR)
    for index in range(load_i64(table + _RANGES)):
        entry = table + _FIRST + 16 * index
        if load_i64(entry) <= address < load_i64(entry + 8):
            _map_zeros(address & ~(_PAGE - 1))
            store_i64(table + _LAST, address)
            store_i64(table + _COUNT, load_i64(table + _COUNT) + 1)
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


_libc = ctypes.CDLL(None, use_errno=True)
_before = _Action()


def protect(address: int, nbytes: int) -> None:
    """Faults in [address, address + nbytes) read as zeros and are counted, until `release`."""
    with _lock:
        count = int(_table[_RANGES // 8])
        assert count < _MOST_RANGES
        _table[_FIRST // 8 + 2 * count : _FIRST // 8 + 2 * count + 2] = address, address + nbytes
        _table[_RANGES // 8] = count + 1
        if count == 0:
            _install()


def release(address: int) -> None:
    """End the protection of the range that begins at `address`."""
    with _lock:
        count = int(_table[_RANGES // 8])
        pairs = _table[_FIRST // 8 :].reshape(-1, 2)
        (index,) = np.flatnonzero(pairs[:count, 0] == address)[:1]
        pairs[index] = pairs[count - 1]
        _table[_RANGES // 8] = count - 1
        if count == 1:
            _libc.sigaction(int(signal.SIGBUS), ctypes.byref(_before), None)


def bus_error_count() -> tuple[int, int]:
    """How many pages were replaced by zeros so far, and the address of the latest fault."""
    return int(_table[_COUNT // 8]), int(_table[_LAST // 8])


def _install() -> None:
    handler = cfunc(types.void(types.int32, types.int64, types.int64), nopython=True, cache=True)(
        _on_bus_error
    )
    action = _Action(handler=handler.address, flags=_SA_SIGINFO)
    _libc.sigaction(int(signal.SIGBUS), ctypes.byref(action), ctypes.byref(_before))
    _table[_PREVIOUS // 8] = _before.handler or 0
    _keep.append(handler)


_keep: list[Any] = []  # compiled code must outlive the signal handler that it is
