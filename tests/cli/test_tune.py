"""tune: measured, stored, used by later runs unless flags or --no-profile say otherwise."""

from __future__ import annotations

import json
from pathlib import Path

from program import Colibri


def test_a_profile_is_made_and_used(colibri: Colibri, mini: Path, tmp_path: Path) -> None:
    model = mini / "mixtral" / "mixtral.Q8_0.gguf"
    done = colibri("tune", "-m", model, "--minutes", "0.02", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    profile = found["profile"]
    assert profile["rates"]["memory"] > 1e8
    assert profile["rates"]["kernels"] > 0
    assert profile["tokens_per_second"] > 0
    for comparison in found["comparisons"]:
        assert comparison["gains"]
    (stored,) = (tmp_path / "state" / "colibri-mmap" / "profiles").iterdir()
    changed = {**json.loads(stored.read_text()), "threads": 1, "prefetch": 3, "io": "pread"}
    stored.write_text(json.dumps(changed))

    def memory(*options: str) -> tuple[int, str | None, int | None]:
        done = colibri("bench", "-m", model, *("-p", "8", "-n", "2", "-r", "1", "--json"), *options)
        report = json.loads(done.stdout)
        return report["threads"], report["memory"]["io"], report["memory"]["prefetch"]

    assert memory() == (1, "pread", 3)
    assert memory("--prefetch", "off", "--io", "mmap", "-t", "2") == (2, "mmap", 0)
    assert memory("--no-profile", "-t", "2") == (2, None, None)
    assert "rule of thumb" not in colibri("plan", "-m", model).stdout.decode()
    assert "--io pread" in colibri("doctor", "-m", model).stdout.decode()
