"""Built-in advantages. Each is a settings section, and its instance is called like a user's own function.

All subclasses of ``AdvantageSettings`` in this file are available; there is no list to extend. Imports no
numpy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, override

from rpg_megatron.config.base import ImportedSettings, Section, tagged_union

if TYPE_CHECKING:
    from rpg_megatron.objectives.advantages import Floats, Integers


class AdvantageSettings(Section, affects="training"):
    """How rewards become advantages."""

    across_groups: ClassVar[bool] = False
    """Whether a response is also compared with those of other groups, so that a group of one is enough."""

    type: str
    """rpg: reward minus group mean, not divided by the standard deviation; the others: docs/objectives.md."""

    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        """Advantage of each response, shared by all of its tokens: [N], float64.

        rewards: float64 [N]. group: int64 [N], labels of the prompts. lengths: int64 [N], response tokens.
        """
        raise NotImplementedError


class RPGAdvantageSettings(AdvantageSettings):
    """Reward minus group mean, not divided by the standard deviation. Source: arXiv 2505.17508's code."""

    type: Literal["rpg"] = "rpg"
    """rpg: reward minus group mean, not divided by the standard deviation; the others: docs/objectives.md."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        from rpg_megatron.objectives.advantages import centre

        return centre(rewards, group)[0]


class GRPOAdvantageSettings(AdvantageSettings):
    """Reward minus group mean, over (unbiased group standard deviation + 1e-6). Source: arXiv 2402.03300."""

    type: Literal["grpo"]
    """The advantage."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        from rpg_megatron.objectives.advantages import centre, group_deviation

        centred, member, count = centre(rewards, group)
        return centred / (group_deviation(centred, member, count) + 1e-6)


class LeaveOneOutAdvantageSettings(AdvantageSettings):
    """Reward minus the mean of the others in the group. Source: arXiv 2402.14740."""

    type: Literal["leave_one_out"]
    """The advantage."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        from rpg_megatron.objectives.advantages import centre

        centred, member, count = centre(rewards, group)
        advantages: Floats = centred * count[member] / (count - 1).clip(min=1)[member]
        return advantages


class BatchMeanAdvantageSettings(AdvantageSettings):
    """Reward minus batch mean. Source: arXiv 2505.17508's code."""

    across_groups: ClassVar[bool] = True

    type: Literal["batch_mean"]
    """The advantage."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        advantages: Floats = rewards - rewards.mean()
        return advantages


class ReinforcePlusPlusAdvantageSettings(AdvantageSettings):
    """The reward, whitened over all response tokens of the step. Source: arXiv 2505.17508's code."""

    across_groups: ClassVar[bool] = True

    type: Literal["reinforce_plus_plus"]
    """The advantage."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        from rpg_megatron.objectives.advantages import whiten

        return whiten(rewards, lengths)


class ReinforcePlusPlusBaselineAdvantageSettings(AdvantageSettings):
    """Reward minus group mean, whitened over all response tokens. Source: arXiv 2505.17508's code."""

    type: Literal["reinforce_plus_plus_baseline"]
    """The advantage."""

    @override
    def __call__(self, rewards: Floats, group: Integers, lengths: Integers) -> Floats:
        from rpg_megatron.objectives.advantages import centre, whiten

        return whiten(centre(rewards, group)[0], lengths)


if TYPE_CHECKING:
    AnyAdvantageSettings = AdvantageSettings | ImportedSettings
else:
    AnyAdvantageSettings = tagged_union(AdvantageSettings, ImportedSettings, default="rpg")
"""An advantage selected by ``type``, or a function of your own."""
