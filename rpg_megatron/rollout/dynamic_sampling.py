"""Dynamic sampling (DAPO): drop groups without a learning signal, sample prompts until the step is full.

By default a group whose responses are all right or all wrong is dropped: its rewards are equal, unless a
penalty or a dense reward makes them differ. ``rollout.dynamic.type`` may name a custom filter. The producer
(``producer.py``) replaces each dropped group by the next prompt.
"""

from __future__ import annotations

import functools
import json
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


def sampling_metrics(settings: RolloutSettings, groups: Sequence[Group]) -> dict[str, float]:
    """Metrics ``sampling/*``; empty unless sampling is dynamic.

    groups: all graded groups up to the step's last one, kept or not.
    """
    if settings.dynamic is None:
        return {}
    right = [sum(group.scores.correct) for group in groups]
    return {
        "sampling/generated": float(len(groups)),
        "sampling/all_right": float(_all_right(groups)),
        "sampling/all_wrong": float(right.count(0)),
        "sampling/accuracy": sum(right) / sum(len(group.scores.correct) for group in groups),
    }


def failures_of(groups: Sequence[Group]) -> FailureCount:
    """Failures of the reward in the groups."""
    count = FailureCount()
    for group in groups:
        count = count.add(group.scores.failures)
    return count


def rounds_exhausted(settings: RolloutSettings, groups: Sequence[Group], step: int) -> UserError:
    """The error if a step is not full after ``DynamicSamplingSettings.most_groups`` groups.

    groups: all that were graded for the step.
    """
    dynamic, total = settings.dynamic, settings.prompts_per_step
    assert dynamic is not None
    kept = sum(passes_filter(settings, group.scores) for group in groups)
    after = f"step {step}: after {dynamic.rounds} rounds of dynamic sampling {kept} of {total} groups"
    failures = failures_of(groups)
    if failures.failed:
        return UserError(
            f"{after} are kept; {failures}; correct the function or the server. The first of each kind:\n"
            + "\n".join(f"  {failure}" for failure in failures.first)
        )
    more = "raise rollout.dynamic.rounds or rollout.samples_per_prompt"
    if dynamic.type != "mixed":
        return UserError(f"{after} are kept by {dynamic.type} (sampled {len(groups)}); keep more, or {more}")
    right, wrong = _all_right(groups), sum(not any(group.scores.correct) for group in groups)
    return UserError(
        f"{after} have both right and wrong responses (sampled {len(groups)}: {right} all right, {wrong} all "
        f"wrong). The prompts or the reward are too {'easy' if right > wrong else 'hard'} for the model: use "
        f"other data, or {more}"
    )


def _all_right(groups: Sequence[Group]) -> int:
    return sum(all(group.scores.correct) for group in groups)
