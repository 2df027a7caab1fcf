"""The usual causes of modules whose values do not match their inputs.

Each cause is tried on the reference: other weights, another model shape, another temperature. The one that
reproduces the side's values within rounding is reported. If none does, the finding says by how much the
values are off. What the checksums of a weight sync exclude, such as permuted rows, is not tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from rpg_megatron.checkpoints.parameter_readers import Weights
from rpg_megatron.commands.audit.module_check import ModuleChecker
from rpg_megatron.models.activation_sites import LOGITS, NORMS, parameter_of, parameters_of, split_site
from rpg_megatron.system.terminal import ranges

LOGPROBS = "logprobs"
"""Name of the last step, from logits to log-probs."""
_MATRICES = ("query", "key", "value", "attention_output", "gate", "up", "mlp_output", "experts")
_FEW = 3  # of a layer, more wrong parameters than these are called the layer
_QUANTISED = 0.3  # largest error that quantised weights explain
_WEIGHTS_ADVICE = {
    "engine": "the engine does not serve the trainer's weights: sync it again; if that does not help, check "
    "the mapping in models/, or what loads this engine",
    "trainer": "the trainer's exported weights do not give this output: check the model's configuration "
    "(policy/model.py) and the mapping in models/",
}
_ADVICE = {
    "precision": "keep one dtype from trainer to engine: look for --dtype and --quantization in "
    "engine.arguments; a quantised engine needs correction and wider guards",
    "packing": "sequences of a pack must not affect each other: check cu_seqlens, position ids and the mask",
    "attention": "check mask, softmax scale, the engine's attention backend and its KV cache's dtype",
    "rope": "compare rope_theta, rope scaling, head_dim and the position ids of both sides",
    "temperature": "trainer and engine must use rollout.temperature, and the engine --logprobs-mode "
    "processed_logprobs (check engine.arguments)",
    LOGPROBS: "check what changes logits before sampling, such as top-k, top-p, penalties and logits "
    "processors, and that columns that pad the vocabulary are -inf before the softmax",
    "other": "a custom kernel or a quantised engine computes a different function here",
}


@dataclass
class Finding:
    """One problem."""

    kind: str
    """weights, layer, rope, packing, attention, temperature, precision, other."""
    side: str
    """engine or trainer: the side whose value does not match its own earlier values."""
    text: str
    """What is wrong and where."""
    advice: str
    layers: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    """Hugging Face names."""
    values: dict[str, float] = field(default_factory=dict)
    """Measured values: a factor, an error, a temperature."""


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
    by_part: dict[str, list[str]] = defaultdict(list)
    for site in broken:
        if site not in with_weights:
            part = split_site(site)[1]
            by_part["rope" if part.endswith("_rope") else part].append(site)
    return causes.of_weights(with_weights) + [causes.of_operation(*group) for group in by_part.items()]


class _Causes:
    """Tests which cause explains the broken sites of one side."""

    def __init__(self, checker: ModuleChecker, others: Mapping[str, Weights], alone: ModuleChecker | None):
        self._checker, self._others, self._alone = checker, others, alone
        self._side, self._shape = checker.side.name, checker.shape

    def of_weights(self, sites: Sequence[str]) -> list[Finding]:
        """Causes of wrong outputs of modules with parameters."""
        if not sites:
            return []
        if common := self._replaced(sites) or self._quantised(sites):
            return [common]
        findings: list[Finding] = []
        unknown: list[str] = []
        for _, of_layer in groupby(sites, lambda site: split_site(site)[0]):
            group = list(of_layer)
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

    def of_operation(self, part: str, sites: Sequence[str]) -> Finding:
        """The cause of wrong outputs of an operation without parameters, in all layers."""
        if part == LOGPROBS:
            return self._logprobs()
        layers, error = layers_of(sites), max(self._checker.error(s) for s in sites)
        kind = part if part in ("rope", "attention") else "other"
        where = f" in layers {ranges(layers)}" if layers else ""
        text = f"{part}{where} of the {self._side} does not match its inputs, it is off by {error:.1%}"
        if self._alone is not None and self._explains(sites, self._alone):
            kind, text = "packing", f"{text}; only when packed: each sequence alone is right"
        return self._finding(kind, text, sites, error=error)

    def _finding(self, kind: str, text: str, sites: Sequence[str], **values: float) -> Finding:
        names = [name for s in sites for name in parameters_of(s, self._shape)]
        advice = _ADVICE.get(kind, _WEIGHTS_ADVICE[self._side])
        return Finding(kind, self._side, text, advice, layers_of(sites), names, values)

    def _weights_finding(self, fault: str, sites: Sequence[str], kind: str = "", **values: float) -> Finding:
        """fault: end of a message that begins with the layers or, if there are few sites, the parameters."""
        layers = layers_of(sites)
        whole = len(sites) > _FEW * max(len(layers), 1)
        if whole:
            count, subject = len(layers), f"layer{'s' if len(layers) > 1 else ''} {ranges(layers)}"
        else:
            tied = self._shape.tied_embeddings
            names = [parameter_of(s, tied) or f"model.{s.replace('experts', 'mlp.experts')}" for s in sites]
            count, subject = len(names), ", ".join(names[:_FEW])
            subject += f" and {count - _FEW} more" if count > _FEW else ""
        text = f"{subject} of the {self._side} {'are' if count > 1 else 'is'} {fault}"
        return self._finding(kind or ("layer" if whole else "weights"), text, sites, **values)

    def _explains(self, sites: Sequence[str], hypothesis: ModuleChecker) -> bool:
        return all(hypothesis.error(s) <= self._checker.tolerance(s) for s in sites)

    def _replaced(self, sites: Sequence[str]) -> Finding | None:
        """Other weights that explain all of the sites: rounded, of a checkpoint, or of another layer."""
        checker, shape, layers = self._checker, self._shape, layers_of(sites)
        other_weights: list[tuple[str, Weights, str]] = []
        if checker.side.dtype != "bfloat16":
            fault = "right with weights that are rounded to bfloat16"
            other_weights.append((fault, lambda name: checker.weights(name).bfloat16(), "precision"))
        for label, weights in self._others.items():
            other_weights.append((f"stale: the weights are those of {label}", weights, ""))
        for other in range(shape.num_layers) if len(layers) == 1 else ():
            if other != layers[0] and shape.has_experts(other) == shape.has_experts(layers[0]):
                fault = f"misplaced: the weights are those of layer {other}"
                other_weights.append((fault, _swapped_layer(checker.weights, layers[0], other), ""))
        for fault, weights, kind in other_weights:
            if self._explains(sites, replace(checker, weights=weights)):
                return self._weights_finding(fault, sites, kind)
        return None

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
        outputs = f"{len(sites)} outputs are off, by up to" if len(sites) > 1 else "the output is off by"
        return self._weights_finding(f"wrong: {outputs} {error:.1%}", sites, error=error)

    def _logprobs(self) -> Finding:
        checker, side, (temperature, _) = self._checker, self._side, self._checker.fitted_temperature
        if checker.logprob_error(checker.logprobs(temperature)) <= checker.tolerance(LOGITS):
            text = (
                f"the {side}'s log-probs are those of temperature {temperature:.4g}, configured is "
                f"{checker.temperature:.4g}; hidden states and logits are right"
            )
            return self._finding("temperature", text, (), temperature=temperature)
        off = (checker.logp() - checker.logprobs()).abs().max().item()
        text = (
            f"the {side}'s log-probs do not match its logits (off by up to {off:.2g} nats) at any temperature"
        )
        return replace(self._finding("other", text, ()), advice=_ADVICE[LOGPROBS])


def _swapped_layer(weights: Weights, layer: int, other: int) -> Weights:
    return lambda name: weights(name.replace(f"model.layers.{layer}.", f"model.layers.{other}."))


def layers_of(sites: Sequence[str]) -> list[int]:
    """Layers of the sites, ascending."""
    return sorted({layer for layer, _ in map(split_site, sites) if layer is not None})
