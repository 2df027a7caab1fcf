"""What one micro-batch keeps alive between its forward and its backward pass.

Counted from the code that runs: Megatron's layers with the specification in ``policy/model.py``, tensor by
tensor as autograd saves them (a test compares the sums with what it does save). The terms stand in the
order of the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

from rpg_megatron.config import ModelShape
from rpg_megatron.config.policy import ParallelSettings

ITEM_BYTES = {"float32": 4, "bfloat16": 2}
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
    )


def layer_bytes(w: Widths, *, qk_norm: bool, context: int = 1) -> float:
    """Bytes per token of a rank that one transformer layer saves for its backward pass, nothing recomputed.

    With context parallelism attention keeps keys and values of the whole row, ``context`` times as many.
    """
    wide_input = w.item != _WIDE  # in float32 the norm's wide input is the tensor that came in
    # Input in float32, 1/rms, normalised, and the result, which the linear layer behind it reads.
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + 2 * w.item * w.hidden
    attention = w.item * (w.query + 2 * w.key)  # of QKV; the values are a view of it
    if qk_norm:
        attention += _WIDE * w.query + _WIDE * w.heads + w.item * w.query
        attention += (_WIDE * w.key if wide_input else 0) + _WIDE * w.kv_heads + w.item * w.key
    attention += w.item * 4 * w.head_dim  # cosines and sines for queries and for keys, on every TP rank
    attention += w.item * (w.query + w.key)  # rotated
    attention += w.item * w.query + _WIDE * w.heads  # output and log-sum-exp
    attention += w.item * w.query  # the sequences' outputs put together again, read by the projection
    if context > 1:
        attention += w.item * 2 * w.key * context
    return 2 * norm + attention + mlp_bytes(w)


def mlp_bytes(w: Widths) -> float:
    """Of these, the MLP's: gate|up, silu(gate), up + offset, their product, which its second layer reads."""
    return w.item * 5 * w.ffn


def kept_bytes(w: Widths, *, qk_norm: bool, context: int, recompute: str) -> float:
    """Bytes per token that a layer keeps until its backward pass begins (``memory.recompute``)."""
    if recompute == "full":
        return w.item * w.hidden  # the layer's input
    whole = layer_bytes(w, qk_norm=qk_norm, context=context)
    return whole - (mlp_bytes(w) if recompute == "selective" else 0)


def head_bytes(w: Widths) -> float:
    """Bytes per token that the last stage saves behind the layers: final norm and log-prob head."""
    norm = _WIDE * w.hidden + _WIDE * w.hidden / w.whole + w.item * w.hidden
    return norm + w.item * w.whole + 16  # hidden states of all tokens; targets, normaliser, entropy


def working_bytes(w: Widths, tokens: int, again: float = 0) -> float:
    """Bytes that a layer needs besides what is kept, at the worst moment of its backward pass.

    The gradients of the MLP's inner tensors and of the residual stream, and one weight's gradient; again:
    bytes per token that are computed again.
    """
    return tokens * (again + w.item * (5 * w.ffn + 3 * w.whole)) + w.item * 2 * w.ffn * w.whole


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
