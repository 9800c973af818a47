"""A kernel as a C function that the thread pool calls: `void task(args, lo, hi, scratch)`.

`args` is the address of the job's int64 argument words, `[lo, hi)` the share of its units to do,
and `scratch` the address of `SCRATCH_BYTES` of 64-byte aligned memory that belongs to the thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

from numba import cfunc, types

from . import simd  # noqa: F401  (chooses target and cache directory before anything is compiled)

SCRATCH_BYTES = 1 << 18
_SIGNATURE = types.void(types.int64, types.int64, types.int64, types.int64)


class Task:
    """One kernel, compiled (or read from the cache) when its address is first asked for."""

    def __init__(self, function: Callable[[int, int, int, int], None]) -> None:
        self.function = function
        self.name = function.__name__
        self.__doc__ = function.__doc__

    @cached_property
    def _compiled(self) -> Any:
        options = {"nopython": True, "boundscheck": False, "error_model": "numpy"}
        return cfunc(_SIGNATURE, cache=True, **options)(self.function)

    @cached_property
    def address(self) -> int:
        return int(self._compiled.address)

    @property
    def was_cached(self) -> bool:
        """Whether the machine code came from the cache; compiles if need be."""
        return bool(self._compiled.cache_hits)


def compile_all(tasks: Iterable[Task], progress: Callable[[str, int, int], None]) -> int:
    """Make every task ready, telling `progress(name, done, total)`; how many had to be compiled."""
    tasks = list(tasks)
    compiled = 0
    for done, task in enumerate(tasks):
        progress(task.name, done, len(tasks))
        compiled += not task.was_cached
    progress("", len(tasks), len(tasks))
    return compiled
