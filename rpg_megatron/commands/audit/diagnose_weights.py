"""Explains parameters of one side that differ from the trainer's.

Tests hypotheses on the reference: a scaled norm, another checkpoint's weights, permuted query groups. The one
that reproduces a module's output is its explanation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from rpg_megatron.commands.audit.diagnose_experts import explain_experts, explain_router, wrong_columns
from rpg_megatron.commands.audit.finding import Finding, layers_of, ranges
from rpg_megatron.commands.audit.module_check import CHANNEL_TOLERANCE, ModuleChecker, Weights, distance
from rpg_megatron.models.activation_sites import NORMS, layer_site, parameter_of, parameters_of, split_site

_MATRICES = ("query", "key", "value", "attention_output", "gate", "up", "mlp_output", "experts")


def explain_weights(
    checker: ModuleChecker, broken: Sequence[str], others: Mapping[str, Weights]
) -> list[Finding]:
    """Explain broken sites that have a parameter, given in the order of computation.

    others: other weights that the side may have, by their name in messages.
    """
    return _WeightDiagnosis(checker, others).findings(broken) if broken else []


class _WeightDiagnosis:
    """Tests which other parameters explain one side's broken sites."""

    def __init__(self, checker: ModuleChecker, others: Mapping[str, Weights]):
        self._checker, self._others = checker, others
        self._name, self._shape = checker.side.name, checker.shape
        self._advice = (
            "the engine does not serve the trainer's weights: sync it again; if that does not help, check "
            "the mapping in models/, or what loads this engine"
            if self._name == "engine"
            else "the trainer's exported weights do not give this output: check the model's "
            "configuration (policy/model.py) and the mapping in models/"
        )

    def findings(self, broken: Sequence[str]) -> list[Finding]:
        """All findings, in the order of layers; complete layers first."""
        rounded = self._explains(broken, lambda name: self._checker.weights(name).bfloat16())
        if rounded and self._checker.side.dtype != "bfloat16":
            return [
                Finding(
                    "precision",
                    self._name,
                    f"the {self._name}'s weights were rounded to bfloat16: with rounded weights all "
                    f"{len(broken)} deviating modules are right",
                    "keep one dtype from trainer to engine (precision.dtype, engine.arguments)",
                    layers=layers_of(broken),
                    parameters=self._parameters(broken),
                )
            ]
        if self._source(broken) is None and (quantised := self._quantised(broken)):
            return [quantised]
        by_layer: dict[int | None, list[str]] = defaultdict(list)
        for site in broken:
            by_layer[split_site(site)[0]].append(site)
        whole = [
            i for i, sites in by_layer.items() if i is not None and len(sites) > self._parameter_sites(i) // 2
        ]
        found = self._whole_layers(whole, [s for i in whole for s in by_layer[i]]) if whole else []
        for layer, sites in by_layer.items():
            if layer not in whole:
                found += self._single(sites)
        return found

    def _quantised(self, broken: Sequence[str]) -> Finding | None:
        """Quantised weights: every matrix of every layer is slightly off, but no norm."""
        matrices = {s for s in self._checker.sites() if split_site(s)[1] in _MATRICES}
        errors = [self._checker.error(s) for s in broken]
        if not matrices <= set(broken) or any(split_site(s)[1] in NORMS for s in broken) or max(errors) > 0.3:
            return None
        return Finding(
            "precision",
            self._name,
            f"all matrices of the {self._name} are off by {min(errors):.1%} to {max(errors):.1%}, but no "
            "norm is, as with quantised weights",
            "look for --quantization in engine.arguments; a quantised engine needs correction and wider "
            "guards",
            layers=layers_of(broken),
            parameters=self._parameters(broken),
        )

    def _whole_layers(self, layers: list[int], sites: list[str]) -> list[Finding]:
        """Layers with most of their parameters wrong."""
        what = f"layer {layers[0]}" if len(layers) == 1 else f"layers {ranges(layers)}"
        label = self._source(sites)
        if label is not None:
            text = f"{what} of the {self._name} is stale: it has the weights of {label}"
        else:
            other = self._other_layer(sites) if len(layers) == 1 else None
            text = (
                f"{what} of the {self._name} has the weights of layer {other}"
                if other is not None
                else f"{what} of the {self._name} is stale or of another model: {len(sites)} of its "
                f"parameters differ from the trainer's, first {self._parameters(sites)[0]}"
            )
        if len(layers) > 1:
            text = text.replace(" is stale", " are stale").replace("it has", "they have")
        return [
            Finding(
                "layer", self._name, text, self._advice, layers=layers, parameters=self._parameters(sites)
            )
        ]

    def _single(self, sites: list[str]) -> list[Finding]:
        """Single wrong parameters of otherwise right layers."""
        if swap := self._swapped_groups(sites):
            found, sites = [swap[0]], [s for s in sites if s not in swap[1]]
        else:
            found = []
        for site in sites:
            layer, part = split_site(site)
            if part == "experts":
                found += explain_experts(self._checker, site, self._others, self._advice)
                continue
            text, values = self._explain_parameter(site)
            found.append(
                Finding(
                    "weights",
                    self._name,
                    text,
                    self._advice,
                    layers=[] if layer is None else [layer],
                    parameters=self._parameters([site]),
                    values=values,
                )
            )
        return found

    def _explain_parameter(self, site: str) -> tuple[str, dict[str, float]]:
        name = self._parameters([site])[0]
        mine = f"{name} of the {self._name}"
        layer, part = split_site(site)
        if part in (*NORMS, "router") and (factor := self._channel_factor(site, mine)):
            return factor
        if (label := self._source([site])) is not None:
            return f"{mine} is stale: it is that of {label}", {}
        if part == "router" and (rows := explain_router(self._checker, site, self._others)):
            return f"{mine} {rows}", {}
        if part in ("gate", "up") and layer is not None:
            other = layer_site(layer, "up" if part == "gate" else "gate")
            if self._checker.error(site, self._checker.expected(site, like=other)) <= self._checker.tolerance(
                site
            ):
                return f"{mine} is {parameter_of(other)}: gate and up are swapped", {}
        expected = self._checker.expected(site)
        wrong = wrong_columns(self._checker, site, expected)
        error = self._checker.error(site)
        width = expected.size(1)
        where = f" (rows {ranges(wrong)} of {width})" if 0 < len(wrong) < width else ""
        return f"{mine} is not the trainer's{where}: its output is off by {error:.1%}", {"error": error}

    def _channel_factor(self, site: str, mine: str) -> tuple[str, dict[str, float]] | None:
        """A norm or router whose channels are off by a constant factor for all tokens."""
        expected = self._checker.expected(site)
        ratios = self._checker.channel_ratios(site, expected)
        scaled = (expected.unflatten(1, (-1, ratios.numel())) * ratios).flatten(1)
        if distance(self._checker.found(site), scaled) > self._checker.tolerance(site):
            return None
        off = ratios - 1
        width = ratios.numel()
        most, noise = off.abs().max().item(), CHANNEL_TOLERANCE[self._checker.side.dtype]
        wrong = off.abs() > min(max(0.2 * most, noise), 0.9 * most)
        typical = off[wrong].median().item()
        much = f"{abs(typical):.1%} too {'large' if typical > 0 else 'small'}"
        values = {"factor": 1 + typical, "channels": float(wrong.sum())}
        unit = "rows" if split_site(site)[1] == "router" else "channels"
        if (off[wrong] - typical).abs().max() > max(0.2 * abs(typical), noise):
            channels = f"{int(wrong.sum())} of {width} {unit}"
            return f"{mine} differs in {channels}, {typical:+.1%} in the median, {most:.1%} at most", values
        if bool(wrong.all()):
            return f"{mine} is {much}", values
        return f"{mine} is {much} in {unit} {ranges(wrong.nonzero()[:, 0].tolist())} of {width}", values

    def _swapped_groups(self, sites: list[str]) -> tuple[Finding, list[str]] | None:
        """Query, key and value heads whose groups are permuted."""
        mixed = [s for s in sites if split_site(s)[1] in ("query", "key", "value")]
        orders = {s: self._order(s) for s in mixed}
        if not mixed or None in orders.values() or len({tuple(o or ()) for o in orders.values()}) != 1:
            return None
        order = orders[mixed[0]] or []
        moved = [g for g, source in enumerate(order) if g != source]
        layer = split_site(mixed[0])[0]
        kinds = [split_site(s)[1] for s in mixed]
        what = "QKV groups" if len(kinds) == 3 else f"{' and '.join(kinds)} groups"
        pair = len(moved) == 2
        text = (
            f"{what} {moved[0]} and {moved[1]} are swapped in layer {layer} of the {self._name}"
            if pair
            else f"{what} are in the order {order} in layer {layer} of the {self._name}"
        )
        finding = Finding(
            "weights",
            self._name,
            f"{text} (self_attention.linear_qkv, {', '.join(f'{k[0]}_proj' for k in kinds)})",
            self._advice,
            layers=[] if layer is None else [layer],
            parameters=self._parameters(mixed),
            values={f"group_{g}": float(order[g]) for g in moved},
        )
        return finding, mixed

    def _order(self, site: str) -> list[int] | None:
        """For each query group, the group whose rows it has; None unless it is a nontrivial permutation."""
        groups = self._shape.num_kv_heads
        found, expected = (
            x.unflatten(1, (groups, -1)) for x in (self._checker.found(site), self._checker.expected(site))
        )
        order = []
        for g in range(groups):
            fits = [distance(found[:, g], expected[:, s]) for s in range(groups)]
            if min(fits) > self._checker.tolerance(site):
                return None
            order.append(fits.index(min(fits)))
        return order if sorted(order) == list(range(groups)) and order != list(range(groups)) else None

    def _source(self, sites: Sequence[str]) -> str | None:
        """Name of the other weights that explain all of these sites."""
        return next((label for label, w in self._others.items() if self._explains(sites, w)), None)

    def _explains(self, sites: Sequence[str], weights: Weights) -> bool:
        checker = self._checker
        return all(
            checker.error(s, checker.expected(s, weights=weights)) <= checker.tolerance(s) for s in sites
        )

    def _other_layer(self, sites: Sequence[str]) -> int | None:
        """The other layer whose weights explain all of these sites."""
        checker, mine = self._checker, split_site(sites[0])[0]
        assert mine is not None
        alike = self._shape.has_experts(mine)
        for layer in range(self._shape.num_layers):
            if layer == mine or self._shape.has_experts(layer) != alike:
                continue
            pairs = [(s, layer_site(layer, split_site(s)[1])) for s in sites if split_site(s)[1] != "input"]
            if all(
                checker.error(s, checker.expected(s, like=like)) <= checker.tolerance(s) for s, like in pairs
            ):
                return layer
        return None

    def _parameters(self, sites: Sequence[str]) -> list[str]:
        return [name for s in sites for name in parameters_of(s, self._shape)]

    def _parameter_sites(self, layer: int) -> int:
        """Sites of a layer that have parameters of their own."""
        sites = [s for s in self._checker.sites() if split_site(s)[0] == layer and not s.endswith(".input")]
        return sum(bool(parameters_of(s, self._shape)) for s in sites)
