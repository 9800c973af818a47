"""qwen3next: Qwen3-Next-80B-A3B (Qwen team 2025).

Gated delta nets, and gated attention every few layers: rope on halves of a part of each head, q
and k normed per head before it. Softmax over all experts, the weights of the chosen ones sum to 1;
a shared expert, gated by a sigmoid. `post_attention_norm` is the norm before the experts. Value
heads that share a key head are neighbours.
"""

from __future__ import annotations

from ..experts import ExpertStore
from ..hybrid import hybrid_decoder
from ..layers import Decoder
from ..ops import Ops
from ..weights import Weights


def load(weights: Weights, ops: Ops, store: ExpertStore) -> Decoder:
    return hybrid_decoder(weights, ops, store, tiled=False)
