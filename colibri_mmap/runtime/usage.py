"""How often each expert of a model was used, kept between runs.

One file per model in $XDG_STATE_HOME/colibri-mmap/usage (default ~/.local/state): it warms the
cache at the start and orders experts for `pack`. Newer uses count more: what is stored is scaled
down so that the file speaks of at most MEMORY_TOKENS tokens. It is JSON: {"tokens", "counts"}.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ..format.experts import expert_layers
from ..format.gguf import GGUF, GGUFArray
from .state import replace_file, state_directory

MEMORY_TOKENS = 50_000.0  # older uses fade once more tokens than these are known


@dataclass(frozen=True, slots=True, eq=False)
class Usage:
    """`counts` float64 [layers, experts] by layer number in the model, over `tokens` tokens."""

    counts: NDArray[np.float64]
    tokens: float
    notices: tuple[str, ...] = ()

    def rates(self) -> NDArray[np.float64]:
        """Uses per token [layers, experts], 0 to 1; all 0 where nothing is known."""
        return np.clip(self.counts / max(self.tokens, 1.0), 0, 1)

    def hottest(self) -> list[tuple[int, int]]:
        """(layer, expert) of those used, the most used first."""
        order = np.argsort(-self.counts, axis=None, kind="stable")
        used = order[self.counts.ravel()[order] > 0]
        layers, experts = np.unravel_index(used, self.counts.shape)
        return list(zip(layers.tolist(), experts.tolist(), strict=True))

    def order(self) -> dict[int, list[int]]:
        """The experts of each layer that has counts, the most used first."""
        return {
            layer: np.argsort(-row, kind="stable").tolist()
            for layer, row in enumerate(self.counts)
            if row.any()
        }


def model_identity(gguf: GGUF) -> str:
    """A name of the routing function: the same for a file, its shards and its packed container.

    Hashed are the architecture, the name, the size of the vocabulary, and per layer the number of
    experts and the shapes of their parts. Quantisations of one model share it too, for they route
    alike.
    """
    digest = hashlib.sha256()
    digest.update(repr((gguf.architecture, gguf.str("general.name", ""))).encode())
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    digest.update(repr(len(tokens) if isinstance(tokens, GGUFArray) else 0).encode())
    for number, layer in expert_layers(gguf).items():
        parts = [(part.name, part.shape) for part in layer.parts.values()]
        digest.update(repr((number, layer.n_experts, parts)).encode())
    return digest.hexdigest()[:32]


def load_usage(gguf: GGUF, directory: Path | None = None) -> Usage:
    """The stored counts of a model, zeros if there are none; a damaged file is a notice."""
    shape = _shape(gguf)
    path = _path(gguf, directory)
    nothing = np.zeros(shape)
    try:
        stored = json.loads(path.read_bytes())
        counts, tokens = np.array(stored["counts"], np.float64), float(stored["tokens"])
    except FileNotFoundError:
        return Usage(nothing, 0.0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        reason = f"{path}: cannot be read ({type(error).__name__}), counting afresh"
        return Usage(nothing, 0.0, (reason,))
    sound = counts.shape == shape and np.isfinite(counts).all() and (counts >= 0).all()
    if not sound or not 0 <= tokens < np.inf:
        return Usage(nothing, 0.0, (f"{path}: holds no counts of this model, counting afresh",))
    return Usage(counts, tokens)


def save_usage(
    gguf: GGUF, counts: NDArray[np.int64], tokens: int, directory: Path | None = None
) -> tuple[str, ...]:
    """Add the counts [layers, experts] of `tokens` more tokens to what is stored; notices.

    The file is replaced as a whole: of two processes that end together one may win, but neither
    leaves a damaged file.
    """
    if tokens <= 0:
        return ()
    before = load_usage(gguf, directory)
    fade = min(1.0, max(0.0, MEMORY_TOKENS - tokens) / max(before.tokens, 1.0))
    merged = before.counts * fade + counts
    path = _path(gguf, directory)
    total = before.tokens * fade + tokens
    text = json.dumps({"tokens": round(total, 3), "counts": merged.round(3).tolist()})
    try:
        replace_file(path, text)
    except OSError as error:
        reason = f"{path}: cannot be written ({error.strerror}), the uses of this run are lost"
        return (*before.notices, reason)
    return before.notices


def _path(gguf: GGUF, directory: Path | None) -> Path:
    return (directory or state_directory("usage")) / f"{model_identity(gguf)}.json"


def _shape(gguf: GGUF) -> tuple[int, int]:
    layers = expert_layers(gguf)
    if not layers:
        return 0, 0
    return max(layers) + 1, max(layer.n_experts for layer in layers.values())
