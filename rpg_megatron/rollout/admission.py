"""When to admit the groups of the next batches with ``rollout.ahead``: as late as the trainer's pace allows.

If the trainer is slower than the engines, groups that are admitted as soon as the bound allows are sampled by
older weights, and then wait. So a batch's groups are admitted when the time until the trainer needs them is
what recent batches took. If the engines are slower, that is at once, up to the bound.
"""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from statistics import median

_WINDOW = 32
"""Number of batches whose times are kept."""
_MOST_WAIT = 0.01
"""How long the trainer may wait for batches, on average, as a share of the time that it works on one."""


class Admission:
    """Times of the last batches, and what follows from them. Times are those of one monotonic clock, in
    seconds.
    """

    def __init__(self) -> None:
        self._work: deque[float] = deque(maxlen=_WINDOW)
        """How long the trainer worked on each batch."""
        self._durations: deque[float] = deque(maxlen=_WINDOW)
        """How long each batch took, from the admission of its first group to the last score."""
        self._begun: float | None = None
        """When the trainer got its first batch."""
        self._returned: float | None = None
        """When the trainer got its last batch."""
        self._waiting = False

    def ask(self, now: float) -> None:
        """The trainer asks for its next batch."""
        if self._returned is not None:
            self._work.append(now - self._returned)
        self._waiting = True

    def hand_over(self, now: float, admitted: float, graded: float) -> None:
        """The trainer gets a batch. admitted: when its first group was; graded: when its last score came."""
        if self._begun is None:
            self._begun = now
        if admitted >= self._begun:  # batches that were admitted before wait for the start of the engines
            self._durations.append(graded - admitted)
        self._waiting, self._returned = False, now

    def due(self, now: float) -> int:
        """Number of batches, after those that the trainer has got, whose groups should be admitted by now.

        Until times are known: the next batch and the one after it.
        """
        if not self._work or not self._durations:
            return 2
        work, spare = self._pace(), self._lead() - self._until_needed(now)
        return 1 + int(spare / work) if spare >= 0 else 0

    def seconds_to_next(self, now: float) -> float | None:
        """Seconds until ``due`` rises; None if only the trainer's next call changes it."""
        if not self._work or not self._durations or not (left := self._until_needed(now)):
            return None
        seconds = left + self.due(now) * self._pace() - self._lead()
        return max(seconds, 1e-3) if seconds <= left else None  # not 0 again and again, by rounding

    def _until_needed(self, now: float) -> float:
        """Seconds until the trainer needs its next batch."""
        if self._waiting or self._returned is None:
            return 0.0
        return max(self._returned + self._pace() - now, 0.0)

    def _pace(self) -> float:
        """How long the trainer is expected to work on a batch."""
        return max(median(self._work), 1e-3)

    def _lead(self) -> float:
        """How long before the trainer is expected to need a batch its groups are admitted.

        The shortest time with which the trainer would have waited for the last batches as ``_MOST_WAIT``
        says, if each had been admitted that long before.
        """
        pace = self._pace()
        pairs = zip(reversed(self._durations), reversed(self._work), strict=False)
        needed = sorted((duration + pace - work for duration, work in pairs), reverse=True)
        allowed = _MOST_WAIT * pace * len(needed)
        for count, total in enumerate(accumulate(needed), 1):
            # With a lead between this time and the next, the waits add up to total - count x lead.
            lead = (total - allowed) / count
            if count == len(needed) or lead >= needed[count]:
                break
        return max(lead, 0.0)
