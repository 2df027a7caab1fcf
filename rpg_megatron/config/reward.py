"""Settings of rewards: one, or several terms with weights."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, Field, field_validator

from rpg_megatron.config.base import IMPORT_PATH, Affects, Section, built_in_or_imported


class OverlongSettings(Section, affects="training", evaluated=True):
    """DAPO's soft penalty on long responses: 0 until ``buffer`` tokens are left, then linear to -factor."""

    buffer: int | None = Field(None, ge=1)
    """Length, in tokens before rollout.max_response_tokens, over which the penalty grows. null: 512, or a
    quarter of rollout.max_response_tokens if that is less than 512."""
    factor: float = Field(1.0, gt=0)
    """Penalty of a truncated response."""

    def buffer_for(self, longest: int) -> int:
        """``buffer`` for responses of at most ``longest`` tokens."""
        if self.buffer is not None:
            return self.buffer
        return 512 if longest >= 512 else max(longest // 4, 1)


class KLRewardSettings(Section, affects="training"):
    """KL to the anchor, subtracted from the reward of each response before advantages are computed.

    Needs a reference model (anchor.type fixed or every). The KL term of the loss is added to it: to use only
    this one, set objective.beta to 0.
    """

    coefficient: float = Field(1e-3, gt=0)
    """Factor of the KL of a response, in nats: the sum over its tokens."""
    estimator: Literal["k1", "k3"] = "k1"
    """k1: old - anchor (log-probs of the sampled tokens); gives the gradient of the reverse KL. k3: never
    negative and less noisy, but as a reward it does not give that gradient."""


BUILT_IN_REWARDS = ("answer_line", "boxed", "gsm8k", "auto")
"""Values of reward.type that are not import paths; ``rewards/extraction`` defines where each looks for the
answer."""
TERM_NAME = r"[A-Za-z][A-Za-z0-9_-]*"
_TAKEN = (
    *("mean", "std", "accuracy", "overlong", "format", "kl"),
    *("timeouts", "crashes", "out_of_memory", "errors"),
)
"""Names used by other ``reward/*`` metrics."""


class RewardTerm(NamedTuple):
    """One term of the reward, from either form of the settings."""

    where: str
    """Its key in the settings, for messages."""
    type: str
    weight: float
    correct: float
    wrong: float
    failed: float
    """Value if the function fails."""
    settings: dict[str, Any]
    """The function's own settings."""
    reserved: tuple[str, ...]
    """Keys of the section itself, which cannot be settings of the function."""

    @property
    def is_custom(self) -> bool:
        """Whether it is the user's own function, or a judge."""
        return ":" in self.type

    @property
    def is_judge(self) -> bool:
        """Whether a server scores the responses."""
        return self.type == "rpg_megatron.rewards.judge:Judge"


def _check_reward_type(value: str) -> str:
    if value not in BUILT_IN_REWARDS and not re.fullmatch(IMPORT_PATH, value):
        raise ValueError(f"must be one of {', '.join(BUILT_IN_REWARDS)}, or an import path module:function")
    return value


class RewardTermSettings(Section, affects="training", evaluated=True):
    """One of several terms of the reward."""

    type: Annotated[str, AfterValidator(_check_reward_type)]
    """As reward.type."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor of the term in the reward; 0: the term is a metric only."""
    correct: float = 1.0
    """Value of a correct response."""
    wrong: float = -1.0
    """Value of a wrong response."""
    failed: float | None = None
    """Value of a response whose function raised, timed out, crashed or returned None; null: ``wrong``."""


if TYPE_CHECKING:
    AnyRewardTermSettings = RewardTermSettings
else:
    AnyRewardTermSettings = built_in_or_imported(RewardTermSettings)


class RewardSettings(Section, affects="training", evaluated=True):
    """Reward of a response: correctness, overlong penalty and format penalty; or several terms."""

    type: Annotated[str, AfterValidator(_check_reward_type)] = "answer_line"
    """Where to look for the answer: answer_line (the last "Answer: ..." in the last 300 characters), boxed
    (the last \\boxed{}), gsm8k (after ####) or auto (whichever comes last). It is compared as a number or as
    text, then by math-verify. Or the import path module:function of your own reward function, whose settings
    are the other keys: function(response, answer) returns a bool (correct or not) or the reward (correct if
    above 0); docs/extend.md.
    """
    correct: float = 1.0
    """Reward of a correct response."""
    wrong: float = -1.0
    """Reward of a wrong response."""
    failed: float | None = None
    """Reward of a response whose function raised, timed out, crashed or returned None; null: ``wrong``."""
    terms: dict[str, AnyRewardTermSettings] = Field({})
    """Several terms by name, instead of ``type``: the reward is their weighted sum. Each is logged as
    reward/<name>; the first one decides which responses are correct."""
    overlong: OverlongSettings | None = None
    """Penalty on long responses; null: none."""
    kl: KLRewardSettings | None = None
    """KL penalty in the reward; null: none."""
    format: float = Field(0.0, le=0)
    """Added to the reward of a response without an answer in the format of ``type``, or of the first term."""
    answer_in_thoughts: bool = False
    """Whether a built-in ``type`` also looks for the answer between <think> and </think>, and in a response
    that ends before </think>."""
    workers: Annotated[int, Affects("speed", evaluated=True)] = Field(2, ge=1, le=10_000)
    """Number of worker processes that grade answers other than plain numbers."""
    deadline: float = Field(5.0, gt=0)
    """Time limit for one answer, in seconds; then the worker is killed and the answer counts as wrong."""
    async_deadline: float = Field(300.0, gt=0)
    """Time limit for one call of an async function, including retries, in seconds."""
    concurrency: Annotated[int, Affects("speed", evaluated=True)] = Field(64, ge=1)
    """Maximum concurrent calls of each async function, over all rollout.workers."""

    @field_validator("terms")
    @classmethod
    def _check_term_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not re.fullmatch(TERM_NAME, name):
                raise ValueError(f"{name!r}: use a letter, then letters, digits, _ and -")
            if name in _TAKEN:
                raise ValueError(f"{name!r}: reward/{name} is another metric; choose another name")
        if value and all(term.weight == 0 for term in value.values()):
            raise ValueError("all weights are 0; set one of them to another value")
        return value

    def _problems(self) -> Iterator[str]:
        if self.terms:
            for key in ("type", "correct", "wrong", "failed"):
                if getattr(self, key) != RewardSettings.model_fields[key].default:
                    yield f"{key} has no effect with terms; move it into one of them"
        first = next(iter(self.all_terms.values()))
        if first.correct < first.wrong:
            yield f"correct ({first.correct:g}) is below wrong ({first.wrong:g}); swap them"
        if first.correct == first.wrong and not (self.terms or self.overlong or self.format):
            yield f"correct and wrong are both {first.wrong:g}: all responses get one reward; lower wrong"
        if self.format and first.is_custom:
            yield f"format has no effect with {first.type}: your function scores the format; remove it"

    @property
    def has_custom(self) -> bool:
        """Whether any term is the user's own function."""
        return any(term.is_custom for term in self.all_terms.values())

    @property
    def all_terms(self) -> dict[str, RewardTerm]:
        """The terms by name; without ``terms``, the only one is named correctness."""

        def term(where: str, part: RewardSettings | RewardTermSettings, weight: float) -> RewardTerm:
            failed = part.wrong if part.failed is None else part.failed
            keys = part.keywords, tuple(type(part).model_fields)
            return RewardTerm(where, part.type, weight, part.correct, part.wrong, failed, *keys)

        if not self.terms:
            return {"correctness": term("reward", self, 1.0)}
        return {name: term(f"reward.terms.{name}", part, part.weight) for name, part in self.terms.items()}


if TYPE_CHECKING:
    AnyRewardSettings = RewardSettings
else:
    AnyRewardSettings = built_in_or_imported(RewardSettings)
