"""The checks of the device's products notice faults, and sanitizers find none in what there is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernelfaults import FAULTS, with_fault
from shim import Shim

HERE = Path(__file__).parent
BUILDS = {
    "plain": "",
    "undefined": "-DSIMT_CONTEXTS -g -fsanitize=undefined,alignment -fno-sanitize-recover=all",
    "address": "-DSIMT_CONTEXTS -g -fsanitize=address",
}
QUICK = {"no barrier before the sums", "q4_k high bits of scales"}


def complaint(folder: Path, build: str, *options: str) -> str:
    """What the checks say about a build; empty if they pass."""
    environment = dict(os.environ, PYTHONPATH=str(HERE.parents[1]))
    if build == "address":
        library = ["gcc", "-print-file-name=libasan.so"]
        found = subprocess.run(library, capture_output=True, text=True, check=True).stdout.strip()
        environment |= {"LD_PRELOAD": found, "ASAN_OPTIONS": "detect_leaks=0"}
    command = [sys.executable, str(HERE / "devicecases.py"), str(folder), *options]
    command.append(f"--flags={BUILDS[build]}")
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode == 0:
        assert result.stdout == "ok\n"
        return ""
    assert "CalledProcessError" not in result.stderr, "it does not compile"
    return result.stderr.strip() or f"ended with {result.returncode}"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in FAULTS]
)
def test_a_fault_is_noticed(name: str, tmp_path: Path) -> None:
    options = ("--fault", name, "--types", FAULTS[name].type)
    with_fault(name)  # the text still has its place
    found = (complaint(tmp_path, build, *options) for build in BUILDS)
    assert any(found)


@pytest.mark.slow
@pytest.mark.parametrize("build", ["undefined", "address"])
def test_sanitizers_are_content(build: str, shim: Shim) -> None:
    assert complaint(shim.folder, build) == ""


def test_the_checks_pass_where_nothing_is_wrong(shim: Shim) -> None:
    assert complaint(shim.folder, "plain", "--types", "Q4_K") == ""
