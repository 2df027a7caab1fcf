"""Dynamic sampling (DAPO): drop groups without a learning signal, sample prompts until the step is full.

By default a group whose responses are all right or all wrong is dropped: its rewards are equal, unless a
penalty or a dense reward makes them differ. ``rollout.dynamic.type`` may name a custom filter. Surplus groups
come first in the next step, or are dropped (``rollout.dynamic.surplus``).
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.rewards.failures import FailureCount
from rpg_megatron.rollout.groups import GroupScores, GroupTask
from rpg_megatron.system.custom_code import CustomCode, load_custom, name_errors


@dataclass(frozen=True, eq=False)
class Group:
    """A graded group, whose trajectories a worker keeps."""

    task: GroupTask
    scores: GroupScores


def passes_filter(settings: RolloutSettings, scores: GroupScores) -> bool:
    """Whether a group is trained on: the result of the filter; True without dynamic sampling.

    Raises UserError if a custom filter cannot be imported, or fails.
    """
    if settings.dynamic is None:
        return True
    keep = _load_filter(settings.dynamic.path, json.dumps(settings.dynamic.keywords, sort_keys=True))
    return bool(keep(scores))


@functools.cache
def _load_filter(path: str, keywords: str) -> Callable[..., object]:
    code = CustomCode("rollout.dynamic", path, json.loads(keywords), 1)
    return name_errors(load_custom(code), code.where, path)


class DynamicSampler:
    """The groups of one step, in the order of their prompts and not of their completion.

    So the selection does not depend on timing, and slow groups are not left out.
    """

    def __init__(self, settings: RolloutSettings, surplus: Sequence[Group] = ()):
        """surplus: the surplus groups of the previous step."""
        self._settings = settings
        self._dynamic = settings.dynamic
        self._groups: list[Group] = list(surplus)
        self._dropped: list[Group] = []
        self._carried_in = len(surplus)
        self._rounds = self._generated = self._all_right = self._all_wrong = 0
        self._right = self._responses = 0
        self.failures = FailureCount()
        """Failures of the reward in all groups that were added, those to drop included."""

    def prompts_needed(self, step: int) -> int:
        """Number of prompts to sample next; 0: the step is full.

        Raises UserError if it is not full after ``rollout.dynamic.rounds`` rounds.
        """
        missing = self._settings.prompts_per_step - len(self._groups)
        if missing <= 0:
            return 0
        if self._dynamic is None:
            return missing
        if self._rounds == self._dynamic.rounds:
            raise self.rounds_exhausted(step)
        return math.ceil(missing * self._dynamic.oversample)

    def add(self, groups: Sequence[Group]) -> None:
        """Add the groups of one round, in the order of their prompts."""
        self._rounds += 1
        self._generated += len(groups)
        for group in groups:
            correct = group.scores.correct
            right = sum(correct)
            self._right += right
            self._responses += len(correct)
            self._all_right += right == len(correct)
            self.failures = self.failures.add(group.scores.failures)
            self._all_wrong += right == 0
            if passes_filter(self._settings, group.scores):
                self._groups.append(group)
            else:
                self._dropped.append(group)

    def result(self) -> tuple[list[Group], list[Group], list[Group]]:
        """The step's groups, the surplus groups for the next step, and the groups to drop."""
        used, surplus = self._groups[: self._settings.prompts_per_step], self._surplus()
        rest = self._groups[len(used) + len(surplus) :]
        return used, surplus, self._dropped + rest

    def metrics(self) -> dict[str, float]:
        """Metrics ``sampling/*``: numbers of groups; empty unless sampling is dynamic."""
        if self._dynamic is None:
            return {}
        counts = {
            "rounds": self._rounds,
            "generated": self._generated,
            "all_right": self._all_right,
            "all_wrong": self._all_wrong,
            "kept": len(self._groups) - self._carried_in,
            "carried_in": self._carried_in,
            "carried_over": len(self._surplus()),
        }
        accuracy = {"sampling/accuracy": self._right / self._responses} if self._responses else {}
        return {f"sampling/{name}": float(count) for name, count in counts.items()} | accuracy

    def _surplus(self) -> list[Group]:
        """Groups that the next step starts with."""
        drop = self._dynamic is not None and self._dynamic.surplus == "drop"
        return [] if drop else self._groups[self._settings.prompts_per_step :]

    def rounds_exhausted(self, step: int) -> UserError:
        """The error if the step is not full after ``rollout.dynamic.rounds`` rounds."""
        assert self._dynamic is not None
        rounds, easy = self._dynamic.rounds, self._all_right > self._all_wrong
        if self.failures.failed:
            return UserError(
                f"step {step}: after {rounds} rounds of dynamic sampling {len(self._groups)} of "
                f"{self._settings.prompts_per_step} groups are kept; {self.failures}; correct the function "
                "or the server. The first of each kind:\n"
                + "\n".join(f"  {failure}" for failure in self.failures.first)
            )
        # Sampling ahead replaces each rejected group at once.
        keys = "rollout.dynamic.rounds" + ("" if self._settings.ahead else ", rollout.dynamic.oversample")
        if self._dynamic.type != "mixed":
            return UserError(
                f"step {step}: after {rounds} rounds of dynamic sampling {self._dynamic.type} has kept "
                f"{len(self._groups)} of {self._settings.prompts_per_step} groups (sampled "
                f"{self._generated}); keep more, or raise {keys} or rollout.samples_per_prompt"
            )
        return UserError(
            f"step {step}: after {rounds} rounds of dynamic sampling {len(self._groups)} of "
            f"{self._settings.prompts_per_step} groups have both right and wrong responses (sampled "
            f"{self._generated}: {self._all_right} all right, {self._all_wrong} all wrong). The prompts or "
            f"the reward are too {'easy' if easy else 'hard'} for the model: use other data, or raise "
            f"{keys} or rollout.samples_per_prompt"
        )
