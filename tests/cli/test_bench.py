"""bench and warmup."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from program import Colibri

MODEL = Path("mixtral/mixtral.Q8_0.gguf")


def test_bench_as_json(colibri: Colibri, mini: Path) -> None:
    done = colibri(
        "bench", "-m", mini / MODEL, "-p", "40", "-n", "5", "-r", "3", "-t", "1", "--json"
    )
    report = json.loads(done.stdout)
    assert (report["mode"], report["threads"]) == ("int8", 1)
    assert (report["model"], report["name"]) == (str(mini / MODEL), MODEL.name)
    assert report["general_name"] == "Hf"
    assert len(report["samples"]) == 3
    for sample in report["samples"]:
        assert (sample["prompt_tokens"], sample["generated_tokens"]) == (40, 5)
        assert sample["cached_tokens"] == 0
    for name in ("prefill_tokens_per_second", "decode_tokens_per_second"):
        assert report[name] == median(sample[name] for sample in report["samples"]) > 0


def test_bench_as_a_table(colibri: Colibri, mini: Path) -> None:
    done = colibri("bench", mini / MODEL, "-p", "40", "-n", "5", "-r", "1", "--mode", "exact")
    text = done.stdout.decode()
    assert f"{MODEL.name} · Hf · exact" in text
    assert "exact" in text
    assert "prompt of 40 tokens" in text
    assert "reply of 5 tokens" in text


def test_warmup_leaves_nothing_to_compile(colibri: Colibri, mini: Path) -> None:
    assert colibri("warmup", "-m", mini / MODEL).returncode == 0
    done = colibri("warmup", "-m", mini / MODEL)
    assert done.returncode == 0
    assert done.stdout.endswith(b" kernels are ready, 0 of them new\n")
    assert done.stderr == b""
