"""NVRTC takes the CUDA text for every generation of GPUs, and no kernel spills registers."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest
from nvrtc import Nvrtc

from colibri_mmap.runtime.cudasources import cuda_modules

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120")
QUICK = {("rows", "sm_75"), ("trunk", "sm_90"), ("attention", "sm_90"), ("experts_q6_k", "sm_86")}


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        return Nvrtc()
    except PackageNotFoundError:
        pytest.skip("nvidia-cuda-nvrtc is not installed: pip install -e '.[dev]'")


@pytest.mark.parametrize(
    ("module", "architecture"),
    [
        pytest.param(m, a, marks=() if (m, a) in QUICK else pytest.mark.slow)
        for m in cuda_modules()
        for a in ARCHITECTURES
    ],
)
def test_modules_compile_for_gpus(nvrtc: Nvrtc, module: str, architecture: str) -> None:
    compiled = nvrtc.compile(cuda_modules()[module].source, architecture)
    assert sorted(compiled.usage) == sorted(cuda_modules()[module].kernels)
    assert {name: used for name, used in compiled.usage.items() if used[1]} == {}
    assert compiled.code[:4] == b"\x7fELF"
