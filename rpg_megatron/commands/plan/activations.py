"""What one micro-batch keeps alive between its forward and its backward pass.

Counted from the code that runs: Megatron's layers with the specification in ``policy/model.py``, tensor by
tensor as autograd saves them (a test compares the sums with what it does save). The terms stand in the
order of the forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rpg_megatron.config import ModelShape
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.system.dtypes import ITEM_BYTES

Recompute = Literal["none", "selective", "full"]
_WIDE = 4
"""Bytes of a float32 number, in which norms and softmax are computed."""


@dataclass(frozen=True)
class Widths:
    """Numbers per token that a rank holds of each kind of activation."""

    hidden: float
    """Of the residual stream: cut by sequence parallelism, whole without."""
    whole: int
    heads: float
    kv_heads: float
    head_dim: int
    ffn: float
    item: int
    context: int

    @property
    def query(self) -> float:
        """Columns of the queries of this rank."""
        return self.heads * self.head_dim

    @property
    def key(self) -> float:
        """Columns of its keys, and as many of its values."""
        return self.kv_heads * self.head_dim


def widths(shape: ModelShape, parallel: ParallelSettings, dtype: str) -> Widths:
    """The sizes that decide a rank's activations."""
    cut = parallel.tensor
    return Widths(
        hidden=shape.hidden_size / (cut if parallel.sequence else 1),
        whole=shape.hidden_size,
        heads=shape.num_heads / cut,
        kv_heads=max(1.0, shape.num_kv_heads / cut),
        head_dim=shape.head_dim,
        ffn=shape.ffn_hidden_size / cut,
        item=ITEM_BYTES[dtype],
        context=parallel.context,
    )


def layer_bytes(w: Widths, lengths: Sequence[int], *, qk_norm: bool, recompute: Recompute) -> float:
    """Bytes that one transformer layer saves for its backward pass.

    lengths: of the micro-batch's sequences, before they are cut over context ranks.
    """
    tokens = sum(lengths) / w.context
    if recompute == "full":  # its input
        return tokens * w.item * w.hidden
    # Input in float32, 1/rms, normalised, and the result, which the linear layer behind it reads.
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + 2 * w.item * w.hidden
    # gate|up, silu(gate), up + offset, their product, which the second linear layer reads.
    mlp = w.item * 5 * w.ffn if recompute == "none" else 0
    return tokens * (2 * norm + mlp) + _attention_bytes(w, lengths, qk_norm=qk_norm)


def _attention_bytes(w: Widths, lengths: Sequence[int], *, qk_norm: bool) -> float:
    tokens = sum(lengths) / w.context
    wide_input = w.item != _WIDE  # in float32 the norm's wide input is the tensor that came in
    each = 0.0
    if qk_norm:
        each += _WIDE * w.query + _WIDE * w.heads + w.item * w.query
        each += (_WIDE * w.key if wide_input else 0) + _WIDE * w.kv_heads + w.item * w.key
    each += w.item * 4 * w.head_dim  # cosines and sines for queries and for keys, on every TP rank
    each += w.item * w.query  # rotated
    each += w.item * w.query  # the sequences' outputs put together again, read by the projection
    qkv, keys = w.item * (w.query + 2 * w.key), w.item * w.key
    if w.context == 1:
        # Output and log-sum-exp; values are a view of QKV.
        return tokens * (each + w.item * w.query + _WIDE * w.heads + qkv + keys)
    if qk_norm and not wide_input:
        each += qkv  # the keys' norm reads it
    return tokens * each + sum(lengths) * 2 * keys  # of all ranks; attention itself is computed again


def head_bytes(w: Widths) -> float:
    """Bytes per token that the last stage saves behind the layers: final norm and log-prob head."""
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + w.item * w.hidden
    return norm + w.item * w.whole + 20  # hidden states of all tokens; targets, two normalisers, entropy


def working_bytes(w: Widths, tokens: int) -> float:
    """Bytes that a layer needs besides what is saved, at the worst moment of its backward pass.

    The gradients of the MLP's inner tensors and of the residual stream, and one weight's gradient. What is
    recomputed comes on top.
    """
    return tokens * w.item * (5 * w.ffn + 3 * w.whole) + w.item * 2 * w.ffn * w.whole


def in_flight(stage: int, parallel: ParallelSettings, microbatches: int) -> int:
    """Micro-batches whose activations a pipeline rank holds at once, each of one of its (virtual) stages.

    1F1B: the first rank has the most. Interleaved, the warm-up has 2 x (ranks behind) + (virtual - 1) x
    pipeline forward passes of one chunk, and one more is under way.
    """
    behind = parallel.pipeline - stage - 1
    if parallel.virtual == 1:
        return min(microbatches, behind + 1)
    rounded = -(-microbatches // parallel.pipeline) * parallel.pipeline
    return min(rounded * parallel.virtual, 2 * behind + (parallel.virtual - 1) * parallel.pipeline + 1)
