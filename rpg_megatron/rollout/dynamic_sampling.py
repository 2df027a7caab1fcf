"""Dynamic sampling: which groups a step trains on, how many more prompts it takes, what the next step gets.

A group whose responses are all right or all wrong has advantage 0 and teaches nothing (DAPO). Such groups go;
prompts are drawn until the step is full. What is over comes first in the next step, or is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import RolloutSettings
from rpg_megatron.data.trajectory import Trajectory, from_row, to_row

Group = list[Trajectory]


class DynamicSampler:
    """The groups of one step. Groups are taken in the order of their prompts, not in that of their arrival:
    the slow ones are not passed over, and the choice does not depend on timing.
    """

    def __init__(self, settings: RolloutSettings, before: Sequence[Group] = ()):
        """before: groups that the last step had over."""
        self._settings = settings
        self._dynamic = settings.dynamic
        self._groups: list[Group] = list(before)
        self._before = len(before)
        self._rounds = self._generated = self._all_right = self._all_wrong = 0
        self._right = self._responses = 0

    def wanted(self, step: int) -> int:
        """How many prompts to sample next; 0: the step is full.

        Raises UserError if it is not full after as many rounds as the settings allow.
        """
        missing = self._settings.prompts_per_step - len(self._groups)
        if missing <= 0:
            return 0
        if self._dynamic is None:
            return missing
        if self._rounds == self._dynamic.rounds:
            raise UserError(self._starved(step, self._dynamic.rounds))
        return math.ceil(missing * self._dynamic.oversample)

    def add(self, groups: Sequence[Group]) -> None:
        """Take what one round sampled, in the order of its prompts."""
        self._rounds += 1
        self._generated += len(groups)
        for group in groups:
            right = sum(t.correct for t in group)
            self._right += right
            self._responses += len(group)
            self._all_right += right == len(group)
            self._all_wrong += right == 0
            if self._dynamic is None or 0 < right < len(group):
                self._groups.append(group)

    def result(self) -> tuple[Group, list[Group]]:
        """The step's trajectories, groups numbered from 0, and the groups that the next step gets."""
        count = self._settings.prompts_per_step
        used = [replace(t, group=number) for number, group in enumerate(self._groups[:count]) for t in group]
        return used, self._over()

    def metrics(self) -> dict[str, float]:
        """``sampling/*``, in groups; empty unless sampling is dynamic."""
        if self._dynamic is None:
            return {}
        counts = {
            "rounds": self._rounds,
            "generated": self._generated,
            "all_right": self._all_right,
            "all_wrong": self._all_wrong,
            "kept": len(self._groups) - self._before,
            "carried_in": self._before,
            "carried_over": len(self._over()),
        }
        shares = {"sampling/accuracy": self._right / self._responses} if self._responses else {}
        return {f"sampling/{name}": float(count) for name, count in counts.items()} | shares

    def _over(self) -> list[Group]:
        """What the next step begins with."""
        drop = self._dynamic is not None and self._dynamic.surplus == "drop"
        return [] if drop else self._groups[self._settings.prompts_per_step :]

    def _starved(self, step: int, rounds: int) -> str:
        easy = self._all_right > self._all_wrong
        return (
            f"step {step}: after {rounds} rounds of dynamic sampling {len(self._groups)} of "
            f"{self._settings.prompts_per_step} groups have both right and wrong responses (sampled "
            f"{self._generated}: {self._all_right} all right, {self._all_wrong} all wrong). The prompts are "
            f"too {'easy' if easy else 'hard'} for the model, or the reward is; take others, or raise "
            "rollout.dynamic.rounds, rollout.dynamic.oversample or rollout.samples_per_prompt"
        )


def groups_to_rows(groups: Sequence[Group]) -> list[list[dict[str, Any]]]:
    """What JSON can hold of groups that are carried over."""
    return [[to_row(trajectory) for trajectory in group] for group in groups]


def groups_from_rows(rows: Sequence[Sequence[dict[str, Any]]]) -> list[Group]:
    """The groups that ``groups_to_rows`` was given."""
    return [[from_row(row) for row in group] for group in rows]
