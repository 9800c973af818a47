"""One small random MoE model, written by gguf-py in every layout that experts come in."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

LAYOUTS = ("stacked", "fused", "per expert")
LAYERS, EXPERTS, WIDTH, EXPERT_WIDTH = 2, 4, 64, 32
Q8_0, Q4_0, F32 = (gguf.GGMLQuantizationType[name] for name in ("Q8_0", "Q4_0", "F32"))


def expert_bytes() -> dict[tuple[int, str], NDArray[np.uint8]]:
    """(layer, part) -> bytes [expert, rows, bytes per row]; down has another type in layer 1."""
    random = np.random.default_rng(7)
    down_row = {0: 34, 1: 18}  # Q8_0, Q4_0
    return {
        (layer, part): random.integers(0, 256, (EXPERTS, *shape), np.uint8)
        for layer in range(LAYERS)
        for part, shape in {
            "gate": (EXPERT_WIDTH, 68),
            "up": (EXPERT_WIDTH, 68),
            "down": (WIDTH, down_row[layer]),
            "gate_bias": (1, 4 * EXPERT_WIDTH),
            "up_bias": (1, 4 * EXPERT_WIDTH),
            "down_bias": (1, 4 * WIDTH),
        }.items()
    }


def write_model(path: Path, layout: str) -> Path:
    """A model of the architecture `test` whose trunk is written in no sensible order."""
    writer = gguf.GGUFWriter(path, "test")
    writer.add_uint32("test.block_count", LAYERS)
    writer.add_uint32("test.expert_count", EXPERTS)
    writer.add_uint32("test.expert_used_count", 2)
    writer.add_array("words", ["a", "grüße"])
    random = np.random.default_rng(8)
    trunk = "output output_norm blk.1.ffn_gate_inp blk.1.attn_norm blk.0.attn_q blk.0.attn_norm"
    for name in f"{trunk} blk.0.attn_output blk.0.ffn_norm token_embd".split():
        writer.add_tensor(f"{name}.weight", random.standard_normal((3, WIDTH), np.float32))
    parts = expert_bytes()
    for layer in range(LAYERS):
        matrices = {name: parts[layer, name] for name in ("gate", "up", "down")}
        biases = {name: parts[layer, f"{name}_bias"].view("<f4")[:, 0] for name in matrices}
        if layout == "fused":
            for values, axis in ((matrices, 1), (biases, 1)):
                joined = np.concatenate([values.pop("gate"), values.pop("up")], axis=axis)
                values["gate_up"] = joined
        for name, matrix in matrices.items():
            type = Q4_0 if (layer, name) == (1, "down") else Q8_0
            bias = biases[name]
            if layout == "per expert":
                for expert in range(EXPERTS):
                    prefix = f"blk.{layer}.ffn_{name}.{expert}"
                    writer.add_tensor(f"{prefix}.weight", matrix[expert], raw_dtype=type)
                    writer.add_tensor(f"{prefix}.bias", bias[expert].copy())
            else:
                prefix = f"blk.{layer}.ffn_{name}_exps"
                writer.add_tensor(f"{prefix}.weight", matrix, raw_dtype=type)
                writer.add_tensor(f"{prefix}.bias", bias.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
