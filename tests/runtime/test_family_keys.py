"""Hyperparameters that are missing or cannot be: every family names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from variants import write_variant

from colibri_mmap import Engine
from colibri_mmap.errors import FormatError

DELTA_NET = {
    "attention.key_length": [0],
    "attention.value_length": [16],
    "attention.layer_norm_rms_epsilon": [None],
    "attention.recurrent_layers": [[True]],
    "expert_feed_forward_length": [None, 0],
    "expert_shared_feed_forward_length": [None, 0],
    "full_attention_interval": [0],
    "ssm.conv_kernel": [None, 0, 65],
    "ssm.group_count": [None, 0],
    "ssm.inner_size": [None, 0, 72],
    "ssm.state_size": [None, 8, 24],
    "ssm.time_step_rank": [None, 0, 3],
}
KEYS = {
    "lfm2moe": {
        "attention.head_count_kv": [None, [0, 2], [0, 0, 0], [0, 3, 0], [0, 2, -1]],
        "expert_feed_forward_length": [None, 0],
        "expert_gating_func": [3],
        "expert_used_count": [None, 0, 9],
        "leading_dense_block_count": [-1],
        "shortconv.l_cache": [None, 0, 65],
    },
    "qwen3next": DELTA_NET,
    "qwen35moe": DELTA_NET,
    "kimi-linear": {
        "attention.head_count_kv": [None, [0]],
        "attention.kv_lora_rank": [None, 0],
        "attention.key_length_mla": [8],
        "expert_gating_func": [3],
        "kda.head_dim": [None, 8, 24],
        "ssm.conv_kernel": [None, 0, 65],
    },
}
CASES = [(name, key, value) for name in KEYS for key in KEYS[name] for value in KEYS[name][key]]


@pytest.mark.parametrize(("family", "key", "value"), CASES)
def test_hyperparameters(mini: Path, tmp_path: Path, family: str, key: str, value: object) -> None:
    source = next((mini / family).glob("*.gguf"))
    path = write_variant(source, tmp_path / "model.gguf", {f"{family}.{key}": value})
    with pytest.raises(FormatError) as raised:
        Engine.open(path)
    assert raised.value.place == f"key '{family}.{key}'"
    assert "\n" not in str(raised.value)
