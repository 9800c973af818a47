"""Attention over the caches of a batch's sequences, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .arena import Rows
from .kernels import attention as kernels
from .kv import Batch, SequenceSlice
from .pool import ARGUMENTS, Job, Launch, Pool, job

_EVERY = 1 << 30  # positions are int32 in the kernel


@dataclass(frozen=True, slots=True)
class Sight:
    """The earlier tokens that a token attends to: the last `window`, itself included, of its own
    `chunk` of the context."""

    window: int = _EVERY
    chunk: int = _EVERY

    @property
    def reach(self) -> int:
        """How many positions must be kept; 0: all of them."""
        reach = min(self.window, self.chunk)
        return reach if reach < _EVERY else 0


ALL_KEYS = Sight()


def attend(
    pool: Pool, rows: Sequence[Rows], batch: Batch, layer: int, how: tuple[int, int, int, int]
) -> None:
    """Append k and v to the sequences' caches and attend causally.

    `rows`: q, k, v, and out [T, heads * d_v], which is written; `how`: scale (float32 bits),
    window, chunk, address of the sinks or 0.
    """
    if rows[0].count == 1:
        _attend_one(pool, batch.sequences[0], rows, layer, how)
        return
    appends: list[Job] = []
    attends: list[Job] = []
    for part in batch.sequences:
        jobs = _attention_jobs(part, [part.rows(r) for r in rows], layer, how)
        appends.append(jobs[0])
        attends.append(jobs[1])
    pool.run(Launch([appends, attends]))


def _attend_one(
    pool: Pool,
    part: SequenceSlice,
    rows: Sequence[Rows],
    layer: int,
    how: tuple[int, int, int, int],
) -> None:
    """A single token: the launch of the step before, with a new position."""
    key = (layer, *(r.address for r in rows))
    launch = part.cache.launches.get(key)
    if launch is None:
        jobs = _attention_jobs(part, rows, layer, how)
        launch = part.cache.launches[key] = Launch([[jobs[0]], [jobs[1]]])
    else:
        launch.jobs[0, ARGUMENTS + 7] = part.position
        launch.jobs[1, ARGUMENTS + 12] = part.position
    pool.run(launch)


def _attention_jobs(
    part: SequenceSlice, rows: Sequence[Rows], layer: int, how: tuple[int, int, int, int]
) -> tuple[Job, Job]:
    """The jobs that append k and v of one sequence, and that attend.

    `rows`: q, k, v, out; `how`: scale (float32 bits), window, chunk, address of the sinks or 0.
    """
    q, k, v, out = rows
    scale, window, chunk, sinks = how
    place = part.cache.layers[layer]
    shape = place.shape
    half = part.cache.kv_type == "f16"
    where = (place.keys, place.values, place.key_head_stride, place.value_head_stride)
    append = job(
        kernels.append_kv_f16 if half else kernels.append_kv_f32,
        *(k.count, 8, k.address, k.stride, v.address, v.stride),
        *(shape.heads, shape.key_size, shape.value_size, part.position, *where, place.positions),
    )
    group = q.width // shape.key_size // shape.heads
    blocks = -(-q.count * group // kernels.ROWS)
    attend = job(
        kernels.attention_f16 if half else kernels.attention_f32,
        *(shape.heads * blocks, 1, q.address, q.stride, out.address, out.stride, *where),
        *(group, shape.key_size, shape.value_size, q.count, part.position),
        *(scale, window, blocks, place.positions, chunk, sinks),
    )
    return append, attend
