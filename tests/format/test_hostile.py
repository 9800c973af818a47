"""Broken files: refused by name, quickly and in little memory, or opened where that is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colibri_mmap.errors import ColibriError, FormatError
from colibri_mmap.format.describe import describe
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import GGUFArray, open_gguf

HOSTILE = Path(__file__).parents[1] / "data" / "hostile"
INDEX = json.loads((HOSTILE / "index.json").read_text())

# Well-formed files whose model makes no sense: left to the code of models and tokenizers.
MODEL_LEVEL = {
    "hp_block_count_missing.gguf",
    "hp_block_count_string.gguf",
    "hp_block_count_0.gguf",
    "hp_head_count_0.gguf",
    "hp_head_count_kv_5.gguf",
    "hp_embd_0.gguf",
    "hp_embd_neg.gguf",
    "hp_eps_missing.gguf",
    "hp_used_5_of_4.gguf",
    "hp_used_0.gguf",
    "hp_rope_dim_big.gguf",
    "m_shape_transposed.gguf",
    "tok_scores_short.gguf",
    "tok_types_short.gguf",
    "tok_model_unknown.gguf",
}

MUST_REJECT = {n for n in INDEX if INDEX[n]["expect"] in ("reject", "reject (or byte-swap)")}
MUST_ACCEPT = {n for n in INDEX if re.match("accept(?! or)", INDEX[n]["expect"])}


def open_all(name: str) -> None:
    expert_layers(open_gguf(HOSTILE / name))


@pytest.mark.parametrize("name", sorted(MUST_REJECT - MODEL_LEVEL))
def test_rejected_with_file_place_and_reason(name: str) -> None:
    start = time.perf_counter()
    with pytest.raises(FormatError) as caught:
        open_all(name)
    assert time.perf_counter() - start < 1
    error = caught.value
    assert error.path == HOSTILE / name
    assert error.place
    assert error.reason
    assert "\n" not in str(error)


@pytest.mark.parametrize("name", sorted(MUST_ACCEPT | MODEL_LEVEL))
def test_accepted(name: str) -> None:
    open_all(name)


@pytest.mark.parametrize("name", sorted(INDEX))
def test_nothing_but_our_errors(name: str) -> None:
    try:
        model = open_gguf(HOSTILE / name)
        expert_layers(model)
        for value in model.metadata.values():
            list(value) if isinstance(value, GGUFArray) else value
        describe(model)
    except ColibriError as error:
        assert name in str(error)  # noqa: PT017 refusing and opening are both right


def test_all_of_them_in_little_memory() -> None:
    script = f"""
import json, re, sys
from pathlib import Path
from colibri_mmap.errors import ColibriError
from colibri_mmap.format.experts import expert_layers
from colibri_mmap.format.gguf import open_gguf
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
before = anonymous()
for path in sorted(Path({str(HOSTILE)!r}).glob("*.gguf")):
    try:
        expert_layers(open_gguf(path))
    except ColibriError:
        pass
    grown = anonymous() - before
    assert grown < 100 * 1024, (path.name, grown)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
