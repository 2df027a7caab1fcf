"""Explains layers with experts whose router or expert matrices differ from the trainer's.

Only the sum over a token's experts can be observed. To find the wrong experts, a change (such as another
checkpoint's weights) is applied to every expert, and least squares over all tokens finds those that have it.
If no change fits, the tokens with wrong outputs are used: the error of a token is what its wrong expert
contributes to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import Tensor

from rpg_megatron.commands.audit.expert_block import expert_output, routing_weights, run_experts, undecided
from rpg_megatron.commands.audit.finding import Finding, ranges
from rpg_megatron.commands.audit.module_check import ModuleChecker, Weights, distance, minimise
from rpg_megatron.models.activation_sites import (
    EXPERT_MATRICES,
    expert_parameter,
    layer_site,
    parameters_of,
    split_site,
)

_SUBSETS = [which for n in (1, 2, 3) for which in combinations(range(3), n)]
"""Subsets of an expert's matrices that may be wrong, as indices of EXPERT_MATRICES; smallest first."""


def explain_experts(
    checker: ModuleChecker, site: str, others: Mapping[str, Weights], advice: str
) -> list[Finding]:
    """Explain a site ``experts`` that does not match its inputs.

    others: other weights that the side may have, by their name in messages. advice: what to do about wrong
    weights.
    """
    return _ExpertDiagnosis(checker, site, others, advice).findings()


def explain_router(checker: ModuleChecker, site: str, others: Mapping[str, Weights]) -> str | None:
    """What is wrong with some rows of a router, one per expert: stale, or those of other experts.

    None if neither explains its logits.
    """
    found, expected = checker.found(site), checker.expected(site)
    wrong = wrong_columns(checker, site, expected)

    def fits(values: Tensor) -> bool:
        changed = expected.clone()
        changed[:, wrong] = values
        return checker.error(site, changed) <= checker.tolerance(site)

    rows = f"rows {ranges(wrong)} (one per expert)"
    for label, weights in others.items():
        if fits(checker.expected(site, weights=weights)[:, wrong]):
            return f"has stale {rows}: those of {label}"
    nearest = [int((found[:, [i]] - expected).square().sum(0).argmin()) for i in wrong]
    if not fits(expected[:, nearest]):
        return None
    if len(wrong) == 2 and nearest == wrong[::-1]:
        return f"has rows {wrong[0]} and {wrong[1]} (one per expert) swapped"
    return f"has the rows of experts {', '.join(map(str, nearest))} in {rows}"


def wrong_columns(checker: ModuleChecker, site: str, expected: Tensor) -> list[int]:
    """Columns of a site that differ from the expected ones by more than rounding."""
    off = (checker.found(site) - expected).square().sum(0).sqrt()
    typical = expected.square().sum(0).mean().sqrt()
    columns: list[int] = (off > checker.tolerance(site) * typical).nonzero()[:, 0].tolist()
    return columns


@dataclass(frozen=True)
class _Change:
    """A change of an expert that explains its outputs."""

    matrices: tuple[int, ...]
    """The wrong ones, as indices of EXPERT_MATRICES."""
    text: str
    """Predicate of the message."""
    factor: float | None = None
    other: int | None = None
    """The expert whose matrices it has instead."""
    either: bool = False
    """Only one of ``matrices`` is wrong, but the outputs do not show which."""
    least: int = 1
    """Minimum number of experts with this change."""
    known: bool = True
    """Whether the change explains the outputs."""


class _ExpertDiagnosis:
    """Tests which wrong experts explain the output of one layer's block: t tokens, k of n experts each."""

    def __init__(self, checker: ModuleChecker, site: str, others: Mapping[str, Weights], advice: str):
        layer, experts = split_site(site)[0], checker.shape.experts
        assert layer is not None
        assert experts is not None
        self._checker, self._site, self._others, self._advice = checker, site, others, advice
        self._layer, self._experts, self._tolerance = layer, experts, checker.tolerance(site)
        self._x, self._logits = (checker.found(layer_site(layer, part)) for part in ("mlp_norm", "router"))
        self._found, self._weights = checker.found(site), routing_weights(self._logits, experts)
        self._chosen = self._logits.topk(experts.per_token).indices
        self._added = self._run(lambda e: checker.matrices(layer, e))
        """Contribution of each of a token's experts to its output: [t, k, hidden], ordered as ``_chosen``."""
        self._expected = self._added.sum(1)
        self._decided = ~undecided(self._logits, experts)
        off, size = (self._found - self._expected).norm(dim=1), self._expected.norm(dim=1)
        self._off = torch.where(off.isfinite(), off, 1e3 * size + 1) * self._decided
        self._wrong = self._off > self._tolerance * size
        """Tokens whose output is wrong: bool [t]."""

    def findings(self) -> list[Finding]:
        """One finding for each kind of change, or one for the whole block."""
        if changes := self._scaled() or self._changed_alike():
            return self._grouped(changes)
        suspects = self._suspects()
        changes = {e: self._explain(e, suspects) for e in suspects}
        if not changes or not all(change.known for change in changes.values()):
            if routing := self._routing():
                return [routing]
            if not changes or self._wrong[self._decided].all():
                text = (
                    f"model.layers.{self._layer}.mlp.experts of the {self._checker.side.name} are not the "
                    f"trainer's: their output is off by {self._checker.error(self._site, self._expected):.1%}"
                )
                return [self._finding("weights", text, parameters_of(self._site, self._checker.shape))]
        return self._grouped(changes)

    def _run(self, matrices: Callable[[int], Sequence[Tensor]]) -> Tensor:
        """Contributions of experts with these matrices: [t, k, hidden]."""
        out = self._x.new_zeros(*self._chosen.shape, self._x.size(1))
        for e, tokens, added in run_experts(self._x, self._logits, self._experts, matrices):
            out[tokens, (self._chosen[tokens] == e).int().argmax(1)] = added
        return out

    def _amounts(self, differences: Tensor) -> Tensor:
        """Least-squares factor of each expert's ``differences`` [t, k, hidden]: float64 [n]."""
        decided = self._decided.to(differences.dtype)[:, None]
        d, rest = differences * decided[:, None], (self._found - self._expected) * decided
        n = self._experts.count
        products, right = d.new_zeros(n * n), d.new_zeros(n)
        pairs = self._chosen[:, :, None] * n + self._chosen[:, None, :]
        products.index_add_(0, pairs.flatten(), (d @ d.transpose(1, 2)).flatten())
        right.index_add_(0, self._chosen.flatten(), (d @ rest[:, :, None]).flatten())
        # Pseudo-inverse: there is no equation for an expert without tokens.
        inverse: Tensor = torch.linalg.pinv(products.view(n, n).double(), hermitian=True)
        return inverse @ right.double()

    def _explains(self, differences: Tensor, amounts: Tensor) -> bool:
        """Whether the outputs match with these amounts of the experts' differences."""
        shares = amounts.to(differences.dtype)[self._chosen]
        expected = self._expected + (shares[:, :, None] * differences).sum(1)
        return self._checker.error(self._site, expected) <= self._tolerance

    def _in_wrong_tokens(self) -> Tensor:
        """Experts chosen by tokens with wrong outputs: bool [n]."""
        return (self._weights[self._wrong] > 0).any(0)

    def _scaled(self) -> dict[int, _Change]:
        """Experts whose output is too large or too small by a constant factor."""
        amounts = self._amounts(self._added)
        amounts = amounts * ((amounts.abs() > 0.2 * amounts.abs().max()) & self._in_wrong_tokens())
        if not amounts.any() or not self._explains(self._added, amounts):
            return {}
        factors = {e: 1 + amounts[e].item() for e in amounts.nonzero()[:, 0].tolist()}
        return {e: _Change((2, 1), f"is {_much(f)}", f, either=True) for e, f in factors.items()}

    def _changed_alike(self) -> dict[int, _Change]:
        """Some or all experts with the same change: those of another checkpoint, or in another order."""
        for change, matrices in self._alternatives():
            differences = self._run(matrices) - self._added
            amounts = (self._amounts(differences) > 0.5) & self._in_wrong_tokens()
            changed = amounts.nonzero()[:, 0].tolist()
            if len(changed) >= change.least and self._explains(differences, amounts):
                return dict.fromkeys(changed, change)
        return {}

    def _alternatives(self) -> Iterator[tuple[_Change, Callable[[int], Sequence[Tensor]]]]:
        """Changes to try on every expert, each with a function that returns an expert's changed matrices."""
        checker, layer, n = self._checker, self._layer, self._experts.count

        def mix(
            theirs: Callable[[int], Sequence[Tensor]], which: Sequence[int]
        ) -> Callable[[int], list[Tensor]]:
            return lambda e: _replaced(checker.matrices(layer, e), theirs(e), which)

        def of(weights: Weights) -> Callable[[int], list[Tensor]]:
            return lambda e: checker.matrices(layer, e, weights)

        def shifted(by: int) -> Callable[[int], list[Tensor]]:
            return lambda e: checker.matrices(layer, (e + by) % n)

        for label, weights in self._others.items():
            for which in _SUBSETS:
                yield _Change(which, f"is stale: it is that of {label}"), mix(of(weights), which)

        def swapped(e: int) -> list[Tensor]:
            gate, up, down = checker.matrices(layer, e)
            return [up, gate, down]

        yield _Change((0, 1), "is wrong: gate and up are swapped"), swapped
        # As if the expert-parallel ranks were in another order.
        for by in sorted({n * i // 8 for i in range(1, 8)} - {0}):
            text = f"is that of the expert {by} places later (modulo {n})"
            yield _Change((0, 1, 2), text, least=3), shifted(by)  # two swapped experts are reported as such

    def _routing(self) -> Finding | None:
        """The right experts with the wrong weights, or the wrong number of them."""
        e = self._experts
        others = [replace(e, normalised=not e.normalised)]
        others += [replace(e, per_token=n) for n in range(1, min(e.count, 2 * e.per_token) + 1)]
        for routing in others:
            expected = self._checker.expected(self._site, routing=routing)
            if routing == e or self._checker.error(self._site, expected) > self._tolerance:
                continue
            what = (
                f"expert weights that {'' if routing.normalised else 'do not '}sum to 1"
                if routing.per_token == e.per_token
                else f"{routing.per_token} experts per token instead of {e.per_token}"
            )
            text = f"layer {self._layer} of the {self._checker.side.name} uses {what}"
            advice = "compare norm_topk_prob and num_experts_per_tok of both sides"
            return replace(self._finding("routing", text, []), advice=advice)
        return None

    def _suspects(self) -> list[int]:
        """The fewest experts that can explain all wrong tokens, most likely first."""
        suspects: list[int] = []
        sizes = torch.zeros_like(self._weights).scatter_(1, self._chosen, self._added.norm(dim=2))
        left = self._wrong.clone()
        while left.any():
            likely = (self._off * left) @ sizes / sizes.norm(dim=0).clamp(min=1e-30)
            if not likely.max() > 0:
                break
            suspects.append(int(likely.argmax()))
            without = self._weights[:, suspects[-1]] == 0
            left &= without
            sizes *= without[:, None]
        # With many tokens and few experts, excluding the experts of right tokens may leave fewer.
        right = (self._weights[self._decided & ~self._wrong] > 0).any(0)
        others = (self._in_wrong_tokens() & ~right).nonzero()[:, 0].tolist()
        explained = (self._weights[self._wrong][:, others] > 0).any(1).all()
        return others if explained and len(others) < len(suspects) else suspects

    def _explain(self, e: int, suspects: Sequence[int]) -> _Change:
        """What is wrong with an expert, from the tokens that chose no other suspect."""
        checker, tolerance = self._checker, self._tolerance
        alone = (self._weights[:, e] > 0) & self._decided
        alone &= (self._weights[:, [s for s in suspects if s != e]] == 0).all(1)
        unknown = _Change((0, 1, 2), "is not the trainer's", known=False)
        if not (alone & self._wrong).any():
            return unknown
        x, share, found = self._x[alone], self._weights[alone, e, None], self._found[alone]
        mine = checker.matrices(self._layer, e)
        added = share * expert_output(x, *mine)
        rest = self._expected[alone] - added

        def error(*matrices: Tensor) -> float:
            return distance(found, rest + share * expert_output(x, *matrices))

        for other in range(self._experts.count):
            theirs = checker.matrices(self._layer, other)
            for which in _SUBSETS:
                if other != e and error(*_replaced(mine, theirs, which)) <= tolerance:
                    return _Change(which, f"is that of expert {other}", other=other)
        factor, least = minimise(lambda f: error(f * mine[0], *mine[1:]), 0.25, 4, 24)
        if least <= tolerance:
            return _Change((0,), f"is {_much(factor)}", factor)
        off = (found - rest - added).square().sum(0).sqrt()
        rows = (off > tolerance * found.square().sum(0).mean().sqrt()).nonzero()[:, 0].tolist()
        size = (off.norm() / added.norm()).item()
        if 0 < len(rows) < found.size(1) // 2:
            where = f"rows {ranges(rows)} of {found.size(1)}"
            return _Change((2,), f"is not the trainer's ({where}): the expert's output is off by {size:.1%}")
        return replace(unknown, text=f"is not the trainer's: the expert's output is off by {size:.1%}")

    def _grouped(self, changes: Mapping[int, _Change]) -> list[Finding]:
        """One finding for experts with the same change, and one for each swapped pair."""
        found, by_change = [], defaultdict(list)
        for e, change in sorted(changes.items()):
            other = changes.get(change.other) if change.other is not None else None
            if change.other is None or other is None or (other.other, other.matrices) != (e, change.matrices):
                by_change[change].append(e)
            elif change.other > e:
                pair = replace(change, text=f"is swapped with that of expert {change.other}")
                found.append(self._of_experts([e], pair, [e, change.other]))
        return found + [self._of_experts(experts, change, experts) for change, experts in by_change.items()]

    def _of_experts(self, experts: Sequence[int], change: _Change, named: Sequence[int]) -> Finding:
        """named: experts whose parameters the finding includes."""
        names = [expert_parameter(self._layer, e, EXPERT_MATRICES[m]) for e in named for m in change.matrices]
        matrices = (" or " if change.either else ", ").join(EXPERT_MATRICES[m] for m in change.matrices)
        what = expert_parameter(self._layer, ranges(experts), matrices)
        if len(change.matrices) > 1:
            what = what.removesuffix(".weight")
        values = {} if change.factor is None else {"factor": change.factor}
        return self._finding(
            "weights", f"{what} of the {self._checker.side.name} {change.text}", names, values
        )

    def _finding(
        self, kind: str, text: str, parameters: list[str], values: dict[str, float] | None = None
    ) -> Finding:
        side = self._checker.side.name
        return Finding(kind, side, text, self._advice, [self._layer], parameters, values or {})


def _replaced(mine: Sequence[Tensor], theirs: Sequence[Tensor], which: Sequence[int]) -> list[Tensor]:
    return [b if i in which else a for i, (a, b) in enumerate(zip(mine, theirs, strict=True))]


def _much(factor: float) -> str:
    return f"{abs(factor - 1):.1%} too {'large' if factor > 1 else 'small'}"
