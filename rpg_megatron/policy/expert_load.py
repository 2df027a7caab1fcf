"""Load balance of a mixture of experts: how evenly routers distribute tokens over experts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from rpg_megatron.config.model_shape import ModelShape

Counts = dict[int, torch.Tensor]
"""Layer, counted from 0 -> tokens routed to each of its experts: [experts], int64."""


def in_backward() -> bool:
    """Whether the calling code runs in a backward pass: a layer is recomputed."""
    return torch._C._current_graph_task_id() != -1


def layers_with_experts(chunks: Iterable[nn.Module]) -> Iterator[tuple[int, Any]]:
    """This rank's layers with experts, each with its index in the whole model, counted from 0."""
    for chunk in chunks:
        decoder: Any = chunk.decoder
        for layer in decoder.layers:
            if hasattr(layer.mlp, "router"):
                yield layer.layer_number - 1, layer  # Megatron counts from 1


@contextmanager
def counted_routes(chunks: Iterable[nn.Module]) -> Iterator[Counts]:
    """Count the tokens routed to each expert by this rank, in forward passes within the block.

    Recomputed layers do not count again.
    A rank routes only its own tokens, so the sum over all ranks counts each token once, including padding.
    """
    counts: Counts = {}
    handles = [
        layer.mlp.router.register_forward_hook(_counter(counts, index))
        for index, layer in layers_with_experts(chunks)
    ]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def _counter(counts: Counts, layer: int) -> Any:
    def count(router: nn.Module, args: Any, out: Any) -> None:
        if in_backward():
            return
        chosen = out[1].detach().sum(0)  # routing map: [tokens, experts], bool
        counts[layer] = counts[layer] + chosen if layer in counts else chosen

    return count


def counts_matrix(counts: Counts, shape: ModelShape) -> NDArray[np.float64]:
    """The counts of this rank, 0 for layers of other stages: float64 [layers with experts, experts]."""
    e = shape.experts
    assert e is not None
    matrix = np.zeros((len(e.layers), e.count))
    local_rows = [row for row, layer in enumerate(e.layers) if layer in counts]
    if local_rows:  # one copy from the device, not one per layer
        matrix[local_rows] = torch.stack([counts[e.layers[row]] for row in local_rows]).cpu().numpy()
    return matrix


def load_metrics(counts: NDArray[np.float64], layers: tuple[int, ...]) -> dict[str, float]:
    """Metrics of a step. counts: sums over all ranks, [layers with experts, experts]; layers: their indices.

    ``moe/load_*``: tokens of the busiest expert of a layer relative to the mean, 1 if all are equal.
    ``moe/entropy_*``: entropy of the tokens' distribution over experts, relative to the maximum: 0 to 1.
    ``moe/dead_experts``: number of experts without a token, in all layers. Empty if nothing was routed.
    """
    totals = counts.sum(1)
    if not totals.all():
        return {}
    shares = counts / totals[:, None]
    loads = shares.max(1) * counts.shape[1]
    logs = np.log(shares, where=shares > 0, out=np.zeros_like(shares))
    entropies = -(shares * logs).sum(1) / math.log(max(2, counts.shape[1]))
    return {
        "moe/load_mean": float(loads.mean()),
        "moe/load_max": float(loads.max()),
        "moe/load_max_layer": float(layers[int(loads.argmax())]),
        "moe/entropy_mean": float(entropies.mean()),
        "moe/entropy_min": float(entropies.min()),
        "moe/dead_experts": float((counts == 0).sum()),
    }
