"""The comparison with gguf-py, whose reader is an oracle for ours."""

from __future__ import annotations

from pathlib import Path

import gguf

from colibri_mmap.format.gguf import GGUFArray, open_gguf


def assert_same_as_gguf_py(path: Path) -> None:
    ours, theirs = open_gguf(path), gguf.GGUFReader(path)
    assert [
        (t.name, int(t.tensor_type), tuple(t.shape.tolist()), t.data_offset, t.n_bytes)
        for t in theirs.tensors
    ] == [(t.name, int(t.type), t.shape, t.offset, t.nbytes) for t in ours.tensors.values()]
    fields = {k: f for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert list(fields) == list(ours.metadata)
    for key, field in fields.items():
        value = ours.metadata[key]
        assert field.contents() == (value.tolist() if isinstance(value, GGUFArray) else value), key
