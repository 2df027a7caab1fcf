"""Failures of reward functions: which responses got no reward, why, and whether the run must stop.

A response fails if a term of its reward raised, returned something else than a finite number, a bool or a
list of these, timed out or crashed. What a function returns otherwise is never a failure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rpg_megatron.config.objective import GuardSettings

MOST = 20
"""Maximum number of different failures that are listed."""
_PROMPT = 60
"""Characters of a prompt in a message."""


class RewardFailure(NamedTuple):
    """Why a term gave a response no reward."""

    term: str
    """Key of the term in the settings, and its type."""
    kind: str
    """timeout, crash, memory or error."""
    detail: str
    """Type and message of the exception, or what else is wrong."""
    place: str = ""
    """``file:line`` of the function, or of the line that raised; empty if that is not known."""
    set: str = ""
    """Name of the held-out set; empty: the training set."""
    prompt_id: int = 0
    prompt: str = ""
    """The start of the prompt's text."""

    @property
    def key(self) -> tuple[str, ...]:
        """The same for failures with the same cause: messages of exceptions differ by response."""
        raised = re.match(r"\w+(?=: )", self.detail)
        return self.set, self.term, self.kind, raised[0] if raised else self.detail, self.place

    @property
    def reason(self) -> str:
        """What went wrong, and where."""
        return f"{self.kind}: {self.detail}" + (f" at {self.place}" if self.place else "")

    def __str__(self) -> str:
        return f"{self.term}, {set_name(self.set)}, prompt {self.prompt_id} ({self.prompt!r}): {self.reason}"

    def at(self, name: str, prompt_id: int, prompt: str) -> RewardFailure:
        """The same failure with its set and prompt."""
        text = " ".join(prompt[: 4 * _PROMPT].split())
        text = text if len(text) <= _PROMPT else text[:_PROMPT] + "…"
        return self._replace(set=name, prompt_id=prompt_id, prompt=text)


class FailureCount(NamedTuple):
    """Failures among the graded responses of one set."""

    set: str = ""
    """As in ``RewardFailure``."""
    failed: int = 0
    """Number of responses without a reward."""
    graded: int = 0
    """Number of all responses."""
    first: Sequence[RewardFailure] = ()
    """The first failure of each kind, ``MOST`` at most."""

    @property
    def share(self) -> float:
        """Failed responses as a fraction of all."""
        return self.failed / self.graded if self.graded else 0.0

    def __str__(self) -> str:
        return (
            f"the reward failed on {self.failed} of {self.graded} responses of the {set_name(self.set)} "
            f"({self.share:.1%})"
        )

    def add(self, count: FailureCount) -> FailureCount:
        """The sum of two counts of the same set."""
        first = first_of_each((*self.first, *count.first))
        return FailureCount(self.set, self.failed + count.failed, self.graded + count.graded, first)


def set_name(name: str) -> str:
    """A set for messages."""
    return f"held-out set {name}" if name else "training set"


def first_of_each(failures: Iterable[RewardFailure], most: int = MOST) -> list[RewardFailure]:
    """The first failure of each kind."""
    first: dict[tuple[str, ...], RewardFailure] = {}
    for failure in failures:
        first.setdefault(failure.key, failure)
    return list(first.values())[:most]


def guard_failures(
    counts: Sequence[FailureCount], guards: GuardSettings, when: str
) -> tuple[list[str], str | None]:
    """A warning for each set with failures, and the message with which the run must stop, if it must.

    when: such as "step 3".
    """
    from rpg_megatron.config.objective import REWARD_FAILURES_SHARE

    if guards.reward_failures == "off":
        return [], None
    warnings = [f"{when}: {count}; first: {count.first[0]}" for count in counts if count.failed]
    over = [count for count in counts if count.failed and count.share >= REWARD_FAILURES_SHARE]
    if not over or guards.reward_failures != "stop":
        return warnings, None
    lines = [f"  {failure}" for count in over for failure in count.first]
    text = "; ".join(map(str, over))
    return warnings, "\n".join(
        [
            f"{when}: {text}, and the limit is {REWARD_FAILURES_SHARE:.0%}; correct "
            "the function or the server, or set guards.reward_failures=warn to continue. The first of each "
            "kind:",
            *lines,
        ]
    )
