"""The engine in a process of its own: interrupted with Ctrl-C, and measured."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np

INTERRUPTED = """
import sys
from colibri_mmap import Engine, Sampling
greedy, prompt = Sampling(temperature=0.0, ignore_eos=True), [5, 9, 33, 120]

def reply(engine):
    return [token.id for token in engine.generate(prompt, 12, greedy)]

with Engine.open(sys.argv[1]) as engine:
    expected = reply(engine)
    for _ in range(int(sys.argv[2])):
        try:
            while True:
                for number, _ in enumerate(engine.generate([*prompt, 7], 200, greedy)):
                    if number == 5:
                        print("running", flush=True)
        except KeyboardInterrupt:
            assert reply(engine) == expected
            print("usable", flush=True)
"""


def test_interrupted_engines_stay_usable(mixtral: Path) -> None:
    times = 10
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, mixtral, str(times)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        for _ in range(times):
            assert "running\n" in iter(child.stdout.readline, "")
            child.send_signal(signal.SIGINT)
            assert "usable\n" in iter(child.stdout.readline, "")
    assert child.returncode == 0


MEASURED = """
import sys
from pathlib import Path
from colibri_mmap import Engine, Sampling

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:")) / 1024

def use(path):
    with Engine.open(path, ctx=128) as engine:
        engine.logits(range(64))
        list(engine.generate(range(64), 8, Sampling(temperature=0.0, ignore_eos=True)))
        return anonymous()

print(-use(sys.argv[1]) + use(sys.argv[2]))
"""


def write_model(path: Path, layers: int, hidden: int, source: Path) -> Path:
    """A dense Q8_0 llama model with the tokenizer of `source`; its weights are noise."""
    width, kinds = 512, gguf.GGMLQuantizationType
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    for name, field in reader.fields.items():
        if name.startswith("tokenizer.ggml"):
            element = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], element)
    writer.add_block_count(layers)
    writer.add_context_length(128)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-5)
    noise = np.random.default_rng(1).standard_normal((hidden, width), np.float32) * 0.02
    rows = {n: gguf.quants.quantize(noise.reshape(-1, n), kinds.Q8_0) for n in noise.shape}

    def matrix(name: str, count: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", rows[columns][:count], raw_dtype=kinds.Q8_0)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", 320, width)
    norm("output_norm")
    for layer in range(layers):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            matrix(f"blk.{layer}.{name}", width, width)
        for name in ("ffn_gate", "ffn_up"):
            matrix(f"blk.{layer}.{name}", hidden, width)
        matrix(f"blk.{layer}.ffn_down", width, hidden)
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_weights_are_not_copied(dense: Path, tmp_path: Path) -> None:
    """Using 100 MB more of weights takes under 10 MB more of anonymous memory."""
    paths = [write_model(tmp_path / f"{n}.gguf", n, 8192, dense) for n in (1, 8)]
    small, large = (path.stat().st_size for path in paths)
    assert large - small > 95 * 10**6
    ran = subprocess.run(
        [sys.executable, "-c", MEASURED, *paths], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 10
