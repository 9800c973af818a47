"""Ways to write small models."""

from __future__ import annotations

from pathlib import Path

import pytest
import rawgguf as raw
from rawgguf import ONE_TENSOR, ONE_TENSOR_DATA

from colibri_mmap.format.gguf import GGUF, open_gguf


@pytest.fixture
def write(tmp_path: Path):
    def write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.fixture
def opened(write):
    """Opens a model with the given key-value pairs."""

    def opened(*pairs: bytes) -> GGUF:
        return open_gguf(write(raw.gguf(pairs, ONE_TENSOR, ONE_TENSOR_DATA)))

    return opened
