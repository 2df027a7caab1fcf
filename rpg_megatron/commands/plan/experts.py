"""Mixtures of experts in a plan: rows that the experts of a rank process, and replicas of experts.

A row is one token in one of its experts. By default the load is assumed to be even: each rank then processes
as many rows as its own tokens have. No token is dropped, so in the worst case all tokens of the
expert-parallel ranks choose the experts of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rpg_megatron.config import ModelShape
from rpg_megatron.config.policy import ParallelSettings
from rpg_megatron.models.partition import ALL_EXPERTS, ExpertShard

Routes = Literal["even", "worst"]
"""How tokens choose experts: even load, or all tokens choose the experts of one rank."""

_INDEX = 8
"""Bytes of an index, int64."""


@dataclass(frozen=True)
class ExpertWidths:
    """The sizes that determine the activations of a layer with experts on one rank."""

    own: float
    """Tokens that the rank routes per token of its micro-batch: a fraction with sequence parallelism."""
    rows: float
    """Rows that its experts process per token of its micro-batch."""
    columns: float
    """Feed-forward columns of one expert on this rank."""
    count: int
    """Experts of a layer."""
    held: int
    """Experts of a layer on this rank."""
    per_token: int


def expert_widths(shape: ModelShape, parallel: ParallelSettings, routes: Routes) -> ExpertWidths | None:
    """The sizes of a rank's experts; None for a dense model."""
    e = shape.experts
    if e is None:
        return None
    own, held = 1 / parallel.tensor, e.count // parallel.expert
    # Ranks that share an expert process the rows of all of them.
    rows = own * parallel.expert_tensor * e.per_token
    if routes == "worst":
        rows = own * parallel.expert_tensor * parallel.expert * min(e.per_token, held)
    columns = e.ffn_hidden_size / parallel.expert_tensor
    return ExpertWidths(own, rows, columns, e.count, held, e.per_token)


def routed_bytes(e: ExpertWidths, hidden: int, item: int, *, fused: bool) -> float:
    """Bytes that a layer's router and experts save per token of the micro-batch, besides the router's input.

    Per row: the first linear layer's input, sorted by expert; gate|up; its weight in float32; and the second
    linear layer's input. Local layers also save silu(gate), up + offset, and their product before weighting.
    Per token: the sorted indices of all (expert, token) pairs, of which Megatron keeps a view; two indices
    and a weight for each chosen expert.
    """
    row = item * (hidden + (3 if fused else 6) * e.columns) + 4
    token = _INDEX * e.count + e.per_token * (2 * _INDEX + 4)
    return e.rows * row + e.own * token


def working_rows(e: ExpertWidths, hidden: int, item: int, *, fused: bool) -> float:
    """Bytes per token of the gradients that a layer's backward pass holds at once for the rows of a rank.

    The rows in both orders; gradients of the inner tensors of all experts (grouped), or of one expert.
    """
    inner = 3 * e.columns if fused else 5 * e.columns / e.held
    return e.rows * item * (2 * hidden + inner)


def expert_shard(shape: ModelShape, parallel: ParallelSettings) -> ExpertShard:
    """The shard of the first expert-parallel rank; all have the same size."""
    if shape.experts is None:
        return ALL_EXPERTS
    return ExpertShard(parallel.expert, 0, parallel.expert_tensor, 0)


def expert_replicas(parallel: ParallelSettings) -> int:
    """Ranks that hold the same experts, over which their optimizer state is sharded."""
    ranks = parallel.tensor * parallel.context * parallel.data
    return ranks // (parallel.expert * parallel.expert_tensor)


def is_expert(name: str) -> bool:
    """Whether a Megatron parameter belongs to an expert; routers do not."""
    return ".experts." in name


def read_columns(shape: ModelShape, batch: float) -> float:
    """Feed-forward columns of all layers that a decoding step of ``batch`` sequences reads.

    With even and independent choices of k of E experts per token, E (1 - (1 - k/E)^batch) experts are used.
    """
    e = shape.experts
    if e is None:
        return shape.num_layers * shape.ffn_hidden_size
    chosen: float = e.count * (1 - (1 - e.per_token / e.count) ** batch)
    dense = (shape.num_layers - len(e.layers)) * shape.ffn_hidden_size
    return dense + len(e.layers) * (chosen * e.ffn_hidden_size + e.count / 3)


def dispatched_bytes(shape: ModelShape, parallel: ParallelSettings, item: int) -> float:
    """Bytes per token that a rank sends to other expert-parallel ranks in one forward pass of all layers.

    Each row and its result are sent; with even load, a fraction of 1 - 1/EP goes to other ranks. A backward
    pass sends the same amount. Gathering rows over expert tensor ranks is not counted.
    """
    e = shape.experts
    if e is None:
        return 0
    away = 1 - 1 / parallel.expert
    return 2 * len(e.layers) * e.per_token * shape.hidden_size * item * away
