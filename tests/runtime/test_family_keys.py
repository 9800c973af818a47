"""Hyperparameters that are missing or cannot be: every family names the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from variants import write_variant

from colibri_mmap import Engine
from colibri_mmap.errors import FormatError
from colibri_mmap.format.gguf import open_gguf

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
DENSE_THEN_EXPERTS = {
    "expert_feed_forward_length": [None, 0],
    "expert_gating_func": [3],
    "expert_group_count": [3],
    "expert_shared_count": [-1],
    "expert_used_count": [None, 0, 9],
    "feed_forward_length": [None, 0],
    "leading_dense_block_count": [None, -1],
}
KEYS = {
    "dbrx": {
        "attention.clamp_kqv": [None, 0.0, -1.0, float("nan")],
        "attention.layer_norm_epsilon": [None],
        "expert_used_count": [None],
        "feed_forward_length": [None, 0],
    },
    "dots1": DENSE_THEN_EXPERTS,
    "ernie45moe": {
        "expert_feed_forward_length": [None],
        "feed_forward_length": [None],
        "interleave_moe_layer_step": [0],
    },
    "glm4moe": DENSE_THEN_EXPERTS | {"nextn_predict_layers": [-1]},
    "gpt-oss": {
        "attention.sliding_window": [None, 0],
        "expert_feed_forward_length": [None],
        "rope.scaling.yarn_beta_fast": [0.0],
        "rope.scaling.yarn_beta_slow": [-1.0],
    },
    "granitemoe": {"feed_forward_length": [None], "attention.layer_norm_rms_epsilon": [None]},
    "hunyuan-moe": {"expert_shared_feed_forward_length": [None, 0]},
    "llama4": {
        "expert_feed_forward_length": [None],
        "expert_used_count": [None, 2],
        "interleave_moe_layer_step": [0],
    },
    "minimax-m2": {"expert_feed_forward_length": [None, 0], "expert_gating_func": [3]},
    "phimoe": {
        "attention.layer_norm_rms_epsilon": [None],
        "feed_forward_length": [None],
        "rope.scaling.original_context_length": [None, 0],
    },
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
    full_key = f"{open_gguf(source).architecture}.{key}"
    path = write_variant(source, tmp_path / "model.gguf", {full_key: value})
    with pytest.raises(FormatError) as raised:
        Engine.open(path)
    assert raised.value.place == f"key '{full_key}'"
    assert "\n" not in str(raised.value)
