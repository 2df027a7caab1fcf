"""From two traces of the same tokens to what is wrong, where, and what to do about it.

``judge`` looks for the modules whose output does not follow from their input (``drift.Chain``), and then for
the change that would make it follow: a factor on a norm, another checkpoint's weights, query groups in
another order, another base of the rotation, another temperature. A finding says what such a change explained.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from rpg_megatron.config import ModelShape
from rpg_megatron.data.trace import (
    FINAL_NORM,
    LOGITS,
    NORMS,
    all_sites,
    layer_site,
    parameter_of,
    split_site,
)
from rpg_megatron.evaluation.drift import Chain, Side, Weights, distance, minimise

LOGPROBS = "logprobs"
"""The last step's name: from logits to log-probs."""
_FIT_POSITIONS = 64  # the rotation's base is fitted to places before this one: later ones wind too often
_BASES, _TEMPERATURES = (10.0, 1e9, 320), (0.02, 50.0, 200)


@dataclass
class Finding:
    """One thing that is wrong."""

    kind: str
    """weights, layer, rope, packing, attention, temperature, vocabulary, precision, other."""
    side: str
    """engine or trainer: whose value does not follow from its own earlier values."""
    text: str
    """What is wrong and where, in a sentence."""
    advice: str
    layers: list[int] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    """Hugging Face names."""
    values: dict[str, float] = field(default_factory=dict)
    """What was measured: a factor, a base, a temperature."""


@dataclass
class Verdict:
    """What an audit found. Clean if there are no findings."""

    findings: list[Finding]
    broken: list[dict[str, Any]]
    """Sites that do not follow, in the order of computation: side, site, error, tolerance."""
    links: dict[str, dict[str, float]]
    """Error of each site against its own side's earlier values, by side and site."""
    drift: dict[str, float]
    """Relative difference of engine and trainer, by site: what errors have grown to there."""
    logprobs: dict[str, float]
    """|engine - trainer| of the sampled tokens: mean and max, nats."""

    @property
    def clean(self) -> bool:
        """Whether engine and trainer compute the same."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"clean": self.clean, "first": self.broken[0] if self.broken else None} | asdict(self)


def judge(
    engine: Side,
    trainer: Side,
    alone: Side,
    *,
    shape: ModelShape,
    weights: Weights,
    temperature: float,
    dtype: str,
    bounds: tuple[float, float],
    others: Mapping[str, Weights],
) -> Verdict:
    """Compare an engine with the trainer on the same tokens.

    trainer: with the sequences packed as in training; alone: each in a row of its own. weights: the trainer's,
    under HF names. temperature, dtype: as configured. bounds: largest and mean |log-prob difference| that the
    run's guard allows, nats. others: further weights that may explain a wrong one, by what to call them.
    """
    chains = {side.name: Chain(side, shape, weights, temperature) for side in (engine, trainer)}
    apart = Chain(alone, shape, weights, temperature)
    links = {name: _links(chain) for name, chain in chains.items()}
    findings = [f for side in (engine, trainer) for f in _dtype(side, dtype)]
    for name, chain in chains.items():
        broken = [s for s, error in links[name].items() if error > _tolerance(chain, s)]
        findings += _Diagnosis(chain, broken, others, apart if name == "trainer" else None).findings()
    gap = (engine.logp.double() - trainer.logp.double()).abs()
    logprobs = {"mean": gap.mean().item(), "max": gap.max().item(), "tokens": float(gap.numel())}
    drift = {
        site: distance(engine.trace[site], trainer.trace[site])
        for site in chains["engine"].sites()
        if site in trainer.trace
    }
    # Written so that a NaN counts as beyond.
    if not findings and not (logprobs["max"] <= bounds[0] and logprobs["mean"] <= bounds[1]):
        findings.append(_rounding(drift, logprobs, bounds, dtype))
    return Verdict(findings, _broken(chains, links), links, drift, logprobs)


def _links(chain: Chain) -> dict[str, float]:
    """Error of every site, and of the log-probs, in the order of computation."""
    return {site: chain.error(site) for site in chain.sites()} | {LOGPROBS: chain.logprob_error()}


def _tolerance(chain: Chain, site: str) -> float:
    return chain.tolerance(LOGITS if site == LOGPROBS else site)


def _broken(chains: Mapping[str, Chain], links: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    order = [*all_sites(chains["engine"].shape.num_layers, chains["engine"].shape.qk_norm), LOGPROBS]
    found = [
        {"side": name, "site": site, "error": error, "tolerance": _tolerance(chains[name], site)}
        for name, errors in links.items()
        for site, error in errors.items()
        if error > _tolerance(chains[name], site)
    ]
    return sorted(found, key=lambda f: order.index(str(f["site"])))


def _dtype(side: Side, dtype: str) -> list[Finding]:
    if side.dtype == dtype:
        return []
    return [
        Finding(
            "precision",
            side.name,
            f"the {side.name} computes in {side.dtype}, precision.dtype is {dtype}",
            f"start it in {dtype}; look for a --dtype in engine.arguments",
        )
    ]


def _rounding(
    drift: Mapping[str, float], logprobs: Mapping[str, float], bounds: tuple[float, float], dtype: str
) -> Finding:
    sites = list(drift)
    return Finding(
        "precision",
        "engine",
        f"every module is right by itself, and rounding in {dtype} adds up: engine and trainer differ by "
        f"{drift[sites[0]]:.1e} at the first layer's input and {drift[FINAL_NORM]:.1e} at the end, "
        f"the log-probs by {logprobs['mean']:.1e} nats on average, {logprobs['max']:.1e} at most "
        f"(bounds {bounds[1]:.0e}, {bounds[0]:.0e})",
        "use precision.dtype=float32, or raise guards.mismatch_mean and guards.mismatch_max and set correction",
    )


class _Diagnosis:
    """Finds what would explain one side's broken sites."""

    def __init__(
        self, chain: Chain, broken: Sequence[str], others: Mapping[str, Weights], apart: Chain | None
    ):
        self._chain, self._broken, self._others, self._apart = chain, broken, others, apart
        self._name, self._shape = chain.side.name, chain.shape
        self._advice = (
            "the engine does not serve the trainer's weights here: sync it again; if it stays, look at "
            "bridge/layouts, or at what loads this engine"
            if self._name == "engine"
            else "the trainer's own weights, as exported, do not give this: look at the model's configuration "
            "(policy/model.py) and at bridge/layouts"
        )

    def findings(self) -> list[Finding]:
        """All of them, the weights first, in the order of the layers."""
        tied = self._shape.tied_embeddings
        weighty = [s for s in self._broken if s != LOGPROBS and parameter_of(s, tied)]
        rest = [s for s in self._broken if s not in weighty]
        return [*self._weights(weighty), *self._others_broken(rest)]

    # -- weights ---------------------------------------------------------------------------------------------

    def _weights(self, broken: list[str]) -> list[Finding]:
        if not broken:
            return []
        rounded = self._explains(broken, lambda name: self._chain.weights(name).bfloat16())
        if rounded and self._chain.side.dtype != "bfloat16":
            return [
                Finding(
                    "precision",
                    self._name,
                    f"the {self._name}'s weights were rounded to bfloat16: with rounded weights all "
                    f"{len(broken)} deviating modules are right",
                    "keep one dtype from trainer to engine (precision.dtype, engine.arguments)",
                    layers=_layers(broken),
                    parameters=self._parameters(broken),
                )
            ]
        by_layer: dict[int | None, list[str]] = defaultdict(list)
        for site in broken:
            by_layer[split_site(site)[0]].append(site)
        count = sum(parameter_of(layer_site(1, p)) is not None for p in self._parts())
        whole = [i for i, sites in by_layer.items() if i is not None and len(sites) > count // 2]
        found = self._whole_layers(whole, [s for i in whole for s in by_layer[i]]) if whole else []
        for layer, sites in by_layer.items():
            if layer not in whole:
                found += self._single(sites)
        return found

    def _whole_layers(self, layers: list[int], sites: list[str]) -> list[Finding]:
        """Layers most of whose parameters are wrong at once."""
        what = f"layer {layers[0]}" if len(layers) == 1 else f"layers {_ranges(layers)}"
        label = self._source(sites)
        if label is not None:
            text = f"{what} of the {self._name} is stale: it holds the weights of {label}"
        else:
            other = self._other_layer(sites) if len(layers) == 1 else None
            text = (
                f"{what} of the {self._name} holds the weights of layer {other}"
                if other is not None
                else f"{what} of the {self._name} is stale or foreign: {len(sites)} of its parameters differ "
                f"from the trainer's, the first is {self._parameters(sites)[0]}"
            )
        if len(layers) > 1:
            text = text.replace(" is stale", " are stale").replace("it holds", "they hold")
        return [
            Finding(
                "layer", self._name, text, self._advice, layers=layers, parameters=self._parameters(sites)
            )
        ]

    def _single(self, sites: list[str]) -> list[Finding]:
        """Parameters that are wrong while others of their layer are right."""
        if swap := self._swapped_groups(sites):
            found, sites = [swap[0]], [s for s in sites if s not in swap[1]]
        else:
            found = []
        for site in sites:
            text, values = self._explain_parameter(site)
            layer = split_site(site)[0]
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
        if split_site(site)[1] in NORMS and (factor := self._norm_factor(site, mine)):
            return factor
        if (label := self._source([site])) is not None:
            return f"{mine} is stale: it is that of {label}", {}
        layer, part = split_site(site)
        if part in ("gate", "up") and layer is not None:
            other = layer_site(layer, "up" if part == "gate" else "gate")
            if self._chain.error(site, self._chain.expected(site, like=other)) <= self._chain.tolerance(site):
                return f"{mine} is {parameter_of(other)}: gate and up are swapped", {}
        expected = self._chain.expected(site)
        off = (self._chain.found(site) - expected).square().sum(0).sqrt()
        wrong = (off > self._chain.tolerance(site) * expected.square().sum(0).mean().sqrt()).nonzero()[:, 0]
        error = self._chain.error(site)
        where = (
            f" (rows {_ranges(wrong.tolist())} of {expected.size(1)})"
            if 0 < wrong.numel() < expected.size(1)
            else ""
        )
        return f"{mine} is not the trainer's{where}: its output is off by {error:.1%}", {"error": error}

    def _norm_factor(self, site: str, mine: str) -> tuple[str, dict[str, float]] | None:
        """A norm whose channels are each off by a factor of their own, whatever the token."""
        expected = self._chain.expected(site)
        ratios = self._chain.channel_ratios(site, expected)
        scaled = (expected.unflatten(1, (-1, ratios.numel())) * ratios).flatten(1)
        if distance(self._chain.found(site), scaled) > self._chain.tolerance(site):
            return None
        off = ratios - 1
        width = ratios.numel()
        wrong = off.abs() > 0.2 * off.abs().max()
        typical = off[wrong].median().item()
        much = f"{abs(typical):.1%} too {'large' if typical > 0 else 'small'}"
        values = {"factor": 1 + typical, "channels": float(wrong.sum())}
        if (off[wrong] - typical).abs().max() > 0.2 * abs(typical):
            most = off.abs().max().item()
            return f"{mine} differs in {int(wrong.sum())} of {width} channels by up to {most:.1%}", values
        if bool(wrong.all()):
            return f"{mine} is {much}", values
        return f"{mine} is {much} in channels {_ranges(wrong.nonzero()[:, 0].tolist())} of {width}", values

    def _swapped_groups(self, sites: list[str]) -> tuple[Finding, list[str]] | None:
        """Query, key and value heads that are all there, but in another order of the groups."""
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
            else f"{what} stand in the order {order} in layer {layer} of the {self._name}"
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
        """For each query group the one whose rows it holds; None if there is no such order, or it is right."""
        groups = self._shape.num_kv_heads
        found, expected = (
            x.unflatten(1, (groups, -1)) for x in (self._chain.found(site), self._chain.expected(site))
        )
        order = []
        for g in range(groups):
            fits = [distance(found[:, g], expected[:, s]) for s in range(groups)]
            if min(fits) > self._chain.tolerance(site):
                return None
            order.append(fits.index(min(fits)))
        return order if sorted(order) == list(range(groups)) and order != list(range(groups)) else None

    def _source(self, sites: Sequence[str]) -> str | None:
        """Which of the other weights make all of these sites right."""
        return next((label for label, w in self._others.items() if self._explains(sites, w)), None)

    def _explains(self, sites: Sequence[str], weights: Weights) -> bool:
        chain = self._chain
        return all(chain.error(s, chain.expected(s, weights=weights)) <= chain.tolerance(s) for s in sites)

    def _other_layer(self, sites: Sequence[str]) -> int | None:
        """Which other layer's weights make all of these sites right."""
        chain = self._chain
        for layer in range(self._shape.num_layers):
            pairs = [(s, layer_site(layer, split_site(s)[1])) for s in sites if split_site(s)[1] != "input"]
            if layer != split_site(sites[0])[0] and all(
                chain.error(s, chain.expected(s, like=like)) <= chain.tolerance(s) for s, like in pairs
            ):
                return layer
        return None

    def _parameters(self, sites: Sequence[str]) -> list[str]:
        names = [parameter_of(s, self._shape.tied_embeddings) for s in sites]
        return [n for n in names if n is not None]

    def _parts(self) -> list[str]:
        return [p for layer, p in map(split_site, self._chain.sites()) if layer == 0]

    # -- positions, attention, the head ----------------------------------------------------------------------

    def _others_broken(self, broken: list[str]) -> list[Finding]:
        found = []
        rope = [s for s in broken if s.endswith("_rope")]
        attention = [s for s in broken if s.endswith(".attention")]
        if rope:
            found.append(self._rope(rope))
        if attention:
            found.append(self._attention(attention))
        for site in broken:
            if site == LOGPROBS:
                found.append(self._logprobs())
            elif site not in rope and site not in attention:
                layer, part = split_site(site)
                text = f"{part} in layer {layer}" if layer is not None else part
                error = self._chain.error(site)
                found.append(
                    Finding(
                        "other",
                        self._name,
                        f"{text} of the {self._name} does not follow from the values before it (off by "
                        f"{error:.1%})",
                        "a custom kernel or a quantised engine computes another function here",
                        layers=[] if layer is None else [layer],
                    )
                )
        return found

    def _fits_alone(self, sites: Sequence[str]) -> bool:
        """Whether the same sites are right when each sequence has a row of its own."""
        return self._apart is not None and all(
            self._apart.error(s) <= self._apart.tolerance(s) for s in sites
        )

    def _rope(self, sites: list[str]) -> Finding:
        chain, site, theta = self._chain, sites[0], self._shape.rope_theta
        where = f"layers {_ranges(_layers(sites))}"
        layers = _layers(sites)
        shifts = self._shifts(site)
        if shifts is not None:
            listed = ", ".join(f"{s:+d}" for s in shifts)
            packed = self._fits_alone(sites)
            return Finding(
                "packing" if packed else "rope",
                self._name,
                f"positions are wrong in the {self._name}, {where}: its sequences start at {listed} instead of 0"
                + (" when they are packed; alone each is right" if packed else ""),
                "positions must start anew with each sequence of a pack: look at cu_seqlens and position ids"
                if packed
                else "look at how position ids are made",
                layers=layers,
            )
        near = chain.side.positions < _FIT_POSITIONS
        found = chain.found(site)[near]

        def error(base: float) -> float:
            return distance(found, chain.expected(site, theta=base)[near])

        base, rest = minimise(error, *_BASES)
        if rest <= 4 * chain.tolerance(site):
            return Finding(
                "rope",
                self._name,
                f"the {self._name} rotates positions with base {base:,.6g} instead of the configured "
                f"{theta:,.6g}, {where}",
                f"rope_theta is {theta:,.6g} in config.json of model.path; see that the {self._name} reads it",
                layers=layers,
                values={"base": base},
            )
        return Finding(
            "packing" if self._fits_alone(sites) else "rope",
            self._name,
            f"the {self._name} rotates positions in another way than config.json says, {where}; no base and no "
            f"shift explains it",
            "compare rope_theta, rope scaling and head_dim of both sides",
            layers=layers,
        )

    def _shifts(self, site: str) -> list[int] | None:
        """Where each sequence would have to start for its rotation to be right, if anywhere but at 0."""
        chain, lengths = self._chain, self._chain.side.lengths
        found = chain.found(site).split(lengths)
        total = sum(lengths)
        starts: list[int] = [0] * len(lengths)
        # Likely starts first: where the sequence lies in the pack, and one too far or too early.
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for i, begin in enumerate(bounds[:-1]):
            for start in (0, begin, 1, -1, *range(2, min(total, 64))):
                moved = chain.expected(site, positions=chain.side.positions + start).split(lengths)[i]
                if distance(found[i], moved) <= chain.tolerance(site) + 2.4e-7 * total:
                    starts[i] = start
                    break
            else:
                return None
        return starts if any(starts) else None

    def _attention(self, sites: list[str]) -> Finding:
        where = f"from layer {_layers(sites)[0]} on" if len(sites) > 1 else f"in layer {_layers(sites)[0]}"
        if self._fits_alone(sites):
            chain, site = self._chain, sites[0]
            parts = (
                chain.found(site).split(chain.side.lengths),
                chain.expected(site).split(chain.side.lengths),
            )
            wrong = [
                i
                for i, (f, e) in enumerate(zip(*parts, strict=True))
                if distance(f, e) > chain.tolerance(site)
            ]
            return Finding(
                "packing",
                self._name,
                f"packing: attention {where} of the {self._name} is wrong for sequences {_ranges(wrong)} of "
                f"{len(chain.side.lengths)} of a pack, and right for each alone",
                "sequences of a pack must not see each other: look at cu_seqlens and the attention's mask",
                layers=_layers(sites),
            )
        return Finding(
            "attention",
            self._name,
            f"attention {where} of the {self._name} does not follow from its queries, keys and values "
            f"(off by {self._chain.error(sites[0]):.1%})",
            "look at mask, softmax scale and, in the engine, the attention backend and the KV cache's format",
            layers=_layers(sites),
        )

    def _logprobs(self) -> Finding:
        chain, side = self._chain, self._chain.side
        configured, tolerance = chain.temperature, chain.tolerance(LOGITS)

        def error(t: float) -> float:
            return (side.logp.double() - chain.logprobs(t)).abs().max().item()

        temperature, _ = minimise(error, *_TEMPERATURES)
        if chain.logprob_error(chain.logprobs(temperature)) <= tolerance:
            return Finding(
                "temperature",
                side.name,
                f"the {side.name}'s log-probs are those of temperature {temperature:.4g}, configured is "
                f"{configured:.4g}; hidden states and logits are right",
                "trainer and engine must use rollout.temperature, and the engine --logprobs-mode "
                "processed_logprobs (look at engine.arguments)",
                values={"temperature": temperature},
            )
        # A column whose logit is 0 adds 1 to the sum of the softmax.
        logits = chain.found(LOGITS).double() / configured
        picked = logits.gather(1, side.sampled[:, None])[:, 0]
        surplus = (picked - side.logp.double()).exp() - logits.logsumexp(1).exp()
        columns = statistics.median(surplus.tolist())
        if columns > 0.5 and chain.logprob_error(chain.logprobs(padding=columns)) <= tolerance:
            return Finding(
                "vocabulary",
                side.name,
                f"vocabulary padding: the {side.name}'s softmax counts about {columns:.0f} columns behind the "
                f"vocabulary of {self._shape.vocab_size}",
                "columns that pad the vocabulary must be -inf before the softmax",
                values={"columns": columns},
            )
        return Finding(
            "other",
            side.name,
            f"the {side.name}'s log-probs do not follow from its logits (off by up to {error(configured):.2g} "
            "nats); no temperature and no padding explains it",
            "look at what is done to logits before sampling: top-k, top-p, penalties, logits processors",
        )


def _layers(sites: Sequence[str]) -> list[int]:
    return sorted({layer for layer, _ in map(split_site, sites) if layer is not None})


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers in short: 0-3, 7."""
    parts: list[list[int]] = [[numbers[0]]] if numbers else []
    for a, b in pairwise(numbers):
        if b == a + 1:
            parts[-1].append(b)
        else:
            parts.append([b])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)
