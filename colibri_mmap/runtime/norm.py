"""Normalisation of the residual stream: RMS norm or LayerNorm, as the family has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .arena import Rows
from .operations import Operations
from .weights import Vector, Weights


@dataclass(frozen=True, slots=True, eq=False)
class RMSNorm:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    weight: Vector
    eps: float

    def __call__(self, x: Rows, ops: Operations) -> Rows:
        return ops.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class LayerNorm:
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al. 2016)."""

    weight: Vector
    bias: Vector | None
    eps: float

    def __call__(self, x: Rows, ops: Operations) -> Rows:
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


Norm = RMSNorm | LayerNorm
LoadNorm = Callable[[Weights, str], Norm]  # the norm `name`, without .weight or .bias


def rms_norm(weights: Weights, name: str) -> RMSNorm:
    """The RMS norm `name` of the model's width."""
    width = weights.gguf.int(".embedding_length", minimum=1)
    eps = weights.gguf.float(".attention.layer_norm_rms_epsilon")
    return RMSNorm(weights.vector(f"{name}.weight", width), eps)


def layer_norm(weights: Weights, name: str, eps: float | None = None) -> LayerNorm:
    """The LayerNorm `name` of the model's width, with a bias if the file has one."""
    width = weights.gguf.int(".embedding_length", minimum=1)
    if eps is None:
        eps = weights.gguf.float(".attention.layer_norm_epsilon")
    bias = weights.optional_vector(f"{name}.bias", width)
    return LayerNorm(weights.vector(f"{name}.weight", width), bias, eps)
