"""colibri-mmap: Mixture-of-Experts language models straight from mapped GGUF files.

from colibri_mmap import Engine, Sampling
with Engine.open("model.gguf") as engine:
    for piece in engine.chat([{"role": "user", "content": "Hi"}]):
        print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .runtime.engine import Engine
    from .runtime.kv import Trace
    from .runtime.ram import RamSettings
    from .runtime.sampling import Sampling

__version__ = "0.1.0"
__all__ = ["Engine", "RamSettings", "Sampling", "Trace", "__version__"]

_HOMES = {
    "Engine": ".runtime.engine",
    "RamSettings": ".runtime.ram",
    "Sampling": ".runtime.sampling",
    "Trace": ".runtime.kv",
}


def __getattr__(name: str) -> Any:
    """Import the heavy modules when they are first asked for: `--help` must not pay for them."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
