"""Explains wrong operations of one side that have no parameters: positions, attention, the softmax."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence

import torch

from rpg_megatron.commands.audit.finding import Finding, layers_of, ranges
from rpg_megatron.commands.audit.module_check import ModuleChecker, distance, minimise
from rpg_megatron.models.activation_sites import LOGITS, split_site

LOGPROBS = "logprobs"
"""Name of the last step, from logits to log-probs."""
_FIT_POSITIONS = 64  # fit the RoPE base to earlier positions: angles of later ones wrap too often
_BASES = (10.0, 1e9, 320)  # lowest, highest, points of the first grid


def explain_ops(checker: ModuleChecker, broken: Sequence[str], apart: ModuleChecker | None) -> list[Finding]:
    """Explain broken sites without parameters, given in the order of computation.

    apart: the trainer's checker with one sequence per row; a site that is right there is wrong only when
    packed.
    """
    return _OpDiagnosis(checker, apart).findings(broken)


class _OpDiagnosis:
    """Tests which other positions, RoPE bases or temperatures explain one side's broken sites."""

    def __init__(self, checker: ModuleChecker, apart: ModuleChecker | None):
        self._checker, self._apart = checker, apart
        self._name, self._shape = checker.side.name, checker.shape

    def findings(self, broken: Sequence[str]) -> list[Finding]:
        """All findings; one for RoPE of all layers, one for their attention."""
        found = []
        rope = [s for s in broken if s.endswith("_rope")]
        attention = [s for s in broken if s.endswith(".attention")]
        if rope:
            found.append(self._rope(rope))
        if attention:
            found.append(self._attention(attention))
        by_part: dict[str, list[str]] = defaultdict(list)
        for site in broken:
            if site not in rope and site not in attention and site != LOGPROBS:
                by_part[split_site(site)[1]].append(site)
        found += [self._other(part, sites) for part, sites in by_part.items()]
        if LOGPROBS in broken:
            found.append(self._logprobs())
        return found

    def _other(self, part: str, sites: list[str]) -> Finding:
        layers = layers_of(sites)
        where = f" in layers {ranges(layers)}" if layers else ""
        error = max(self._checker.error(s) for s in sites)
        return Finding(
            "other",
            self._name,
            f"{part}{where} of the {self._name} does not match its inputs, it is off by {error:.1%}",
            "a custom kernel or a quantised engine computes a different function here",
            layers=layers,
        )

    def _fits_alone(self, sites: Sequence[str]) -> bool:
        """Whether the same sites are right with one sequence per row."""
        return self._apart is not None and all(
            self._apart.error(s) <= self._apart.tolerance(s) for s in sites
        )

    def _rope(self, sites: list[str]) -> Finding:
        checker, site, theta = self._checker, sites[0], self._shape.rope_theta
        where = f"layers {ranges(layers_of(sites))}"
        layers = layers_of(sites)
        shifts = self._shifts(site)
        if shifts is not None:
            listed = ", ".join(f"{s:+d}" for s in shifts)
            packed = self._fits_alone(sites)
            return Finding(
                "packing" if packed else "rope",
                self._name,
                f"positions are wrong in the {self._name}, {where}: its sequences start at {listed} "
                "instead of 0" + (" when packed; each is right alone" if packed else ""),
                "positions must restart with each sequence of a pack: check cu_seqlens and position ids"
                if packed
                else "check how position ids are computed",
                layers=layers,
            )
        near = checker.side.positions < _FIT_POSITIONS
        found = checker.found(site)[near]

        def error(base: float) -> float:
            return distance(found, checker.expected(site, theta=base)[near])

        base, rest = minimise(error, *_BASES)
        if rest <= 4 * checker.tolerance(site):
            return Finding(
                "rope",
                self._name,
                f"the {self._name} rotates positions with base {base:,.6g} instead of the configured "
                f"{theta:,.6g}, {where}",
                f"rope_theta is {theta:,.6g} in config.json of model.path; check what the {self._name} reads",
                layers=layers,
                values={"base": base},
            )
        return Finding(
            "packing" if self._fits_alone(sites) else "rope",
            self._name,
            f"the {self._name} rotates positions differently than config.json says, {where}; "
            "no base and no shift explains it",
            "compare rope_theta, rope scaling and head_dim of both sides",
            layers=layers,
        )

    def _shifts(self, site: str) -> list[int] | None:
        """The start positions that explain each sequence's rotation; None if there are none, or all are 0."""
        checker, lengths = self._checker, self._checker.side.lengths
        found = checker.found(site).split(lengths)
        total = sum(lengths)
        starts: list[int] = [0] * len(lengths)
        # Likely starts first: the offset of the sequence in the pack, then off by one.
        bounds = torch.tensor([0, *lengths]).cumsum(0).tolist()
        for i, begin in enumerate(bounds[:-1]):
            for start in (0, begin, 1, -1, *range(2, min(total, 64))):
                moved = checker.expected(site, positions=checker.side.positions + start).split(lengths)[i]
                if distance(found[i], moved) <= checker.tolerance(site) + 2.4e-7 * total:
                    starts[i] = start
                    break
            else:
                return None
        return starts if any(starts) else None

    def _attention(self, sites: list[str]) -> Finding:
        where = (
            f"from layer {layers_of(sites)[0]} on" if len(sites) > 1 else f"in layer {layers_of(sites)[0]}"
        )
        if self._fits_alone(sites):
            checker, site = self._checker, sites[0]
            parts = (
                checker.found(site).split(checker.side.lengths),
                checker.expected(site).split(checker.side.lengths),
            )
            wrong = [
                i
                for i, (f, e) in enumerate(zip(*parts, strict=True))
                if distance(f, e) > checker.tolerance(site)
            ]
            return Finding(
                "packing",
                self._name,
                f"packing: attention {where} of the {self._name} is wrong for sequences {ranges(wrong)} of "
                f"{len(checker.side.lengths)} of a pack, but right for each alone",
                "sequences of a pack must not attend to each other: check cu_seqlens and the attention mask",
                layers=layers_of(sites),
            )
        return Finding(
            "attention",
            self._name,
            f"attention {where} of the {self._name} does not match its queries, keys and values "
            f"(off by {self._checker.error(sites[0]):.1%})",
            "check mask, softmax scale and, in the engine, the attention backend and the KV cache's dtype",
            layers=layers_of(sites),
        )

    def _logprobs(self) -> Finding:
        checker, side = self._checker, self._checker.side
        configured, tolerance = checker.temperature, checker.tolerance(LOGITS)

        temperature, _ = checker.fitted_temperature
        if checker.logprob_error(checker.logprobs(temperature)) <= tolerance:
            return Finding(
                "temperature",
                side.name,
                f"the {side.name}'s log-probs are those of temperature {temperature:.4g}, configured is "
                f"{configured:.4g}; hidden states and logits are right",
                "trainer and engine must use rollout.temperature, and the engine --logprobs-mode "
                "processed_logprobs (check engine.arguments)",
                values={"temperature": temperature},
            )
        # A column whose logit is 0 adds 1 to the sum of the softmax.
        logits = checker.logits / configured
        picked = logits.gather(1, side.sampled.to(logits.device)[:, None])[:, 0]
        surplus = (picked - checker.logp()).exp() - logits.logsumexp(1).exp()
        columns = statistics.median(surplus.tolist())
        if columns > 0.5 and checker.logprob_error(checker.logprobs(padding=columns)) <= tolerance:
            return Finding(
                "vocabulary",
                side.name,
                f"vocabulary padding: the {side.name}'s softmax counts about {columns:.0f} columns beyond "
                f"the vocabulary of {self._shape.vocab_size}",
                "columns that pad the vocabulary must be -inf before the softmax",
                values={"columns": columns},
            )
        off = (checker.logp() - checker.logprobs()).abs().max().item()
        return Finding(
            "other",
            side.name,
            f"the {side.name}'s log-probs do not match its logits (off by up to {off:.2g} nats); no "
            "temperature and no padding explains it",
            "check what changes logits before sampling: top-k, top-p, penalties, logits processors",
        )
