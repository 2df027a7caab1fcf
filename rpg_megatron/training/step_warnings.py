"""Warnings of steps that train nothing: one line when it begins, not one for each step that follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from rpg_megatron.config import Settings
from rpg_megatron.config.objective import ENOUGH_PROBE_TOKENS, SKIPPED_UPDATES

_SHOWN = 3
"""Maximum number of metrics in a warning."""


class StepWarnings:
    """Warns of a step's metrics. warn: shows a line to the user."""

    def __init__(self, settings: Settings, warn: Callable[[str], None]):
        self._settings, self._warn = settings, warn
        self._before: dict[str, set[str]] = {}
        """What was wrong with the step before, by method."""
        self._compared = False
        """Whether the warning that engines are not compared was shown."""

    def check_batch(self, step: int, row: Mapping[str, float]) -> None:
        """Responses that are all cut off, and rewards that teach nothing. row: metrics of the batch."""
        self._warn_new("batch", step, dict(self._batch_problems(row)))

    def check_update(self, step: int, row: Mapping[str, float]) -> None:
        """Updates that were skipped, and metrics that are not finite. row: metrics with those of updates."""
        self._warn_new("update", step, dict(self._update_problems(row)), always=True)

    def check_probes(self, step: int, row: Mapping[str, float]) -> None:
        """Once: engines that the mismatch guard cannot compare. row: metrics of the mismatch."""
        if self._compared or not self._settings.compares_engines or "mismatch/logp_engine_ratio" in row:
            return
        self._compared = True
        self._warn(
            f"step {step}: the engines' log-probs were not compared with each other: "
            f"that takes {ENOUGH_PROBE_TOKENS} probe tokens of each, and all had "
            f"{row.get('async/probe_tokens', 0):.0f}"
        )

    def _warn_new(self, kind: str, step: int, messages: dict[str, str], *, always: bool = False) -> None:
        for key, text in messages.items():
            if always or key not in self._before.get(kind, ()):
                self._warn(f"step {step}: {text}")
        self._before[kind] = set(messages)

    def _batch_problems(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        limit = self._settings.rollout.max_response_tokens
        if row.get("response/truncated_frac") == 1:
            yield (
                "truncated",
                f"every response was cut off at {limit} tokens (response/truncated_frac 1): raise "
                "rollout.max_response_tokens, or check that the prompts make the model end its answers",
            )
        equal = self._settings.compares_within_groups and row.get("groups/equal_rewards") == 1
        if self._settings.uses_rewards and (equal or row.get("reward/std") == 0):
            spread = row.get("reward/std") != 0
            which = "all rewards in each group" if equal and spread else "all rewards of the step"
            yield (
                "equal",
                f"{which} were equal (mean {row.get('reward/mean', math.nan):.3g}) and teach "
                "nothing; see the responses in rollouts/ (rpg-megatron sample), and docs/troubleshooting.md, "
                "No learning signal",
            )

    def _update_problems(self, row: Mapping[str, float]) -> Iterator[tuple[str, str]]:
        if skipped := int(row.get("policy/skipped_updates", 0)):
            yield (
                "skipped",
                f"the gradient was not finite in {skipped} of its updates: skipped; "
                f"logs/rank_0.log names parameter and rank; {SKIPPED_UPDATES} in a row end the run",
            )
        if odd := [key for key, value in row.items() if not math.isfinite(value)]:
            more = f" and {len(odd) - _SHOWN} more" if len(odd) > _SHOWN else ""
            yield "odd", f"NaN or infinite: {', '.join(odd[:_SHOWN])}{more}"
