"""The usual causes of modules whose values do not match their inputs.

Each cause is tried on the reference: other weights, another model shape, other positions, another
temperature. The one that reproduces the side's values within rounding is reported. If none does, the finding
says by how much the values are off. What the checksums of a weight sync exclude, such as permuted rows, is
not tried.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch

from rpg_megatron.commands.audit.module_check import (
    ModuleChecker,
    Weights,
    distance,
    minimise,
    routing_weights,
    undecided,
)
from rpg_megatron.models.activation_sites import (
    LOGITS,
    NORMS,
    layer_site,
    parameter_of,
    parameters_of,
    split_site,
)

LOGPROBS = "logprobs"
"""Name of the last step, from logits to log-probs."""
_MATRICES = ("query", "key", "value", "attention_output", "gate", "up", "mlp_output", "experts")
_FEW = 3  # of a layer, more wrong parameters than these are called the layer
_QUANTISED = 0.3  # largest error that quantised weights explain
_FIT_POSITIONS = 64  # fit the RoPE base to earlier positions: angles of later ones wrap too often
_BASES = (10.0, 1e9, 320)  # lowest, highest, points of the first grid
_WEIGHTS_ADVICE = {
    "engine": "the engine does not serve the trainer's weights: sync it again; if that does not help, check "
    "the mapping in models/, or what loads this engine",
    "trainer": "the trainer's exported weights do not give this output: check the model's configuration "
    "(policy/model.py) and the mapping in models/",
}
_ADVICE = {
    "precision": "keep one dtype from trainer to engine: look for --dtype and --quantization in "
    "engine.arguments; a quantised engine needs correction and wider guards",
    "routing": "compare norm_topk_prob and num_experts_per_tok of both sides",
    "packing": "sequences of a pack must not affect each other: check cu_seqlens, position ids and the mask",
}


@dataclass
class Finding:
    """One problem."""

    kind: str
    """weights, layer, routing, rope, packing, attention, temperature, vocabulary, precision, other."""
    side: str
    """engine or trainer: the side whose value does not match its own earlier values."""
    text: str
    """What is wrong and where."""
    advice: str
    layers: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    """Hugging Face names."""
    values: dict[str, float] = field(default_factory=dict)
    """Measured values: a factor, a base, a temperature."""


def explain(
    checker: ModuleChecker,
    broken: Sequence[str],
    others: Mapping[str, Weights],
    alone: ModuleChecker | None = None,
) -> list[Finding]:
    """Explain the broken sites of one side, given in the order of computation.

    others: other weights that the side may have, by their name in messages. alone: the trainer's checker with
    one sequence per row; a site that is right there is wrong only when packed.
    """
    causes = _Causes(checker, others, alone)
    with_weights = [s for s in broken if s != LOGPROBS and parameters_of(s, checker.shape)]
    without = [s for s in broken if s not in with_weights]
    return causes.of_weights(with_weights) + causes.of_operations(without)


class _Causes:
    """Tests which cause explains the broken sites of one side."""

    def __init__(self, checker: ModuleChecker, others: Mapping[str, Weights], alone: ModuleChecker | None):
        self._checker, self._others, self._alone = checker, others, alone
        self._side, self._shape = checker.side.name, checker.shape

    def _finding(self, kind: str, text: str, advice: str, sites: Sequence[str], **values: float) -> Finding:
        names = [name for s in sites if s != LOGPROBS for name in parameters_of(s, self._shape)]
        return Finding(kind, self._side, text, advice, layers_of(sites), names, values)

    def _explains(self, sites: Sequence[str], hypothesis: ModuleChecker) -> bool:
        return all(hypothesis.error(s) <= self._checker.tolerance(s) for s in sites)

    # -- weights -------------------------------------------------------------------------------------------

    def of_weights(self, sites: Sequence[str]) -> list[Finding]:
        """Causes of wrong outputs of modules with parameters."""
        if not sites:
            return []
        if common := self._replaced(sites) or self._quantised(sites):
            return [common]
        findings, unknown, by_layer = [], [], defaultdict(list)
        for site in sites:
            by_layer[split_site(site)[0]].append(site)
        for group in by_layer.values():
            if common := self._replaced(group):
                findings.append(common)
                continue
            scaled = {s: finding for s in group if (finding := self._scaled(s))}
            findings += scaled.values()
            rest = [s for s in group if s not in scaled]
            if len(rest) > _FEW:
                unknown += rest
            elif rest:
                findings.append(self._unknown(rest))
        return findings + ([self._unknown(unknown)] if unknown else [])

    def _weights_finding(self, fault: str, sites: Sequence[str], kind: str = "", **values: float) -> Finding:
        """fault: end of a message that begins with the layers or, if there are few sites, the parameters."""
        layers = layers_of(sites)
        whole = len(sites) > _FEW * max(len(layers), 1)
        if whole:
            subject, plural = f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}", len(layers) > 1
        else:
            names = [parameter_of(s, self._shape.tied_embeddings) or _experts_of(s) for s in sites]
            subject = ", ".join(names[:_FEW])
            subject += f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
            plural = len(names) > 1
        text = f"{subject} of the {self._side} {'are' if plural else 'is'} {fault}"
        kind = kind or ("layer" if whole else "weights")
        return self._finding(kind, text, _ADVICE.get(kind, _WEIGHTS_ADVICE[self._side]), sites, **values)

    def _replaced(self, sites: Sequence[str]) -> Finding | None:
        """Other weights, or another use of the experts, that explain all of the sites."""
        for kind, fault, reference in self._references(layers_of(sites)):
            if self._explains(sites, reference):
                return self._weights_finding(fault, sites, kind)
        return None

    def _references(self, layers: Sequence[int]) -> Iterator[tuple[str, str, ModuleChecker]]:
        """References that a side may follow instead: kind of the finding, end of its message, reference."""
        checker, original, shape = self._checker, self._checker.weights, self._shape
        if checker.side.dtype != "bfloat16":
            rounded = replace(checker, weights=lambda name: original(name).bfloat16())
            yield "precision", "right with weights that are rounded to bfloat16", rounded
        for label, weights in self._others.items():
            yield "", f"stale: the weights are those of {label}", replace(checker, weights=weights)
        for other in range(shape.num_layers) if len(layers) == 1 else ():
            if other != layers[0] and shape.has_experts(other) == shape.has_experts(layers[0]):
                moved = replace(checker, weights=_swapped_layer(original, layers[0], other))
                yield "", f"misplaced: the weights are those of layer {other}", moved
        if (experts := shape.experts) is not None:
            changed = replace(experts, normalised=not experts.normalised)
            fault = f"right with expert weights that {'do not ' if experts.normalised else ''}sum to 1"
            yield "routing", fault, replace(checker, shape=replace(shape, experts=changed))
            for n in range(1, min(experts.count, 2 * experts.per_token) + 1):
                changed = replace(experts, per_token=n)
                fault = f"right with {n} experts per token instead of {experts.per_token}"
                yield "routing", fault, replace(checker, shape=replace(shape, experts=changed))

    def _quantised(self, sites: Sequence[str]) -> Finding | None:
        """Quantised weights: every matrix of every layer is slightly off, but no norm."""
        parts = {s: split_site(s)[1] for s in self._checker.sites()}
        errors = [self._checker.error(s) for s in sites]
        all_matrices = {s for s, part in parts.items() if part in _MATRICES} <= set(sites)
        if not all_matrices or any(parts[s] in NORMS for s in sites) or max(errors) > _QUANTISED:
            return None
        fault = f"off by {min(errors):.1%} to {max(errors):.1%} in all matrices but no norm, as if quantised"
        return self._weights_finding(fault, sites, "precision")

    def _scaled(self, site: str) -> Finding | None:
        """A constant factor, up to the rounding of scaled weights."""
        checker = self._checker
        actual, expected, error = checker.found(site), checker.expected(site), checker.error(site)
        factor = ((actual * expected).sum() / expected.square().sum()).item()
        limit = checker.tolerance(site) + checker.weight_rounding(site)
        if not checker.error(site, factor * expected) <= min(limit, error * 2 / 3):
            return None
        fault = f"{abs(factor - 1):.1%} too {'large' if factor > 1 else 'small'}"
        return self._weights_finding(fault, [site], factor=factor)

    def _unknown(self, sites: Sequence[str]) -> Finding:
        error = max(self._checker.error(s) for s in sites)
        if len(sites) > 1:
            fault = f"{len(sites)} outputs are off, by up to {error:.1%}"
        else:
            fault = f"the output is off by {error:.1%}"
            if sites[0].endswith(".experts") and (experts := self._wrong_experts(sites[0])):
                fault += f", for every token with a large weight of expert {ranges(experts)}"
        return self._weights_finding(f"wrong: {fault}", sites, error=error)

    def _wrong_experts(self, site: str) -> list[int]:
        """Experts such that all tokens that give them at least an average weight have a wrong output.

        Not those whose tokens all choose another such expert too.
        """
        checker, experts, layer = self._checker, self._shape.experts, split_site(site)[0]
        assert experts is not None
        assert layer is not None
        actual, expected = checker.found(site), checker.expected(site)
        right = (actual - expected).norm(dim=1) <= checker.tolerance(site) * expected.norm(dim=1)
        logits = checker.found(layer_site(layer, "router"))
        weights = routing_weights(logits, experts)
        large = (weights > 0) & (weights >= weights.sum(1, keepdim=True) / experts.per_token)
        large &= ~undecided(logits, experts)[:, None]
        wrong = large.any(0) & ~(large & right[:, None]).any(0)
        named = []
        for e in large.sum(0).argsort(descending=True).tolist():
            if wrong[e] and large[:, e].any():
                named.append(e)
                large &= (weights[:, e] == 0)[:, None]
        return sorted(named)

    # -- operations without parameters ---------------------------------------------------------------------

    def of_operations(self, sites: Sequence[str]) -> list[Finding]:
        """One finding for each kind of operation, for all layers together."""
        by_part: dict[str, list[str]] = defaultdict(list)
        for site in sites:
            part = split_site(site)[1]
            by_part["rope" if part.endswith("_rope") else part].append(site)
        findings = []
        explainers = {"rope": self._rope, LOGPROBS: self._logprobs}
        for part, group in by_part.items():
            finding = explainers.get(part, self._other)(group)
            if self._alone is not None and part != LOGPROBS and self._explains(group, self._alone):
                text = f"{finding.text}; only when packed: each sequence alone is right"
                finding = replace(finding, kind="packing", text=text, advice=_ADVICE["packing"])
            findings.append(finding)
        return findings

    def _other(self, sites: Sequence[str]) -> Finding:
        part, layers = split_site(sites[0])[1], layers_of(sites)
        where = f" in layers {ranges(layers)}" if layers else ""
        error = max(self._checker.error(s) for s in sites)
        text = f"{part}{where} of the {self._side} does not match its inputs, it is off by {error:.1%}"
        if part == "attention":
            advice = "check mask, softmax scale, the engine's attention backend and its KV cache's dtype"
            return self._finding("attention", text, advice, sites)
        advice = "a custom kernel or a quantised engine computes a different function here"
        return self._finding("other", text, advice, sites)

    def _rope(self, sites: Sequence[str]) -> Finding:
        checker, site, theta = self._checker, sites[0], self._shape.rope_theta
        side, where = self._side, f"layers {ranges(layers_of(sites))}"
        if starts := self._starts(site):
            listed = ", ".join(f"{s:+d}" for s in starts)
            text = f"positions are wrong in the {side}, {where}: its sequences start at {listed}, not at 0"
            return self._finding("rope", text, "check how position ids are computed", sites)
        near = checker.side.positions < _FIT_POSITIONS

        def error(base: float) -> float:
            other = replace(checker, shape=replace(self._shape, rope_theta=base))
            return distance(checker.found(site)[near], other.expected(site)[near])

        base, rest = minimise(error, *_BASES)
        if rest <= 4 * checker.tolerance(site):
            text = f"the {side} rotates positions with base {base:,.6g}, configured is {theta:,.6g}, {where}"
            advice = f"rope_theta is {theta:,.6g} in config.json of model.path; check what the {side} reads"
            return self._finding("rope", text, advice, sites, base=base)
        text = (
            f"the {side} rotates positions differently than config.json says, {where}; no base and no shift "
            "explains it"
        )
        return self._finding(
            "rope", text, "compare rope_theta, rope scaling and head_dim of both sides", sites
        )

    def _starts(self, site: str) -> list[int] | None:
        """The start positions that explain each sequence's rotation; None if there are none, or all are 0."""
        checker, lengths = self._checker, self._checker.side.lengths
        actual, total = checker.found(site).split(lengths), sum(lengths)
        in_pack = torch.tensor([0, *lengths[:-1]]).cumsum(0).tolist()
        starts: dict[int, int] = {}
        for start in (*in_pack, 1, -1, *range(2, min(total, 64))):
            moved = replace(checker, starts=[start] * len(lengths)).expected(site).split(lengths)
            for i, values in enumerate(actual):
                if distance(values, moved[i]) <= checker.tolerance(site) + 2.4e-7 * total:
                    starts.setdefault(i, start)
        if len(starts) < len(lengths) or not any(starts.values()):
            return None
        return [starts[i] for i in range(len(lengths))]

    def _logprobs(self, sites: Sequence[str]) -> Finding:
        checker, side = self._checker, self._side
        tolerance, (temperature, _) = checker.tolerance(LOGITS), checker.fitted_temperature
        if checker.logprob_error(checker.logprobs(temperature)) <= tolerance:
            text = (
                f"the {side}'s log-probs are those of temperature {temperature:.4g}, configured is "
                f"{checker.temperature:.4g}; hidden states and logits are right"
            )
            advice = (
                "trainer and engine must use rollout.temperature, and the engine --logprobs-mode "
                "processed_logprobs (check engine.arguments)"
            )
            return self._finding("temperature", text, advice, sites, temperature=temperature)
        # A column whose logit is 0 adds 1 to the sum of the softmax.
        logits = checker.logits / checker.temperature
        picked = logits.gather(1, checker.side.sampled.to(logits.device)[:, None])[:, 0]
        surplus = (picked - checker.logp()).exp() - logits.logsumexp(1).exp()
        columns = statistics.median(surplus.tolist())
        if columns > 0.5 and checker.logprob_error(checker.logprobs(padding=columns)) <= tolerance:
            text = (
                f"vocabulary padding: the {side}'s softmax counts about {columns:.0f} columns beyond the "
                f"vocabulary of {self._shape.vocab_size}"
            )
            advice = "columns that pad the vocabulary must be -inf before the softmax"
            return self._finding("vocabulary", text, advice, sites, columns=columns)
        off = (checker.logp() - checker.logprobs()).abs().max().item()
        text = (
            f"the {side}'s log-probs do not match its logits (off by up to {off:.2g} nats); no temperature "
            "and no padding explains it"
        )
        advice = "check what changes logits before sampling: top-k, top-p, penalties, logits processors"
        return self._finding("other", text, advice, sites)


def _swapped_layer(weights: Weights, layer: int, other: int) -> Weights:
    """The weights with those of another layer in place of a layer's own."""
    return lambda name: weights(name.replace(f"model.layers.{layer}.", f"model.layers.{other}."))


def _experts_of(site: str) -> str:
    return f"model.{site.replace('experts', 'mlp.experts')}"


def layers_of(sites: Sequence[str]) -> list[int]:
    """Layers of the sites, ascending."""
    return sorted({layer for layer, _ in map(split_site, sites) if layer is not None})


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: 0-3, 7."""
    parts: list[list[int]] = [[numbers[0]]] if numbers else []
    for a, b in pairwise(numbers):
        if b == a + 1:
            parts[-1].append(b)
        else:
            parts.append([b])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
