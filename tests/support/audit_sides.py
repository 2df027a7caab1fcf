"""Sides for the audit's arithmetic: traces made by its own checker, from right or faulty weights."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rpg_megatron.commands.audit.causes import Finding
from rpg_megatron.commands.audit.module_check import ActivationTrace, ModuleChecker
from rpg_megatron.commands.audit.verdict import AuditVerdict, Expected, diagnose
from rpg_megatron.config import ModelShape
from rpg_megatron.models.activation_sites import all_sites
from rpg_megatron.models.registry import mapping_for
from tests.support.tiny_models import random_state_dict

Weights = dict[str, torch.Tensor]
LENGTHS = [9, 14, 5]


def weights_of(shape: ModelShape, seed: int = 0) -> Weights:
    """Random weights that keep activations near 1; norms that are not all ones."""
    weights = random_state_dict(mapping_for(shape), seed=seed)
    return {n: 1 + 0.1 * w if w.dim() == 1 and "norm" in n else 0.25 * w for n, w in weights.items()}


def make_side(
    shape: ModelShape,
    weights: Weights,
    name: str = "engine",
    *,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float32,
    spoil: Callable[[str, ModuleChecker, torch.Tensor], torch.Tensor] = lambda site, checker, values: values,
) -> ActivationTrace:
    """A side that computes with these weights and rounds every value; ``spoil`` changes a module's."""
    g = torch.Generator().manual_seed(3)
    total = sum(LENGTHS)
    tokens = torch.randint(shape.vocab_size, (total,), generator=g)
    predicts = torch.cat([torch.arange(n) >= n // 2 for n in LENGTHS])
    sampled = torch.randint(shape.vocab_size, (int(predicts.sum()),), generator=g)
    side = ActivationTrace(name, {}, tokens, LENGTHS, predicts, sampled, torch.zeros(0), str(dtype)[6:])
    checker = ModuleChecker(side, shape, lambda n: weights[n], temperature)
    for site in all_sites(shape):
        side.trace[site] = spoil(site, checker, checker.expected(site)).to(dtype)
    side.logp = checker.logprobs().float()
    return side


def verdict_of(
    shape: ModelShape,
    weights: Weights,
    engine: ActivationTrace,
    *,
    trainer: ActivationTrace | None = None,
    others: dict[str, Weights] | None = None,
    dtype: str = "float32",
    bounds: tuple[float, float] = (1e-3, 1e-4),
    replayed: bool = False,
) -> AuditVerdict:
    expected = Expected(
        shape,
        lambda n: weights[n],
        temperature=1.0,
        dtype=dtype,
        bounds=bounds,
        others={name: w.__getitem__ for name, w in (others or {}).items()},
        device=torch.device("cpu"),
        replayed=replayed,
    )
    alone = make_side(shape, weights, "trainer", dtype=getattr(torch, dtype))
    return diagnose(engine, trainer or alone, alone, expected)


def only(verdict: AuditVerdict) -> Finding:
    assert len(verdict.findings) == 1, verdict.findings
    return verdict.findings[0]
