"""Sequences of a model that needs no weights: what it writes into its cache tells the tokens.

Every position's keys and values, and the states, are functions of all tokens up to there, written
and read in the layout of kernels/attention.py, value by value.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Items

import numpy as np

from colibri_mmap.runtime.kv import STEP_TOKENS, KVCache, KVShape, LayerShape, RecurrentShape
from colibri_mmap.runtime.scheduler import Sequence

CONTEXT = 4096
PLAIN: tuple[LayerShape, ...] = (KVShape(2, 16, 20), KVShape(1, 32, 16))
WINDOWED = (*PLAIN, KVShape(2, 16, 24, 100), KVShape(1, 16, 16, 700))
RECURRENT = (RecurrentShape(20), *PLAIN, RecurrentShape(33))
KINDS = {"plain": PLAIN, "windows": WINDOWED, "states": RECURRENT}
LIMIT = 1000  # tokens; for models that compute longer sequences otherwise
IDS = np.random.default_rng(5).integers(0, 300, 4000).tolist()
OTHER = np.random.default_rng(6).integers(0, 300, 4000).tolist()


class Toy:
    """Makes sequences of layers with these shapes, and runs steps.

    What it writes for sequences of more than `limit` tokens differs from the start on.
    """

    def __init__(
        self,
        shapes: Items[LayerShape] = PLAIN,
        kv_type: str = "f32",
        context: int = CONTEXT,
        limit: int = 0,
    ) -> None:
        self.shapes, self.kv_type = list(shapes), kv_type
        self.context, self.limit = context, limit

    def sequence(self) -> Sequence:
        return Sequence(KVCache(self.shapes, self.context, self.kv_type))

    def extend(self, sequence: Sequence, ids: Items[int], step: int = STEP_TOKENS) -> None:
        """Steps of so many tokens."""
        ids = [*sequence.announce(len(sequence.ids) + len(ids), self.limit), *ids]
        for start in range(0, len(ids), step):
            part = ids[start : start + step]
            known, cache = len(sequence.ids), sequence.cache
            cache.begin(known, known + len(part))
            traces = self._traces(sequence, part)
            for layer, shape in enumerate(self.shapes):
                if isinstance(shape, KVShape):
                    self._append(cache, layer, traces, known)
                else:
                    source, target = (self._state(cache, layer, which) for which in (0, 1))
                    assert (source == (traces[known - 1] if known else 0)).all()
                    target[:] = traces[-1]
            cache.end(known + len(part))
            sequence.ids.extend(part)

    def check(self, sequence: Sequence) -> None:
        """What the next step would see is what these tokens make."""
        length, cache = len(sequence.ids), sequence.cache
        assert cache.kept(length) == length
        if not length:
            return
        cache.begin(length, length + 1)
        traces = self._traces(sequence)
        for layer, shape in enumerate(self.shapes):
            if not isinstance(shape, KVShape):
                assert (self._state(cache, layer, 0) == traces[-1]).all()
                continue
            first = max(0, length - shape.window + 1) if shape.window else 0
            for kind, size in enumerate((shape.key_size, shape.value_size)):
                for head in range(shape.heads):
                    found = self._rows(cache, layer, kind, head)[np.arange(first, length)]
                    expected = _values(traces[first:length], layer, kind, head, size)
                    assert np.array_equal(found, expected.astype(found.dtype))

    def _traces(self, sequence: Sequence, more: Items[int] = ()) -> np.ndarray:
        """For every position a number below 2039 that all tokens up to there decide about."""
        trace = 2 if self.limit and sequence.announced > self.limit else 1
        out = []
        for token in (*sequence.ids, *more):
            trace = (trace * 31 + token + 7) % 2039
            out.append(trace)
        return np.array(out)

    # ------------------------------------------------------------------------------ layout
    def _append(self, cache: KVCache, layer: int, traces: np.ndarray, start: int) -> None:
        shape = self.shapes[layer]
        assert isinstance(shape, KVShape)
        where = np.arange(start, len(traces))
        for kind, size in enumerate((shape.key_size, shape.value_size)):
            for head in range(shape.heads):
                self._rows(cache, layer, kind, head)[where] = _values(
                    traces[start:], layer, kind, head, size
                )

    def _rows(self, cache: KVCache, layer: int, kind: int, head: int) -> _Rows:
        place, half = cache.layers[layer], self.kv_type == "f16"
        kind_size = place.shape.padded_value_size if kind else place.shape.key_size
        address, stride = (
            (place.values, place.value_head_stride) if kind else (place.keys, place.key_head_stride)
        )
        memory = _memory(address + head * stride, stride, np.float16 if half else np.float32)
        if kind:
            return _Rows(memory.reshape(-1, kind_size)[:, : place.shape.value_size])
        groups = memory.reshape(-1, kind_size, 16)
        return _Rows(groups.transpose(0, 2, 1), grouped=True)

    def _state(self, cache: KVCache, layer: int, which: int) -> np.ndarray:
        values = self.shapes[layer].values
        return _memory(cache.state(layer)[which], 4 * values, np.float32)


class _Rows:
    """[position, value] of one head; positions beyond the room go round."""

    def __init__(self, array: np.ndarray, *, grouped: bool = False) -> None:
        self._array, self._grouped = array, grouped

    def _where(self, positions: np.ndarray) -> tuple[np.ndarray, ...]:
        count = self._array.shape[0] * (16 if self._grouped else 1)
        at = positions % count
        return (at // 16, at % 16) if self._grouped else (at,)

    def __getitem__(self, positions: np.ndarray) -> np.ndarray:
        return self._array[self._where(positions)]

    def __setitem__(self, positions: np.ndarray, values: np.ndarray) -> None:
        self._array[self._where(positions)] = values


def _memory(address: int, nbytes: int, kind: type) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), kind)


def _values(traces: np.ndarray, layer: int, kind: int, head: int, size: int) -> np.ndarray:
    salt = 13 * layer + 5 * kind + 3 * head + np.arange(size)
    return (traces[:, None] * (1 + salt) % 2039).astype(np.float32)
