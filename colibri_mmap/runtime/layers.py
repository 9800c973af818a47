"""Layers that model families share. Attribute names are GGUF tensor names.

T tokens, D model width, F hidden width of a feed-forward network, E experts, k of them per token.
A layer reads its weights once, at open, and is called with the residual stream x [T, D], which it
adds its output to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from ..format.experts import block_count
from ..format.gguf import GGUF
from .arena import Rows
from .attention import AttentionShape, GroupedQueryAttention
from .experts import ExpertStore
from .kernels import elementwise
from .kernels.routing import (
    GROUP_BY_MAXIMUM,
    GROUP_BY_TWO_BEST,
    SIGMOID,
    SOFTMAX,
    SQRT_SOFTPLUS,
)
from .kv import Batch, LayerShape
from .norm import Norm
from .operations import Operations, Reading
from .ops import Ops
from .rope import Rope, RopeFrequencies, rope_frequencies
from .routing import RouterShape, route
from .task import Task
from .weights import Matrix, Vector, Weights

if TYPE_CHECKING:
    from .placement import PlacedTrunk


class GatedFeedForward:
    """x += down(silu(gate(h)) * up(h)) for the normed h."""

    def __init__(self, gate: Matrix, up: Matrix, down: Matrix) -> None:
        self.gate, self.up, self.down = gate, up, down

    @classmethod
    def dense(cls, weights: Weights, layer: int, width: int, hidden: int) -> GatedFeedForward:
        """The feed-forward network of a dense layer."""
        prefix = f"blk.{layer}.ffn_"
        return cls(
            weights.matrix(prefix + "gate.weight", hidden, width),
            weights.matrix(prefix + "up.weight", hidden, width),
            weights.matrix(prefix + "down.weight", width, hidden),
        )

    @classmethod
    def shared(cls, weights: Weights, layer: int, width: int, hidden: int) -> GatedFeedForward:
        """The experts that every token of a layer takes, `hidden` values wide together."""
        prefix = f"blk.{layer}.ffn_"
        return cls(
            weights.matrix(prefix + "gate_shexp.weight", hidden, width),
            weights.matrix(prefix + "up_shexp.weight", hidden, width),
            weights.matrix(prefix + "down_shexp.weight", width, hidden),
        )

    def output(self, h: Rows, ops: Operations) -> Rows:
        gate, up = ops.linears(h, self.gate, self.up)
        return ops.linear(ops.silu_mul(gate, up), self.down)

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        ops.kept((self, h), x, lambda: ops.add(x, self.output(h, ops)))


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Routed experts that map `width` values through `hidden` ones, and how they are chosen.

    `activation` is the kernel that joins gate and up.
    """

    width: int
    hidden: int
    router: RouterShape
    activation: Task = elementwise.silu_mul

    @classmethod
    def from_gguf(cls, gguf: GGUF, hidden_key: str, *, normalise: bool) -> ExpertsShape:
        """Softmax routing over all experts; `hidden_key` holds the width of an expert."""
        count = gguf.int(".expert_count", minimum=1)
        used = gguf.int(".expert_used_count", minimum=1, maximum=count)
        return cls(
            gguf.int(".embedding_length", minimum=1),
            gguf.int(hidden_key, minimum=1),
            RouterShape(count, used, normalise=normalise),
        )

    @classmethod
    def with_stated_routing(
        cls,
        gguf: GGUF,
        gating: int,
        *,
        normalise: bool = False,
        grouping: tuple[int, int] = (1, 1),
    ) -> ExpertsShape:
        """Routing as the keys of the DeepSeek kind say.

        `gating`, `normalise` and `grouping`, the number of groups and of those used, are for files
        that do not state them.
        """
        count = gguf.int(".expert_count", minimum=1)
        groups, groups_used = gguf.int(".expert_group_count", 0, minimum=0), 1
        if groups == 0:
            groups, groups_used = grouping
        elif groups > 1:
            groups_used = gguf.int(".expert_group_used_count", minimum=1, maximum=groups)
        if count % groups:
            gguf.fail(".expert_group_count", f"must divide the {count} experts, is {groups}")
        gating = gguf.int(".expert_gating_func", 0) or gating
        if gating not in (SOFTMAX, SIGMOID, SQRT_SOFTPLUS):
            gguf.fail(".expert_gating_func", f"must be 1, 2 or 4, is {gating}")
        router = RouterShape(
            count,
            gguf.int(".expert_used_count", minimum=1, maximum=count // groups * groups_used),
            gating=gating,
            normalise=gguf.bool(".expert_weights_norm", normalise),
            scale=gguf.float(".expert_weights_scale", 0.0) or 1.0,  # 0 means not stated
            groups=groups,
            groups_used=groups_used,
            group_rule=GROUP_BY_MAXIMUM if gating == SOFTMAX else GROUP_BY_TWO_BEST,
        )
        width = gguf.int(".embedding_length", minimum=1)
        return cls(width, gguf.int(".expert_feed_forward_length", minimum=1), router)


class MixtureOfExperts:
    """x += the weighted sum of the experts that the router chooses for h."""

    def __init__(
        self, weights: Weights, layer: int, shape: ExpertsShape, store: ExpertStore
    ) -> None:
        self.shape, self.layer, self.store = shape, layer, store
        prefix, count = f"blk.{layer}.", shape.router.count
        self.ffn_gate_inp = weights.matrix(prefix + "ffn_gate_inp.weight", count, shape.width)
        self.ffn_gate_inp_bias = weights.optional_vector(prefix + "ffn_gate_inp.bias", count)
        self.exp_probs_b = weights.optional_vector(prefix + "exp_probs_b.bias", count)
        experts = weights.experts(layer, count, shape.width, shape.hidden)
        store.add_layer(layer, experts, self.ffn_gate_inp, shape.activation)

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        self.add_chosen(x, h, self.ask(h, ops), ops, batch)

    def ask(self, h: Rows, ops: Operations) -> Reading:
        """The router's logits, and h, on their way to the CPU, which chooses."""
        return ops.read(ops.kept(self, h, lambda: self._logits(h, ops)), h)

    def _logits(self, h: Rows, ops: Operations) -> Rows:
        logits = ops.linear(h, self.ffn_gate_inp)
        if self.ffn_gate_inp_bias is not None:
            ops.add_bias(logits, self.ffn_gate_inp_bias)
        return logits

    def add_chosen(self, x: Rows, h: Rows, asked: Reading, ops: Operations, batch: Batch) -> None:
        """The second half of `add_to`."""
        logits, on_host = asked.wait()
        routing = route(ops.cpu, logits, self.shape.router, self.exp_probs_b)
        if batch.trace is not None:
            batch.trace.record(self.layer, routing.ids, routing.weights)
        self.store.add_experts(x, h, on_host, self.layer, routing, ops)


class ExpertsAndShared:
    """x += routed experts(h) + the shared ones(h), which every token takes."""

    def __init__(self, routed: MixtureOfExperts, shared: FeedForward) -> None:
        self.routed, self.shared = routed, shared

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        if ops is ops.cpu:  # the routed ones first: the next layer's are read during the shared
            self.routed.add_to(x, h, ops, batch)
            self.shared.add_to(x, h, ops, batch)
        else:  # a device computes the shared ones while the CPU waits for the logits and routes
            asked = self.routed.ask(h, ops)
            self.shared.add_to(x, h, ops, batch)
            self.routed.add_chosen(x, h, asked, ops, batch)


class GatedSharedExpert:
    """x += sigmoid(ffn_gate_inp_shexp . h) * expert(h): the expert that every token takes."""

    def __init__(self, weights: Weights, layer: int, width: int, hidden: int) -> None:
        prefix = f"blk.{layer}.ffn_"
        self.ffn_gate_inp_shexp = weights.matrix(prefix + "gate_inp_shexp.weight", 1, width)
        self.expert = GatedFeedForward.shared(weights, layer, width, hidden)

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None:
        ops.kept((self, h), x, lambda: self._add(x, h, ops))

    def _add(self, x: Rows, h: Rows, ops: Operations) -> None:
        gate = ops.linear(h, self.ffn_gate_inp_shexp)
        ops.add_gated(x, self.expert.output(h, ops), gate)


class Mixer(Protocol):
    """What mixes the tokens in a block: attention, a convolution or a recurrence."""

    @property
    def cache_shape(self) -> LayerShape: ...

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None: ...


class FeedForward(Protocol):
    """What follows the mixer in a block: dense or experts."""

    def add_to(self, x: Rows, h: Rows, ops: Operations, batch: Batch) -> None: ...


def dense_then_experts(
    weights: Weights,
    store: ExpertStore,
    gating: int,
    *,
    normalise: bool = False,
    grouping: tuple[int, int] = (1, 1),
) -> Callable[[int], FeedForward]:
    """Dense networks in the first blocks, then experts with shared ones beside them.

    The keys of the DeepSeek kind say how many; `gating`, `normalise` and `grouping` are of the
    router, where they do not.
    """
    gguf = weights.gguf
    experts = ExpertsShape.with_stated_routing(gguf, gating, normalise=normalise, grouping=grouping)
    dense_blocks = gguf.int(".leading_dense_block_count", minimum=0)
    hidden = gguf.int(".feed_forward_length", minimum=1)
    shared = experts.hidden * gguf.int(".expert_shared_count", 0, minimum=0)

    def make_ffn(layer: int) -> FeedForward:
        if layer < dense_blocks:
            return GatedFeedForward.dense(weights, layer, experts.width, hidden)
        routed = MixtureOfExperts(weights, layer, experts, store)
        if not shared:
            return routed
        return ExpertsAndShared(
            routed, GatedFeedForward.shared(weights, layer, experts.width, shared)
        )

    return make_ffn


class Block:
    """x += mixer, then x += feed-forward, each of the normed x (pre-norm)."""

    def __init__(self, mixer: Mixer, ffn_norm: Norm, ffn: FeedForward) -> None:
        self.mixer, self.ffn_norm, self.ffn = mixer, ffn_norm, ffn

    def add_to(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> None:
        h = ops.kept(self, x, lambda: self._mixed(x, ops, batch, rope))
        self.ffn.add_to(x, h, ops, batch)

    def _mixed(self, x: Rows, ops: Ops, batch: Batch, rope: Rope | None) -> Rows:
        """What the feed-forward network takes, after the mixer has added to x."""
        self.mixer.add_to(x, ops, batch, rope)
        return self.ffn_norm(x, ops)


class Decoder:
    """The pre-norm decoder-only transformer: embedding, blocks, final norm, output head.

    `rope` is what the mixers rotate with, None where none of them does. Embeddings and logits are
    multiplied by their factors. `placed` says which of the last blocks run on a device.
    """

    placed: PlacedTrunk | None = None

    def __init__(
        self,
        weights: Weights,
        ops: Ops,
        blocks: Sequence[Block],
        rope: RopeFrequencies | None,
        output_norm: Norm,
        *,
        embedding_factor: float = 1.0,
        logit_factor: float = 1.0,
    ) -> None:
        gguf = weights.gguf
        self.ops, self.blk, self.rope, self.output_norm = ops, blocks, rope, output_norm
        self.context_length = gguf.int(".context_length", minimum=0)
        self.length_limit = rope.limit if rope is not None else 0
        self.kv_shapes: Sequence[LayerShape] = [block.mixer.cache_shape for block in blocks]
        width = gguf.int(".embedding_length", minimum=1)
        self.vocabulary = gguf.tensor("token_embd.weight").shape[-1]
        self.token_embd = weights.matrix("token_embd.weight", self.vocabulary, width)
        self.output = (
            weights.matrix("output.weight", self.vocabulary, width)
            if weights.has("output.weight")
            else self.token_embd
        )
        self.output_bias = weights.optional_vector("output.bias", self.vocabulary)
        self.embedding_factor = Vector.of(embedding_factor)
        self.logit_factor = Vector.of(logit_factor)

    @classmethod
    def with_attention(
        cls,
        weights: Weights,
        ops: Ops,
        shape: AttentionShape,
        make_ffn: Callable[[int], FeedForward],
        *,
        ffn_norm: str = "ffn_norm",
    ) -> Decoder:
        """Grouped-query attention of one shape in every block; `ffn_norm` is the norm's name."""
        blocks = [
            Block(
                GroupedQueryAttention(weights, i, shape),
                shape.norm(weights, f"blk.{i}.{ffn_norm}"),
                make_ffn(i),
            )
            for i in range(block_count(weights.gguf))
        ]
        rope = rope_frequencies(weights, shape.rotated)
        return cls(weights, ops, blocks, rope, shape.norm(weights, "output_norm"))

    def forward(self, batch: Batch) -> Rows:
        """Logits [wanted, V] of a batch, whose tokens are appended to their caches."""
        ops, placed = self.ops, self.placed
        x = ops.embed(self.token_embd, batch.tokens)
        if self.embedding_factor.values != 1:
            ops.scale(x, self.embedding_factor)
        on_cpu = len(self.blk) if placed is None else placed.layers.start
        self._run(self.blk[:on_cpu], x, ops, batch)
        if placed is None:
            return self._logits(ops.select(x, batch.wanted), ops)
        device = placed.ops
        with device.step(batch):
            x = device.from_host(x)
            # They use no more than Operations: placement.py has seen to it.
            self._run(self.blk[on_cpu:], x, cast(Ops, device), batch)
            wanted = device.select(x, batch.wanted)
            if placed.has_head and 0 < wanted.count <= placed.head_rows:
                return device.to_host(
                    device.kept(self, wanted, lambda: self._logits(wanted, device))
                )
            wanted = device.to_host(wanted)
        return self._logits(wanted, ops)

    def _run(self, blocks: Sequence[Block], x: Rows, ops: Ops, batch: Batch) -> None:
        rope = ops.rope_table(self.rope, batch) if blocks and self.rope is not None else None
        for block in blocks:
            with ops.temporaries():
                block.add_to(x, ops, batch, rope)

    def _logits(self, x: Rows, ops: Operations) -> Rows:
        """Logits of rows that all blocks have added to."""
        logits = ops.linear(self.output_norm(x, ops), self.output)
        if self.output_bias is not None:
            ops.add_bias(logits, self.output_bias)
        if self.logit_factor.values != 1:
            ops.scale(logits, self.logit_factor)
        return logits
