"""Everything that only a GPU can tell, in one call of five minutes.

    python bench/gpu_all.py [--seconds 285] [--only tests --only engine] [--out FOLDER]

tests      the tests that need a GPU
vectors    products of tests/data/gpu, computed again
kernels    experts, one token and several; the copy of the same run
trunk      attention and what is around it
uploads    experts to VRAM, against bare copies
engine     a model in the shape of Qwen3-30B-A3B with 12 of its layers (5 GB, made meanwhile in
           $TMPDIR): prompts and replies, on the CPU alone and with more and more on the GPU

Every part is a process with a time limit, and fails alone; the last lines say how each ended, and
the exit status whether all did well. Outputs are kept in --out, by default $OUT, one file a part.
COLIBRI_DEVICE=host --small rehearses without a GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ("device", "device_kernels", "trunk_kernels", "deviceops", "placement")
TOKENIZER = ROOT / "tests/data/mini/qwen3moe/qwen3moe.BF16.gguf"
_PASSED = re.compile(r"\b[1-9]\d* passed")
OPEN = """
import sys
from colibri_mmap import Engine
from colibri_mmap.runtime.vramsettings import VramSettings
Engine.open(sys.argv[1], gpu=VramSettings("off")).close()
"""
UPLOADS = """
import json
from bench.gpu_uploads import measure_uploads, probe
device = probe()
print(device.name, json.dumps(measure_uploads(device, total=TOTAL, file_bytes=FILE), indent=1))
"""


@dataclass(frozen=True, slots=True)
class Part:
    """A program, and the share of the seconds that it may take at most."""

    name: str
    share: float
    command: tuple[str, ...]


def parts(model: Path, out: Path, small: bool) -> list[Part]:
    python, few = sys.executable, ("--seconds", "0.002") if small else ()
    total, file = (1 << 22, 1 << 24) if small else (1 << 30, 1 << 29)
    uploads = UPLOADS.replace("TOTAL", str(total)).replace("FILE", str(file))
    kernels = ("--section", "copy", "--section", "kernels", "--section", "latency")
    weights = ("--weights", "1", "--model", "none") if small else ("--model", "Qwen3")
    reply = ("--prompt", "24", "--tokens", "4", "--rounds", "2") if small else ()
    few_tokens = ("--context", "64", "--prompt", "3") if small else ()
    tests = [str(ROOT / f"tests/runtime/test_{name}.py") for name in TESTS]
    quiet = ("-q", "-o", f"cache_dir={model.parent}/pytest", "-W", "default")
    return [
        Part("tests", 0.5, (python, "-m", "pytest", "-m", "gpu", *quiet, *tests)),
        Part("vectors", 0.1, (python, "bench/gpu.py", "--section", "vectors")),
        Part("kernels", 0.15, (python, "bench/gpu.py", *kernels, *weights, *few)),
        Part("trunk", 0.1, (python, "bench/gpu_trunk.py", *few_tokens)),
        Part("uploads", 0.15, (python, "-c", uploads)),
        Part(
            "engine",
            1.0,  # all that is left
            (python, "bench/gpu_engine.py", str(model), *reply, "--json", f"{out}/engine.json"),
        ),
    ]


def make_model(model: Path, small: bool) -> None:
    """Write the model that the engine is measured with, and compile the CPU's kernels for it."""
    size = ("--layers", "2", "--experts", "16", "--top-k", "4") if small else ()
    command = (sys.executable, "tools/make_bench_moe.py", str(model), "--tokenizer", str(TOKENIZER))
    subprocess.run([*command, "--zipf", "1", *size], cwd=ROOT, env=environment(), check=True)
    subprocess.run([sys.executable, "-c", OPEN, str(model)], env=environment(), check=True)


def begin_to_make(model: Path, small: bool) -> subprocess.Popen[bytes]:
    """`make_model` in a process of its own, whose end is to be waited for."""
    rehearsal = ("--small",) if small else ()
    command = (sys.executable, __file__, "--make", str(model), *rehearsal)
    return subprocess.Popen(command, start_new_session=True)


def ready(maker: subprocess.Popen[bytes], seconds: float) -> str:
    """Wait for the model; why there is none, empty if it is there."""
    try:
        return "the model could not be made" if maker.wait(timeout=max(1.0, seconds)) else ""
    except subprocess.TimeoutExpired:
        os.killpg(maker.pid, signal.SIGKILL)  # with what it started
        maker.wait()
        return "the model was not ready"


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def run(part: Part, seconds: float, out: Path) -> str:
    """Run a part; how it ended, empty if well."""
    path = out / f"{part.name}.txt"
    command = part.command
    if part.name == "engine":
        command = (*command, "--seconds", str(round(0.6 * seconds)))
    with path.open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout=max(1.0, seconds))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    text = path.read_text(errors="replace")
    print(f"---- {part.name}\n{text[-6000:]}", flush=True)
    if status is None:
        return f"still running after {seconds:.0f} s"
    if status:
        return f"exit status {status}"
    rehearsal = os.environ.get("COLIBRI_DEVICE") == "host"
    if part.name == "tests" and not rehearsal and (" skipped" in text or not _PASSED.search(text)):
        return "tests were skipped"
    return "not as expected" if "NOT as expected" in text or "DIFFERS" in text else ""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=285, help="of all parts together")
    parser.add_argument("--only", action="append", help="this part, and others named so")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"))
    parser.add_argument("--make", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help="a rehearsal")
    options = parser.parse_args()
    if options.make:
        make_model(options.make, options.small)
        return
    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        out, model = options.out or Path(folder), Path(folder) / "bench.gguf"
        out = Path(out)
        out.mkdir(parents=True, exist_ok=True)
        chosen = [
            part
            for part in parts(model, out, options.small)
            if not options.only or part.name in options.only
        ]
        maker = (
            begin_to_make(model, options.small)
            if any(part.name == "engine" for part in chosen)
            else None
        )
        ended = {}
        for part in chosen:
            start = time.monotonic()
            left = end - start
            if part.name == "engine" and maker is not None:
                if problem := ready(maker, left):
                    ended[part.name] = problem, time.monotonic() - start
                    continue
                left = end - time.monotonic()
            problem = run(part, min(left, part.share * options.seconds), out)
            ended[part.name] = problem, time.monotonic() - start
    for name, (problem, seconds) in ended.items():
        print(f"{name:8s} {seconds:5.1f} s  {problem or 'well'}")
    if any(problem for problem, _ in ended.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
