"""Muon of a transformers model, written from arXiv 2502.16982, in the model's own precision."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

MOMENTUM = 0.95
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Of five Newton-Schulz steps, Megatron's default ("quintic")."""
SIZE = 0.2
"""Root mean square of an update in units of the learning rate, as AdamW's."""


def orthogonalise(matrix: Tensor) -> Tensor:
    """Newton-Schulz: singular values of a matrix [rows, columns] to about 1."""
    x = matrix / matrix.norm()
    for a, b, c in COEFFICIENTS:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


class Muon(torch.optim.Optimizer):
    """Updates each group's parameters as one matrix, rows below rows: those that Megatron keeps together."""

    def __init__(self, groups: Sequence[Sequence[Tensor]], lr: float, weight_decay: float) -> None:
        super().__init__([{"params": list(group)} for group in groups], {"lr": lr, "decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            steps = []
            for p in group["params"]:
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.mul_(MOMENTUM).add_((1 - MOMENTUM) * p.grad)
                steps.append((1 - MOMENTUM) * p.grad + MOMENTUM * momentum)
            whole = torch.cat(steps)
            update = SIZE * max(whole.shape) ** 0.5 * orthogonalise(whole)
            for p, part in zip(group["params"], update.split([len(p) for p in group["params"]]), strict=True):
                p.mul_(1 - group["lr"] * group["decay"]).sub_(group["lr"] * part)


def split_parameters(model: PreTrainedModel) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Matrices for Muon, gate and up together, and the parameters for AdamW."""
    rest = dict(model.named_parameters())
    hidden = {n: rest.pop(n) for n in list(rest) if n.endswith("_proj.weight")}
    groups = []
    for name, matrix in hidden.items():
        if name.endswith("gate_proj.weight"):
            groups.append([matrix, hidden[name.replace("gate_proj", "up_proj")]])
        elif not name.endswith("up_proj.weight"):
            groups.append([matrix])
    return groups, list(rest.values())
