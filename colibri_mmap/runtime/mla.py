"""Multi-head latent attention in its absorbed form (DeepSeek-AI 2024).

The cache keeps one latent per position for all heads: `rank` compressed values, from which keys and
values are made, and `rotated` values of a rotary key. Instead of making them for every position,
attn_k_b takes each query to the compressed values and attn_v_b takes the outcome to the head's
value. Attribute names are GGUF tensor names. In a layer's cache the latents lie where other layers
keep V, and the keys of an indexer where they keep K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import FormatError
from ..format.experts import block_count
from ..format.gguf import GGUF
from ..format.quants import GGMLType
from .arena import Rows
from .indexer import Indexer, Selection
from .kernels import elementwise
from .kernels import indexer as indexer_kernels
from .kernels import latent as kernels
from .kv import Batch, KVShape, SequenceSlice
from .layers import Block, Decoder, FeedForward
from .norm import rms_norm
from .ops import Ops, float_bits
from .pool import ARGUMENTS, Job, Launch, job
from .rope import LOG_MULTIPLIER, Rope, rope_frequencies
from .task import Task
from .weights import Matrix, Weights

LATENT_EPS = 1e-6  # in the norms of queries and latents: fixed in the official models, no key


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes; queries and keys of a head have `plain` values and `rotated` ones.

    q_rank: of compressed queries, 0 where they are not. `scale` is the factor on the scores.
    """

    width: int
    heads: int
    q_rank: int
    rank: int
    plain: int
    rotated: int
    value_size: int
    scale: float
    eps: float = LATENT_EPS

    @classmethod
    def from_gguf(cls, gguf: GGUF) -> LatentShape:
        """The shape that the usual keys describe; files before the *_mla keys have it too."""
        rotated = gguf.int(".rope.dimension_count", minimum=2)
        if rotated % 2:
            gguf.fail(".rope.dimension_count", f"must be even, is {rotated}")
        suffix = "_mla" if f"{gguf.architecture}.attention.key_length_mla" in gguf.metadata else ""
        key_size = gguf.int(f".attention.key_length{suffix}", minimum=rotated + 1)
        rank = gguf.int(".attention.kv_lora_rank", minimum=1)
        if not kernels.fits(rank, rotated):
            gguf.fail(".attention.kv_lora_rank", f"is {rank}, more than this program is made for")
        return cls(
            gguf.int(".embedding_length", minimum=1),
            gguf.int(".attention.head_count", minimum=1),
            gguf.int(".attention.q_lora_rank", 0, minimum=0),
            rank,
            key_size - rotated,
            rotated,
            gguf.int(f".attention.value_length{suffix}", minimum=1),
            key_size**-0.5 * _yarn_factor(gguf) ** 2,
        )


def _yarn_factor(gguf: GGUF) -> float:
    """What YaRN multiplies queries and keys with."""
    scale = gguf.float(".rope.scaling.factor", 1.0)
    if gguf.str(".rope.scaling.type", "none") != "yarn" or scale <= 1.0:
        return 1.0
    return 1.0 + gguf.float(LOG_MULTIPLIER, 0.0) * math.log(scale)


class LatentAttention:
    """x += attn_output(attn_v_b(attention(attn_k_b(q), latents))) of attn_norm(x).

    With a `selection` it attends to the selected positions only: those that its own indexer
    selects, or, without one, those that the last layer with an indexer did.
    """

    def __init__(
        self,
        weights: Weights,
        layer: int,
        shape: LatentShape,
        selection: Selection | None = None,
        indexer: Indexer | None = None,
    ) -> None:
        self.shape, self.layer, self.selection, self.indexer = shape, layer, selection, indexer
        latent = shape.rank + shape.rotated
        self.cache_shape = KVShape(1, indexer.shape.size if indexer else 0, latent)
        prefix = f"blk.{layer}."
        self.attn_norm = rms_norm(weights, prefix + "attn_norm")
        q_rows = shape.heads * (shape.plain + shape.rotated)
        if shape.q_rank:
            self.attn_q_a = weights.matrix(prefix + "attn_q_a.weight", shape.q_rank, shape.width)
            self.attn_q_a_norm = weights.vector(prefix + "attn_q_a_norm.weight", shape.q_rank)
            self.attn_q = weights.matrix(prefix + "attn_q_b.weight", q_rows, shape.q_rank)
        else:
            self.attn_q = weights.matrix(prefix + "attn_q.weight", q_rows, shape.width)
        self.attn_kv_a_mqa = weights.matrix(prefix + "attn_kv_a_mqa.weight", latent, shape.width)
        self.attn_kv_a_norm = weights.vector(prefix + "attn_kv_a_norm.weight", shape.rank)
        if weights.has(prefix + "attn_k_b.weight"):
            sizes = (shape.heads, shape.rank, shape.plain)
            self.attn_k_b = weights.stack(prefix + "attn_k_b.weight", *sizes)
            sizes = (shape.heads, shape.value_size, shape.rank)
            self.attn_v_b = weights.stack(prefix + "attn_v_b.weight", *sizes)
        else:
            self.attn_k_b, self.attn_v_b, self._copy = _split(weights, layer, shape)
        self.attn_output = weights.matrix(
            prefix + "attn_output.weight", shape.width, shape.heads * shape.value_size
        )

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        shape, indexer = self.shape, self.indexer
        h = self.attn_norm(x, ops)
        index: tuple[Rows, ...] = ()
        if shape.q_rank:
            inputs = indexer.of_input if indexer else ()
            h, latents, *index_rows = ops.linears(h, self.attn_q_a, self.attn_kv_a_mqa, *inputs)
            ops.rms_norm(h, self.attn_q_a_norm, shape.eps, in_place=True)
            q, *index_q = ops.linears(h, self.attn_q, *([indexer.attn_q_b] if indexer else []))
            index = (*index_q, *index_rows)
        else:
            q, latents = ops.linears(h, self.attn_q, self.attn_kv_a_mqa)
        compressed = latents.columns(0, shape.rank)
        ops.rms_norm(compressed, self.attn_kv_a_norm, shape.eps, in_place=True)
        if rope is not None:
            ops.rope(q, shape.heads, rope, half_split=False, first=shape.plain)
            ops.rope(latents, 1, rope, half_split=False, first=shape.rank)
        if indexer is not None:
            indexer.rotate(index[0], index[1], ops, rope)
        absorbed = ops.head_linear(q, self.attn_k_b)
        out = ops.arena.rows(x.count, shape.heads * shape.rank)
        self._attend((absorbed, q, latents, out, *index), ops, batch)
        ops.add(x, ops.linear(ops.head_linear(out, self.attn_v_b), self.attn_output))

    def _attend(self, rows: tuple[Rows, ...], ops: Ops, batch: Batch) -> None:
        """`rows`: absorbed and rotary queries, latents, out; queries, keys and weights to index."""
        if self.selection is not None:
            self.selection.make_room(len(batch.tokens))
        if len(batch.tokens) == 1:
            self._attend_one(rows, ops, batch.sequences[0])
            return
        with ops.temporaries():
            by_sequence = [
                self._phases(part, tuple(part.rows(r) for r in rows), ops)
                for part in batch.sequences
            ]
            appends = [job for phases in by_sequence for job in phases[0]]
            selections = [phase for phases in by_sequence for phase in phases[1:-1]]
            attends = [job for phases in by_sequence for job in phases[-1]]
            ops.run(None, lambda: [appends, *selections, attends])

    def _attend_one(self, rows: tuple[Rows, ...], ops: Ops, part: SequenceSlice) -> None:
        """A single token: the launch of the step before, with a new position."""
        index = self.selection.index(part) if self.selection else 0
        key = (self.layer, index, *(r.address for r in rows))
        launch = part.cache.launches.get(key)
        if launch is None:
            with ops.temporaries():
                launch = part.cache.launches[key] = Launch(self._phases(part, rows, ops))
        launch.jobs[:, ARGUMENTS] = part.position
        ops.pool.run(launch)

    def _phases(self, part: SequenceSlice, rows: tuple[Rows, ...], ops: Ops) -> list[list[Job]]:
        """Append to a sequence's cache, select, attend; the position is every job's first word."""
        absorbed, q, latents, out, *index_rows = rows
        shape, half = self.shape, part.cache.kv_type == "f16"
        cache = part.cache.layers[self.layer].values
        task = kernels.append_latent_f16 if half else kernels.append_latent_f32
        words = (latents.address, latents.stride, latents.width, cache)
        phases = [[job(task, latents.count, 8, part.position, *words)]]
        index = self.selection.index(part) if self.selection else 0
        if self.indexer is not None:
            index_q, index_k, weights = index_rows
            phases[0].append(self.indexer.append_job(index_k, part, self.layer))
            if index:
                phases += self.indexer.select_phases(index_q, weights, part, self.layer, ops)
        rotary = q.address + 4 * shape.plain
        per_head = 4 * (shape.plain + shape.rotated)
        queries = (absorbed.address, absorbed.stride, rotary, q.stride, per_head)
        sizes = (shape.heads, shape.rank, shape.rotated)
        chosen = self.selection.chosen if self.selection else 0
        task = kernels.attend_latent_f16 if half else kernels.attend_latent_f32
        units = out.count * -(-shape.heads // kernels.HEADS)
        more = (out.address, out.stride, cache, *sizes, index, chosen, float_bits(shape.scale))
        phases.append([job(task, units, 1, part.position, *queries, *more)])
        return phases


def _split(
    weights: Weights, layer: int, shape: LatentShape
) -> tuple[list[Matrix], list[Matrix], NDArray[np.generic]]:
    """attn_k_b and attn_v_b of a file with both in one attn_kv_b, and the memory of the former.

    attn_v_b is used where it lies. attn_k_b is the transpose of what the file has and so a copy:
    2 bytes per weight of half precision, else 4; 0.1 GB for DeepSeek-V2-Lite, 2 GB for V3.
    """
    plain, rank, size = shape.plain, shape.rank, shape.plain + shape.value_size
    name = f"blk.{layer}.attn_kv_b.weight"
    if not weights.has(name):
        whole = f"blk.{layer}.attn_k_b.weight"
        raise FormatError(
            weights.gguf.path, f"tensor {whole!r}", "is missing: the model is incomplete"
        )
    both = weights.matrix(name, shape.heads * size, rank)
    keys = [both.part(size * head, plain) for head in range(shape.heads)]
    values = [both.part(size * head + plain, shape.value_size) for head in range(shape.heads)]
    kind = both.type if both.type in (GGMLType.F16, GGMLType.BF16) else GGMLType.F32
    copy: NDArray[np.generic]
    if kind == GGMLType.F32:
        copy = np.ascontiguousarray([key.floats().T for key in keys])
    else:
        copy = np.ascontiguousarray([key.raw().view(np.uint16).T for key in keys])
    stride, row_bytes = copy.strides[:2]
    transposed = [
        Matrix(copy.ctypes.data + stride * head, kind, rank, plain, row_bytes)
        for head in range(shape.heads)
    ]
    return transposed, values, copy


def latent_decoder(
    weights: Weights,
    ops: Ops,
    shape: LatentShape,
    make_attention: Callable[[int], LatentAttention],
    make_ffn: Callable[[int], FeedForward],
) -> Decoder:
    """Latent attention with rope in every block."""
    blocks = [
        Block(make_attention(i), rms_norm(weights, f"blk.{i}.ffn_norm"), make_ffn(i))
        for i in range(block_count(weights.gguf))
    ]
    rope = rope_frequencies(weights, shape.rotated)
    return Decoder(weights, ops, blocks, rope, rms_norm(weights, "output_norm"))


def latent_tasks(kv_type: str) -> list[Task]:
    """The kernels of dense latent attention."""
    names = (f"append_latent_{kv_type}", f"attend_latent_{kv_type}")
    return [getattr(kernels, name) for name in names]


def sparse_tasks(kv_type: str) -> list[Task]:
    """The kernels of latent attention with indexers."""
    names = (f"append_index_keys_{kv_type}", f"score_keys_{kv_type}", "select_keys")
    tasks = [getattr(indexer_kernels, name) for name in names]
    return [*latent_tasks(kv_type), *tasks, elementwise.layer_norm]
