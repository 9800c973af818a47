"""Model files with some metadata or tensors changed, written by gguf-py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np


def write_variant(
    source: Path,
    target: Path,
    changes: Mapping[str, object] | None = None,
    *,
    architecture: str | None = None,
    without_tensor: str | None = None,
    tensors: Mapping[str, tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
) -> Path:
    """A copy of `source`; None leaves a key out, a key that is new is a string or a number.

    `tensors` have other bytes and types.
    """
    changes = dict(changes or {})
    reader = gguf.GGUFReader(source)
    fields = {n: f for n, f in reader.fields.items() if not n.startswith("GGUF.")}
    name = architecture or fields.pop("general.architecture").contents()
    fields.pop("general.architecture", None)
    writer = gguf.GGUFWriter(target, name)
    for key, field in fields.items():
        value = changes.pop(key, field.contents())
        if value is not None:
            element = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            kind = field.types[0] if element else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, kind, element)
    for key, value in changes.items():
        assert value is not None, f"{source} has no {key}"
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name != without_tensor:
            data, kind = (tensors or {}).get(tensor.name, (tensor.data, tensor.tensor_type))
            writer.add_tensor(tensor.name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def write_dequantised(source: Path, target: Path) -> Path:
    """A copy of `source` whose weights are float32, as gguf-py makes them."""
    kind = gguf.GGMLQuantizationType.F32
    tensors = {
        tensor.name: (gguf.quants.dequantize(tensor.data, tensor.tensor_type), kind)
        for tensor in gguf.GGUFReader(source).tensors
    }
    return write_variant(source, target, tensors=tensors)
