"""From two traces of the same tokens to findings: what is wrong, where, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from rpg_megatron.checkpoints.parameter_readers import Weights
from rpg_megatron.commands.audit.causes import LOGPROBS, Finding, explain
from rpg_megatron.commands.audit.module_check import ActivationTrace, ModuleChecker, distance
from rpg_megatron.config import ModelShape
from rpg_megatron.models.activation_sites import FINAL_NORM, all_sites, layer_site


@dataclass
class AuditVerdict:
    """What an audit found. Clean if there are no findings."""

    findings: list[Finding]
    broken: list[dict[str, Any]]
    """Sites that do not match their inputs, in the order of computation: side, site, error, tolerance."""
    links: dict[str, dict[str, float]]
    """Error of each site against its own side's earlier values, by side and site."""
    drift: dict[str, float]
    """Relative difference of engine and trainer, by site, accumulated errors included."""
    logprobs: dict[str, float]
    """|engine - trainer| of the sampled tokens: mean and max, nats."""
    routes: dict[str, int]
    """Mixtures of experts: number of ``choices``, one for each token and layer, and of those that differ
    between engine and trainer (``changed``); number of ``experts`` in all layers, and of those that no token
    chose in the engine (``unused``). Empty for dense models.
    """

    @property
    def clean(self) -> bool:
        """Whether engine and trainer compute the same."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON; None for numbers that are not finite."""
        plain = {"clean": self.clean, "first": self.broken[0] if self.broken else None} | asdict(self)
        return cast(dict[str, Any], json.loads(json.dumps(plain), parse_constant=lambda _: None))


@dataclass(frozen=True)
class Expected:
    """What both sides should compute with."""

    shape: ModelShape
    weights: Weights
    """The trainer's, by HF name."""
    temperature: float
    dtype: str
    """``precision.dtype``."""
    bounds: tuple[float, float]
    """Largest and mean |log-prob difference| that the run's guard allows, nats."""
    others: Mapping[str, Weights]
    """Other weights that may explain a wrong parameter, by their name in messages."""
    device: torch.device
    """Where to compute."""
    replayed: bool = False
    """Whether the run replays the engine's choice of experts; the traces are without replay."""


def diagnose(
    engine: ActivationTrace, trainer: ActivationTrace, alone: ActivationTrace, expected: Expected
) -> AuditVerdict:
    """Compare an engine with the trainer on the same tokens.

    trainer: sequences packed as in training; alone: one sequence per row.
    """
    engine_checker, trainer_checker, apart = (
        ModuleChecker(side, expected.shape, expected.weights, expected.temperature, expected.device)
        for side in (engine, trainer, alone)
    )
    sides = {"engine": engine_checker, "trainer": trainer_checker}
    links = {
        name: {s: checker.error(s) for s in checker.sites()} | {LOGPROBS: checker.logprob_error()}
        for name, checker in sides.items()
    }
    broken = _broken(sides, links)
    dtype, bounds = expected.dtype, expected.bounds
    findings: list[Finding] = []
    for name, checker in sides.items():
        if (actual := checker.side.dtype) != dtype:
            text = f"the {name} computes in {actual}, precision.dtype is {dtype}"
            advice = f"start it in {dtype}; look for a --dtype in engine.arguments"
            findings.append(Finding("precision", name, text, advice))
    for name, checker in sides.items():
        sites = [b["site"] for b in broken if b["side"] == name]
        findings += explain(checker, sites, expected.others, apart if name == "trainer" else None)
    gap = (engine.logp.double() - trainer.logp.double()).abs()
    logprobs = {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": float(gap.numel())}
    drift = {
        site: distance(engine.trace[site], trainer.trace[site])
        for site in engine_checker.sites()
        if site in trainer.trace
    }
    routes = _routes(engine, trainer, expected.shape)
    # With replay, a run never has the log-probs that follow from different choices.
    comparable = not (expected.replayed and routes.get("changed"))
    # Written so that NaN counts as out of bounds.
    if comparable and not findings and not (logprobs["max"] <= bounds[0] and logprobs["mean"] <= bounds[1]):
        findings.append(_rounding(drift, logprobs, routes, expected))
    return AuditVerdict(findings, broken, links, drift, logprobs, routes)


def _routes(engine: ActivationTrace, trainer: ActivationTrace, shape: ModelShape) -> dict[str, int]:
    """The counts of ``AuditVerdict.routes``."""
    experts = shape.experts
    if experts is None:
        return {}
    counts = {"choices": 0, "changed": 0, "experts": 0, "unused": 0}
    for layer in experts.layers:
        logits = [side.trace[layer_site(layer, "router")] for side in (engine, trainer)]
        chosen, others = (x.topk(experts.per_token).indices.sort(1).values for x in logits)
        counts["choices"] += len(chosen)
        counts["changed"] += int((chosen != others).any(1).sum())
        counts["experts"] += experts.count
        counts["unused"] += experts.count - chosen.unique().numel()
    return counts


def _broken(
    sides: Mapping[str, ModuleChecker], links: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """The sites whose error exceeds rounding, see ``AuditVerdict.broken``."""
    broken: list[dict[str, Any]] = [
        {"side": name, "site": site, "error": error, "tolerance": tolerance}
        for name, errors in links.items()
        for site, error in errors.items()
        if error > (tolerance := sides[name].tolerance(site))
    ]
    order = [*all_sites(sides["engine"].shape), LOGPROBS]
    return sorted(broken, key=lambda place: order.index(place["site"]))


def _rounding(
    drift: Mapping[str, float], logprobs: Mapping[str, float], routes: Mapping[str, int], expected: Expected
) -> Finding:
    first, *_ = drift.values()
    text = (
        f"every module alone is correct, but rounding in {expected.dtype} accumulates: engine and trainer "
        f"differ by {first:.1e} at the first layer's input and {drift[FINAL_NORM]:.1e} at the end, the "
        f"log-probs by {logprobs['mean']:.1e} nats on average, {logprobs['max']:.1e} at most (bounds "
        f"{expected.bounds[1]:.0e}, {expected.bounds[0]:.0e})"
    )
    advice = "use precision.dtype=float32, or raise guards.mismatch_mean and .mismatch_max and set correction"
    if routes.get("changed"):
        text += f"; rounding changes {routes['changed']} of {routes['choices']} choices of experts"
        advice = f"set training.router_replay=rollout; or {advice}"
    return Finding("precision", "engine", text, advice)
