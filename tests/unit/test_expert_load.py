"""Load metrics of a mixture equal values counted by hand from the routers' choices.

Why: the metrics are the only sign of experts that receive no tokens. Not covered: that all ranks together
count each token once.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from rpg_megatron.policy.expert_load import counted_routes, counts_matrix, load_metrics
from tests.support.tiny_models import TINY_MOE


def test_metrics_of_an_even_and_an_uneven_layer() -> None:
    metrics = load_metrics(np.array([[5.0, 5.0, 5.0, 5.0], [10.0, 10.0, 0.0, 0.0]]), (1, 3))
    assert metrics == {
        "moe/load_mean": 1.5,
        "moe/load_max": 2.0,
        "moe/load_max_layer": 3.0,
        "moe/entropy_mean": pytest.approx(0.75),
        "moe/entropy_min": pytest.approx(math.log(2) / math.log(4)),
        "moe/dead_experts": 2.0,
    }
    assert load_metrics(np.zeros((2, 4)), (0, 1)) == {}


def test_choices_of_all_passes_are_counted_without_dense_layers() -> None:
    class Router(nn.Module):
        def forward(self, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return chosen.float(), chosen

    mlps = [nn.Linear(1, 1), SimpleNamespace(router=Router())]
    layers = [SimpleNamespace(mlp=mlp, layer_number=n + 1) for n, mlp in enumerate(mlps)]
    chunk = SimpleNamespace(decoder=SimpleNamespace(layers=layers))
    chosen = torch.zeros(3, 8, dtype=torch.bool)
    chosen[:, 0] = chosen[0, 7] = True
    with counted_routes([chunk]) as counts:
        mlps[1].router(chosen)
        mlps[1].router(chosen)
    mlps[1].router(chosen)  # outside the block
    assert list(counts) == [1]
    matrix = counts_matrix(counts, TINY_MOE)  # layers 1, 2 and 3 have experts
    assert matrix.tolist() == [[6, 0, 0, 0, 0, 0, 0, 2], [0] * 8, [0] * 8]
