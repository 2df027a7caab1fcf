"""Activation memory: what autograd keeps between forward and backward pass, by one formula of a layer.

A test compares it with what autograd saves of Megatron's own (local) layers on a CPU, to a few percent; for
Transformer Engine's (fused) layers it follows from the sources of 2.20.2. Left out, since they are less than
a percent: 1/rms of the stream, rotary angles, an adapter on the output layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.layout import BatchPlan, in_fp8, layers_of
from rpg_megatron.config import ModelShape, Settings
from rpg_megatron.config.model_shape import CHUNK
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.system.dtypes import ITEM_BYTES

Device = Literal["cpu", "cuda"]
Recompute = Literal["none", "selective", "full"]
_FP8_ITEM = 1 + 4 / 128
"""Bytes of a value in FP8: with blockwise scales a float32 for each 128."""


def expert_rows(shape: ModelShape, parallel: ParallelSettings, *, worst: bool = False) -> float:
    """Rows (a token in one of its experts) of a rank in one layer, per token of its micro-batch; dense: 0.

    With even load as many as its own tokens have, times the ranks that share an expert. No token is dropped:
    at worst, all tokens of the expert-parallel ranks choose the experts of one rank.
    """
    if (e := shape.experts) is None:
        return 0
    each = parallel.expert * min(e.per_token, e.count // parallel.expert) if worst else e.per_token
    return parallel.expert_tensor / parallel.tensor * each


@dataclass(frozen=True)
class StageActivations:
    """The activations of a rank of one pipeline stage."""

    settings: Settings
    shape: ModelShape
    stage: int
    batch: BatchPlan
    device: Device

    @property
    def fused(self) -> bool:
        """Whether the layers are Transformer Engine's."""
        return self.settings.has_fused_layers(self.device)

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch on this context-parallel rank."""
        return -(-self.batch.tokens_per_microbatch // self.settings.parallel.context)

    def saved(self, recompute: Recompute, *, worst: bool = False) -> int:
        """Bytes of all micro-batches in flight. worst: see ``expert_rows``."""
        settings, parallel, shape = self.settings, self.settings.parallel, self.shape
        each = sum(self._layer(recompute, worst, n) for n in layers_of(shape, parallel, self.stage))
        total = in_flight(self.stage, parallel, self.batch.microbatches) * each / parallel.virtual
        if self.stage == parallel.pipeline - 1:
            # Inputs of the final norm and of the log-prob head; targets, normalisers, entropy.
            stream = shape.hidden_size / (parallel.tensor if parallel.sequence else 1)
            total += ITEM_BYTES[settings.precision.dtype] * (stream + shape.hidden_size) + 20
        return round(self.tokens * total)

    def _layer(self, recompute: Recompute, worst: bool, number: int) -> float:
        """Bytes that a layer saves for each token on the rank: the inputs of its operations.

        Of attention: layer's input, norm's output and sum with the stream; queries and keys before their
        norms, if they have any; rotated queries and keys, values, output. Local layers keep more copies of
        queries, and the keys and values of all context ranks. Latent values are as long as keys here, but for
        the input of the output projection. Of a dense MLP: norm's output, gate|up and
        their product; of experts the rows, and these for each row. With adapters also A x of each.
        """
        shape, parallel, lora = self.shape, self.settings.parallel, self.settings.lora
        item, local = ITEM_BYTES[self.settings.precision.dtype], not self.fused
        stream = shape.hidden_size / (parallel.tensor if parallel.sequence else 1)
        if recompute == "full":
            return item * stream
        experts, linear = shape.has_experts(number), shape.is_linear(number)
        fp8 = in_fp8(self.settings.precision.fp8, number, shape.num_layers) and lora is None
        low = _FP8_ITEM if fp8 else item  # of what products with weights read
        heads, kv_heads = shape.num_heads / parallel.tensor, max(1.0, shape.num_kv_heads / parallel.tensor)
        queries, keys = heads * shape.head_dim, kv_heads * shape.head_dim
        total = (2 * item + low) * stream
        if linear:
            total += self._delta_net() / parallel.tensor
            queries = keys = heads = kv_heads = 0
        if shape.latent is not None:
            total += self._latents(stream) + item * heads * shape.latent.value_dim
        total += (2 + shape.qk_norm) * item * (queries + keys)
        if shape.gated_attention:  # the gate, its sigmoid in float32, and the product
            total += (4 + 2 * item) * queries
        gathered = shape.qk_norm * (queries + keys) + 2 * (parallel.context - 1) * keys
        own = 2 * queries + (not shape.qk_norm or shape.wide_qk_norm) * keys if shape.latent is None else 0
        total += local * item * (own if parallel.context == 1 else gathered)
        # Log-sum-exp of attention, and 1/rms of each head: float32.
        total += 4 * heads * (self.fused or parallel.context == 1)
        total += 4 * (heads + kv_heads) * (shape.qk_norm and not shape.wide_qk_norm)
        if lora is not None:
            inner = recompute == "none" and not experts
            blocks = AdapterMapping(shape, lora).in_layer(number).values()
            total += item * lora.rank * sum(block == "self_attention" or inner for block in blocks)
        if recompute == "none" or experts or local or lora is not None:
            total += low * stream  # second norm's output; fused with the first product of a dense MLP
        if recompute == "none" and not experts:
            total += (2 * item + low) * shape.ffn_hidden_size / parallel.tensor
        if recompute == "none" and experts and (e := shape.experts) is not None:
            # Frozen experts save neither the rows nor the weighted product; the router's indices are int64.
            trained, columns = lora is None, e.ffn_hidden_size / parallel.expert_tensor
            of_row = trained * shape.hidden_size + (2 + trained + local) * columns
            total += expert_rows(shape, parallel, worst=worst) * (item * of_row + 4)  # and its weight
            total += (8 * e.count + 20 * e.per_token) / parallel.tensor
            if shared := e.shared_ffn_hidden_size:  # gate|up, their product, and what its own gate multiplies
                total += item * (3 * trained + 2 * local * (not trained)) * shared / parallel.tensor
                total += item * stream * e.shared_gate
        return total

    def _latents(self, stream: float) -> float:
        """Bytes of the latents before and after their norms, for each token."""
        latent, item = self.shape.latent, ITEM_BYTES[self.settings.precision.dtype]
        assert latent is not None
        sizes = 2 * (latent.query_rank + latent.rank) + latent.rotated_dim
        return item * sizes * stream / self.shape.hidden_size

    def _delta_net(self) -> float:
        """Bytes that linear attention saves for each token, on all tensor-parallel ranks together.

        The input projection; queries and keys before their norms, in float32; what the rule reads, with
        queries and keys for each value head, decays and rates; its output, normalised; the gate, its SiLU,
        and their product. FLA also keeps the solved system of each chunk. The rule is recomputed.
        """
        linear, item = self.shape.linear, ITEM_BYTES[self.settings.precision.dtype]
        assert linear is not None
        numbers = linear.in_rows + 2 * linear.value_heads * linear.key_dim + 4 * linear.values
        heads = (20 + 2 * item) * linear.value_heads
        solved = self.fused * item * CHUNK * linear.value_heads
        return item * numbers + 8 * linear.keys + 8 * linear.values + heads + solved

    def working(self, recompute: Recompute, *, worst: bool = False) -> int:
        """Bytes of the largest backward pass of one layer besides the activations that are saved.

        What is recomputed, and the gradients of the MLP's inner tensors, of the stream and of one weight.
        Fused layers compute all experts of a rank at once, local layers one after the other. Frozen weights
        have no gradient, but adding adapters to gate|up takes three tensors of its size.
        """
        shape, parallel, frozen = self.shape, self.settings.parallel, self.settings.lora is not None
        item, hidden, most = ITEM_BYTES[self.settings.precision.dtype], shape.hidden_size, 0.0
        layers, fp8 = layers_of(shape, parallel, self.stage), self.settings.precision.fp8
        kinds = {
            (shape.has_experts(n), in_fp8(fp8, n, shape.num_layers), shape.is_linear(n)): n for n in layers
        }
        for (experts, *_), number in kinds.items():
            again = self._layer("none", worst, number) - self._layer(recompute, worst, number)
            columns, at_once = shape.ffn_hidden_size / parallel.tensor, 1
            inner = (6 if frozen else 5) * columns
            if experts and (e := shape.experts) is not None:
                held, columns = e.count // parallel.expert, e.ffn_hidden_size / parallel.expert_tensor
                at_once = held if self.fused else 1
                # The rows in the order of the tokens and of the experts, and the inner tensors.
                of_row = 2 * hidden + (3 * columns if self.fused else 5 * columns / held)
                inner = expert_rows(shape, parallel, worst=worst) * of_row
                inner += 5 * e.shared_ffn_hidden_size / parallel.tensor
            weight = 0 if frozen else at_once * 2 * columns * hidden
            most = max(most, item * (self.tokens * (inner + 3 * hidden) + weight) + self.tokens * again)
        return round(most)


def in_flight(stage: int, parallel: ParallelSettings, microbatches: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, each for one of its (virtual) stages.

    1F1B: the first rank has the most. Interleaved: the warm-up has 2 x (later ranks) + (virtual - 1) x
    pipeline forward passes of one chunk, plus the current one.
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual == 1:
        return min(microbatches, behind + 1)
    rounded = -(-microbatches // parallel.pipeline) * parallel.pipeline
    return min(rounded * parallel.virtual, 2 * behind + (parallel.virtual - 1) * parallel.pipeline + 1)
