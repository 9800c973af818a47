"""Choosing the next token from logits, and watching the text for stop strings.

The filters run in the order that is customary for GGUF models: bias, penalties, top-k, top-p,
min-p, temperature.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from colibri_mmap.errors import ArgumentError, ModelReadError
from colibri_mmap.runtime.grammar import Matcher

_BLOCK = 64  # logits per block when looking for the largest ones
_QUICKLY_SORTED = 2048  # weights
_CLASS_SHIFT = 47  # bits of a float64: 32 classes of weights per power of two

Logits = NDArray[np.float32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are chosen; temperature 0 takes the likeliest, the lowest id among equals."""

    temperature: float = 0.8
    top_k: int = 40  # 0: all tokens
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off; relative to the likeliest token
    repeat_penalty: float = 1.0  # 1: off
    repeat_last_n: int = 64  # tokens the penalties look back on; 0: none, -1: all
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # -inf forbids a token
    ignore_eos: bool = False  # end tokens are tokens like any other

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 1e6, "temperature", "between 0 and 1e6", self.temperature)
        _require(self.top_k >= 0, "top_k", "at least 0 (0: all tokens)", self.top_k)
        _require(0 < self.top_p <= 1, "top_p", "above 0 and at most 1", self.top_p)
        _require(0 <= self.min_p <= 1, "min_p", "between 0 and 1", self.min_p)
        penalty = self.repeat_penalty
        _require(0.01 <= penalty <= 100, "repeat_penalty", "between 0.01 and 100", penalty)
        _require(self.repeat_last_n >= -1, "repeat_last_n", "at least -1", self.repeat_last_n)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(-100 <= value <= 100, name, "between -100 and 100", value)
        _require(self.seed is None or self.seed >= 0, "seed", "at least 0", self.seed)
        _require(all(self.stop), "stop", "without empty strings", self.stop)
        for token, bias in self.logit_bias.items():
            _require(bias < math.inf, f"logit_bias of token {token}", "below infinity", bias)


def _require(holds: bool, name: str, expected: str, value: object) -> None:
    if not holds:
        raise ArgumentError(f"{name} must be {expected}, is {value!r}")


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms of the probabilities that the model itself gave: at temperature 1, without
    bias, penalties and filters. `top`: (token, logprob) of the likeliest tokens, in order."""

    chosen: float
    top: tuple[tuple[int, float], ...]


def log_probabilities(logits: Logits, token: int, count: int) -> Logprobs:
    """Of the chosen token, and of the `count` likeliest ones."""
    highest = logits.max()
    total = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    top = _largest(logits, count) if count else np.empty(0, np.int64)
    top = top[np.argsort(-logits[top], kind="stable")]
    return Logprobs(
        float(logits[token]) - total, tuple((int(i), float(logits[i]) - total) for i in top)
    )


class Sampler:
    """Draws tokens for one reply; the same seed and logits give the same tokens."""

    def __init__(self, sampling: Sampling, vocab_size: int) -> None:
        outside = [token for token in sampling.logit_bias if not 0 <= token < vocab_size]
        if outside:
            raise ArgumentError(
                f"logit_bias: {outside[0]} is not a token id; there are {vocab_size} tokens"
            )
        self._sampling = sampling
        self._vocab_size = vocab_size
        self._bias_ids = np.array(list(sampling.logit_bias), np.int64)
        self._bias = np.array(list(sampling.logit_bias.values()), np.float32)
        self._penalises = sampling.repeat_last_n != 0 and (
            sampling.repeat_penalty != 1
            or sampling.presence_penalty != 0
            or sampling.frequency_penalty != 0
        )
        self._random = np.random.Generator(np.random.PCG64(sampling.seed))

    def sample(self, logits: Logits, history: Sequence[int], matcher: Matcher | None = None) -> int:
        """The next token after `history`, given `logits` [vocab_size], which are left unchanged.

        A `matcher` restricts the choice, and is told of it.
        """
        assert logits.shape == (self._vocab_size,)
        best = int(np.argmax(logits))
        if not math.isfinite(logits[best]):
            raise ModelReadError(
                "the model computed NaN or infinite logits; its weights may be damaged: run"
                " `colibri-mmap verify`"
            )
        if self._bias_ids.size or self._penalises or matcher is not None:
            logits = self._adjust(logits, history)
            if matcher is not None:
                matcher.mask(logits)
            best = int(np.argmax(logits))
            if logits[best] == -math.inf:
                raise ArgumentError("logit_bias forbids every token that may come; allow some")
        token = best if self._sampling.temperature == 0 else self._draw(logits)
        if matcher is not None:
            matcher.accept(token)
        return token

    def _adjust(self, logits: Logits, history: Sequence[int]) -> Logits:
        """A copy of `logits` with bias and penalties applied."""
        settings = self._sampling
        logits = logits.copy()
        logits[self._bias_ids] += self._bias
        if self._penalises:
            length = len(history)
            back = length if settings.repeat_last_n < 0 else settings.repeat_last_n
            recent = np.asarray(history[max(0, length - back) :], np.int64)
            tokens, counts = np.unique(recent, return_counts=True)
            seen = logits[tokens]
            penalty = settings.repeat_penalty
            seen = np.where(seen <= 0, seen * penalty, seen / penalty)
            seen -= counts * settings.frequency_penalty + settings.presence_penalty
            logits[tokens] = seen
        return logits

    def _draw(self, logits: Logits) -> int:
        """Filter, then draw in proportion to the probabilities at the temperature."""
        settings = self._sampling
        tokens = _largest(logits, settings.top_k)
        distance = logits[tokens].astype(np.float64)
        distance -= distance.max()  # 0 for the likeliest token, negative for the others
        weights = np.exp(distance)
        total = weights.sum()
        # Both top-p and min-p keep a prefix of the tokens in order of weight. Dropping by min-p
        # first leaves less to sort and keeps the same prefix, as long as `total` covers all.
        kept = np.flatnonzero((weights >= settings.min_p) & (weights > 0))
        if settings.top_p < 1:
            kept = kept[_nucleus(weights[kept], settings.top_p * total)]
        with np.errstate(over="ignore"):  # a tiny temperature sends the others to -infinity
            weights = np.exp(distance[kept] / settings.temperature)
        reached = np.cumsum(weights)
        drawn = int(np.searchsorted(reached, self._random.random() * reached[-1], side="right"))
        return int(tokens[kept[min(drawn, len(kept) - 1)]])


def _nucleus(weights: NDArray[np.float64], mass: float) -> NDArray[np.int64]:
    """The fewest heaviest weights, all above 0, that reach `mass` together, in order; of equals the
    first."""
    heaviest = np.arange(len(weights))
    if len(weights) > _QUICKLY_SORTED:
        # The leading bits of a positive float grow with it: classes of weights, of which the
        # lightest are not needed. Rounding cannot matter for the sum with one class more.
        classes = weights.view(np.int64) >> _CLASS_SHIFT
        sums = np.bincount(classes, weights)
        reached = np.cumsum(sums[::-1])
        last = len(sums) - 2 - int(np.searchsorted(reached, mass))
        heaviest = np.flatnonzero(classes >= last)
    order = heaviest[np.argsort(-weights[heaviest], kind="stable")]
    reached = np.cumsum(weights[order])
    return order[: int(np.searchsorted(reached, mass)) + 1]


def _largest(logits: Logits, count: int) -> NDArray[np.int64]:
    """Ids of the `count` largest logits (0: of all), ascending; among equals the lowest ids win."""
    if count == 0 or count >= len(logits):
        return np.arange(len(logits))
    candidates = np.arange(len(logits))
    blocks = len(logits) // _BLOCK
    if blocks > count:
        # The count-th largest block maximum is a lower bound that few logits reach.
        maxima = logits[: blocks * _BLOCK].reshape(blocks, _BLOCK).max(axis=1)
        bound = np.partition(maxima, blocks - count)[blocks - count]
        candidates = np.flatnonzero(logits >= bound)
    order = np.argsort(-logits[candidates], kind="stable")
    return np.sort(candidates[order[:count]])


class StopMatcher:
    """Passes text on until a stop string appears, holding back what may be the start of one.

    The outcome does not depend on how the text is cut into pieces: the stop string that is complete
    first ends the text, and of several that end together the longest.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops)
        self._stops = tuple(stops)
        self._held = ""
        self.met: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is safe to show, and whether a stop string has been met."""
        if self.met is not None:
            return "", True
        held = self._held + text
        found = [
            (start + len(stop), start, stop)
            for stop in self._stops
            if (start := held.find(stop)) >= 0
        ]
        if found:
            _, start, self.met = min(found)
            self._held = ""
            return held[:start], True
        keep = self._possible_start(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    @property
    def pending(self) -> bool:
        """Whether text is held back that may begin a stop string."""
        return bool(self._held)

    def flush(self) -> str:
        """What is held back, once no more text will come."""
        rest, self._held = self._held, ""
        return rest

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop string begins."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
