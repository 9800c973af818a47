"""Convolutions and the gated delta rule over the sequences of a batch.

T tokens, C channels, K taps of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import FormatError
from .arena import Rows
from .kernels import recurrent
from .kernels.recurrent import LANES
from .kv import Batch, SequenceSlice
from .ops import Ops, float_bits
from .pool import Job, Launch, job
from .weights import Vector, Weights

MAX_TAPS = 64  # of a convolution; models have 3 or 4
_L2_EPS = 1e-6  # of the norm of q and k, in every family

# The phases for one part of a batch, given where its state lies and where it is to be left.
Phases = Callable[[SequenceSlice, int, int], list[list[Job]]]


def run_with_state(ops: Ops, batch: Batch, layer: int, key: object, phases: Phases) -> None:
    """Run the phases of a batch's sequences, side by side.

    `key` must fix every word but the addresses of the state: a single token gets the launch of an
    earlier step.
    """
    if len(batch.tokens) > 1:
        each = [phases(part, *part.cache.state(layer)) for part in batch.sequences]
        merged = [[j for jobs in phase for j in jobs] for phase in zip(*each, strict=True)]
        ops.run(None, lambda: merged)
        return
    part = batch.sequences[0]
    source, target = part.cache.state(layer)
    launches, key = part.cache.launches, (layer, source, key)
    if key not in launches:
        launches[key] = Launch(phases(part, source, target))
    ops.pool.run(launches[key])


# ------------------------------------------------------------------------------ convolutions
class Convolution:
    """The weight of a causal convolution of every channel: K values per channel in the file."""

    def __init__(self, weights: Weights, name: str, taps: int, channels: int) -> None:
        if channels % LANES:
            what = f"has {channels} channels, which must be a multiple of {LANES}"
            raise FormatError(weights.gguf.path, f"tensor {name!r}", what)
        self.taps, self.channels = taps, channels
        self.values = np.ascontiguousarray(weights.array(name, (taps, channels)).T)  # [K, C]

    @property
    def state_values(self) -> int:
        """What it keeps of the past: K - 1 rows."""
        return (self.taps - 1) * self.channels

    def _words(self, x: Rows, out: Rows, source: int, target: int) -> tuple[int, ...]:
        rows = (x.address, x.stride, out.address, out.stride)
        return (*rows, self.values.ctypes.data, self.taps, self.channels, x.count, source, target)

    def silu_job(self, x: Rows, out: Rows, source: int, target: int) -> Job:
        """out = silu(convolution of x)."""
        chunk, words = max(1, 16 // x.count), self._words(x, out, source, target)
        return job(recurrent.convolution_silu, self.channels // LANES, chunk, *words)

    def gated_job(self, x: Rows, out: Rows, a: Rows, b: Rows, source: int, target: int) -> Job:
        """out = b * convolution of (a * x)."""
        words = (*self._words(x, out, source, target), a.address, a.stride, b.address, b.stride)
        chunk = max(1, 16 // x.count)
        return job(recurrent.convolution_gated, self.channels // LANES, chunk, *words)


# ------------------------------------------------------------------------------ the delta rule
@dataclass(frozen=True, slots=True)
class DeltaRule:
    """Heads and sizes of a gated delta rule.

    Value heads share the key heads: neighbours do, or, if `tiled`, those `key_heads` apart. The
    state decays as a whole, or, with `decay_rows`, each of its rows (one per key value) for itself.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    tiled: bool = False
    decay_rows: bool = False

    @property
    def state_values(self) -> int:
        return self.value_heads * self.key_size * self.value_size

    def job(
        self,
        q: Rows,
        k: Rows,
        v: Rows,
        decay: Rows,
        beta: Rows,
        out: Rows,
        source: int,
        target: int,
    ) -> Job:
        """out [T, value heads * value size]; q and k are normed, decay and beta in (0, 1)."""
        shared = self.value_heads // self.key_heads
        heads = (1, self.key_heads) if self.tiled else (shared, self.key_heads)
        words = [word for rows in (q, k, v, out) for word in (rows.address, rows.stride)]
        words += [decay.address, decay.stride, beta.address, beta.stride, source, target]
        words += [self.key_size, self.value_size, q.count, *heads, 4 if self.decay_rows else 0]
        units = self.value_heads * self.value_size // LANES
        return job(recurrent.delta_rule, units, 1, *words)


def l2_norm_job(x: Rows, heads: int, scale: float = 1.0) -> Job:
    """Every head of x brought to the length `scale`, in place."""
    words = (x.address, x.stride, heads, x.width // heads)
    return job(recurrent.l2_norm, x.count, 1, *words, float_bits(_L2_EPS), float_bits(scale))


def decay_job(x: Rows, out: Rows, bias: Vector, rate: Vector, period: int) -> Job:
    """out = exp(rate * softplus(x + bias)); `period` rows of x use up bias and rate."""
    words = (x.address, x.stride, out.address, out.stride, bias.address, rate.address)
    return job(recurrent.decays, x.count, 4, *words, x.width, bias.n // rate.n, period)


def sigmoid_job(x: Rows, out: Rows) -> Job:
    """out = sigmoid(x)."""
    words = (x.address, x.stride, out.address, out.stride, x.width)
    return job(recurrent.sigmoids, x.count, 4, *words)
