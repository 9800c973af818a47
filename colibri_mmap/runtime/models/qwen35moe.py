"""qwen35moe: Qwen3.5-35B-A3B to Qwen3.5-397B-A17B (Qwen team 2026), text only.

As qwen3next, with two differences in the file: a and b of the delta nets are matrices of their own,
and the value heads are re-ordered, so that those which share a key head lie a tile apart. The
sections of its rope are for images: all of them rotate by a text's positions.
"""

from __future__ import annotations

from ..experts import ExpertStore
from ..hybrid import hybrid_decoder
from ..layers import Decoder
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    return hybrid_decoder(weights, ops, store, tiled=True)
