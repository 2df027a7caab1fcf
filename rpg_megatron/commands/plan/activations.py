"""Activation memory of one micro-batch between its forward and its backward pass.

Counted from Megatron's layers with the specification in ``policy/model.py``, tensor by tensor as autograd
saves them (a test compares the sums with what autograd saves). Terms are in the order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.commands.plan.experts import (
    ExpertWidths,
    Routes,
    expert_widths,
    routed_bytes,
    working_rows,
)
from rpg_megatron.config import ModelShape
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.system.dtypes import ITEM_BYTES

Recompute = Literal["none", "selective", "full"]
_WIDE = 4
"""Bytes of a float32 number, in which norms and softmax are computed."""


@dataclass(frozen=True)
class Widths:
    """Elements per token of each kind of activation, on one rank."""

    hidden: float
    """Residual stream: sharded with sequence parallelism, else full."""
    whole: int
    heads: float
    kv_heads: float
    head_dim: int
    ffn: float
    item: int
    context: int
    experts: ExpertWidths | None = None
    """None for a dense model."""

    @property
    def query(self) -> float:
        """Query columns of this rank."""
        return self.heads * self.head_dim

    @property
    def key(self) -> float:
        """Key columns of this rank, as many as value columns."""
        return self.kv_heads * self.head_dim


def widths(shape: ModelShape, parallel: ParallelSettings, dtype: str, routes: Routes = "even") -> Widths:
    """The sizes that determine a rank's activations. routes: how tokens choose experts."""
    tensor = parallel.tensor
    return Widths(
        hidden=shape.hidden_size / (tensor if parallel.sequence else 1),
        whole=shape.hidden_size,
        heads=shape.num_heads / tensor,
        kv_heads=max(1.0, shape.num_kv_heads / tensor),
        head_dim=shape.head_dim,
        ffn=shape.ffn_hidden_size / tensor,
        item=ITEM_BYTES[dtype],
        context=parallel.context,
        experts=expert_widths(shape, parallel, routes),
    )


def layer_bytes(
    w: Widths, lengths: Sequence[int], *, qk_norm: bool, recompute: Recompute, experts: bool = False
) -> float:
    """Bytes that one transformer layer saves for its backward pass. experts: whether it has experts.

    lengths: tokens of the micro-batch's sequences, before sharding over context ranks. Sequences of similar
    length, which share an attention call, save less than is counted here.
    """
    tokens = sum(lengths) / w.context
    if recompute == "full":  # its input
        return tokens * w.item * w.hidden
    # Input in float32, 1/rms, normalised, and the result, which the next linear layer reads.
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + 2 * w.item * w.hidden
    mlp = 0.0
    if recompute == "none" and experts and w.experts is not None:
        mlp = routed_bytes(w.experts, w.whole, w.item, fused=False)
    elif recompute == "none":
        # gate|up, silu(gate), up + offset, their product, which the second linear layer reads.
        mlp = w.item * 5 * w.ffn
    return tokens * (2 * norm + mlp) + _attention_bytes(w, lengths, qk_norm=qk_norm)


def _attention_bytes(w: Widths, lengths: Sequence[int], *, qk_norm: bool) -> float:
    tokens = sum(lengths) / w.context
    wide_input = w.item != _WIDE  # in float32 the norm's wide input is its input tensor
    each = 0.0
    if qk_norm:
        each += _WIDE * w.query + _WIDE * w.heads + w.item * w.query
        each += (_WIDE * w.key if wide_input else 0) + _WIDE * w.kv_heads + w.item * w.key
    each += w.item * w.query  # rotated
    each += w.item * w.query  # the concatenated outputs of the sequences, read by the projection
    qkv, keys = w.item * (w.query + 2 * w.key), w.item * w.key
    if w.context == 1:
        # Output and log-sum-exp; values are a view of QKV.
        return tokens * (each + w.item * w.query + _WIDE * w.heads + qkv + keys)
    if qk_norm and not wide_input:
        each += qkv  # the keys' norm reads it
    return tokens * each + sum(lengths) * 2 * keys  # of all ranks; attention itself is recomputed


def head_bytes(w: Widths) -> float:
    """Bytes per token that the last stage saves after the layers: final norm and log-prob head."""
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + w.item * w.hidden
    return norm + w.item * w.whole + 20  # hidden states of all tokens; targets, two normalisers, entropy


def working_bytes(w: Widths, tokens: int, *, experts: bool = False, fused: bool = False) -> float:
    """Peak bytes of a layer's backward pass besides saved activations.

    The gradients of the MLP's inner tensors, of the residual stream, and of one weight. Recomputed
    activations are not included. experts: whether the layer has experts; fused: whether they are grouped.
    """
    if experts and (e := w.experts) is not None:
        rows = working_rows(e, w.whole, w.item, fused=fused)
        weight = (e.held if fused else 1) * 2 * e.columns * w.whole
        return tokens * (rows + 3 * w.item * w.whole) + w.item * weight
    return tokens * w.item * (5 * w.ffn + 3 * w.whole) + w.item * 2 * w.ffn * w.whole


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
