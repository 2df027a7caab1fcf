"""From two traces of the same tokens to findings: what is wrong, where, and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch

from rpg_megatron.commands.audit.causes import LOGPROBS, Finding, explain
from rpg_megatron.commands.audit.module_check import ActivationTrace, ModuleChecker, Weights, distance
from rpg_megatron.config import ModelShape
from rpg_megatron.models.activation_sites import FINAL_NORM, LOGITS, all_sites, layer_site


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
        return cast(dict[str, Any], _finite(plain))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def diagnose(
    engine: ActivationTrace,
    trainer: ActivationTrace,
    alone: ActivationTrace,
    *,
    shape: ModelShape,
    weights: Weights,
    temperature: float,
    dtype: str,
    bounds: tuple[float, float],
    others: Mapping[str, Weights],
    device: torch.device,
    replayed: bool = False,
) -> AuditVerdict:
    """Compare an engine with the trainer on the same tokens.

    trainer: sequences packed as in training; alone: one sequence per row. weights: the trainer's, by HF
    name. temperature, dtype: as configured. bounds: largest and mean |log-prob difference| that the run's
    guard allows, nats. others: other weights that may explain a wrong parameter, by their name in messages.
    device: where to compute. replayed: whether the run replays the engine's choice of experts; the traces are
    without replay.
    """
    sides = {
        side.name: ModuleChecker(side, shape, weights, temperature, device) for side in (engine, trainer)
    }
    apart = ModuleChecker(alone, shape, weights, temperature, device)
    links = {name: _links(checker) for name, checker in sides.items()}
    broken = _broken(sides, links)
    findings = [_dtype(side, dtype) for side in (engine, trainer) if side.dtype != dtype]
    for name, checker in sides.items():
        sites = [b["site"] for b in broken if b["side"] == name]
        findings += explain(checker, sites, others, apart if name == "trainer" else None)
    gap = (engine.logp.double() - trainer.logp.double()).abs()
    logprobs = {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": float(gap.numel())}
    drift = {
        site: distance(engine.trace[site], trainer.trace[site])
        for site in sides["engine"].sites()
        if site in trainer.trace
    }
    routes = _routes(engine, trainer, shape)
    # With replay, a run never has the log-probs that follow from different choices.
    comparable = not (replayed and routes.get("changed"))
    # Written so that NaN counts as out of bounds.
    if comparable and not findings and not (logprobs["max"] <= bounds[0] and logprobs["mean"] <= bounds[1]):
        findings.append(_rounding(drift, logprobs, bounds, dtype, routes))
    return AuditVerdict(findings, broken, links, drift, logprobs, routes)


def _routes(engine: ActivationTrace, trainer: ActivationTrace, shape: ModelShape) -> dict[str, int]:
    """The counts of ``AuditVerdict.routes``."""
    experts = shape.experts
    if experts is None:
        return {}
    counts = {"choices": 0, "changed": 0, "experts": 0, "unused": 0}
    for layer in experts.layers:
        logits = [side.trace[layer_site(layer, "router")] for side in (engine, trainer)]
        chosen, others = (
            torch.zeros(x.shape, dtype=torch.bool).scatter_(1, x.topk(experts.per_token).indices, True)
            for x in logits
        )
        counts["choices"] += len(chosen)
        counts["changed"] += int((chosen != others).any(1).sum())
        counts["experts"] += experts.count
        counts["unused"] += int((~chosen.any(0)).sum())
    return counts


def _links(checker: ModuleChecker) -> dict[str, float]:
    """Error of every site, and of the log-probs, in the order of computation."""
    return {site: checker.error(site) for site in checker.sites()} | {LOGPROBS: checker.logprob_error()}


def _broken(
    sides: Mapping[str, ModuleChecker], links: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]]:
    """The sites whose error exceeds rounding, see ``AuditVerdict.broken``."""
    order = [*all_sites(sides["engine"].shape), LOGPROBS]
    broken: list[dict[str, Any]] = []
    for name, errors in links.items():
        for site, error in errors.items():
            tolerance = sides[name].tolerance(LOGITS if site == LOGPROBS else site)
            if error > tolerance:
                broken.append({"side": name, "site": site, "error": error, "tolerance": tolerance})
    return sorted(broken, key=lambda f: order.index(str(f["site"])))


def _dtype(side: ActivationTrace, dtype: str) -> Finding:
    text = f"the {side.name} computes in {side.dtype}, precision.dtype is {dtype}"
    advice = f"start it in {dtype}; look for a --dtype in engine.arguments"
    return Finding("precision", side.name, text, advice)


def _rounding(
    drift: Mapping[str, float],
    logprobs: Mapping[str, float],
    bounds: tuple[float, float],
    dtype: str,
    routes: Mapping[str, int],
) -> Finding:
    first, *_ = drift.values()
    text = (
        f"every module alone is correct, but rounding in {dtype} accumulates: engine and trainer differ by "
        f"{first:.1e} at the first layer's input and {drift[FINAL_NORM]:.1e} at the end, the log-probs by "
        f"{logprobs['mean']:.1e} nats on average, {logprobs['max']:.1e} at most (bounds {bounds[1]:.0e}, "
        f"{bounds[0]:.0e})"
    )
    advice = "use precision.dtype=float32, or raise guards.mismatch_mean and .mismatch_max and set correction"
    if routes.get("changed"):
        text += f"; rounding changes {routes['changed']} of {routes['choices']} choices of experts"
        advice = f"set training.router_replay=rollout; or {advice}"
    return Finding("precision", "engine", text, advice)
