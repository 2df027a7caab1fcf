"""Late admission of groups (``rollout/admission.py``), with the real producer in virtual time.

Why: groups that are admitted too early are sampled by old weights for nothing; too late, and the trainer
waits.
Not covered: engines whose speed depends on their load, real runs.
"""

from itertools import count

import pytest

from benchmarks.ahead import BATCH, simulate
from rpg_megatron.rollout.admission import Admission


@pytest.mark.parametrize("ahead", [1, 4])
def test_a_slower_trainer_gets_fresh_tokens_without_waiting(ahead: int) -> None:
    early, late = (simulate(ahead, 3 * BATCH, late=way, steps=60) for way in (False, True))
    assert early.lag == pytest.approx(ahead, rel=0.05)
    assert late.lag <= 1.2
    assert early.seconds / late.seconds >= 0.98


def test_a_slow_start_of_the_engines_does_not_count() -> None:
    """The groups that are admitted before the first batch wait for the engines' start and first requests."""
    late = simulate(2, 3 * BATCH, late=True, steps=60, slowed=lambda ticket: 20.0 if ticket < 64 else 1.0)
    assert late.lag <= 1.2


def test_slower_engines_get_groups_as_early_as_the_bound_allows() -> None:
    early, late = (simulate(2, 0.6 * BATCH, late=way, steps=40) for way in (False, True))
    assert early.seconds / late.seconds == pytest.approx(1, abs=0.01)
    assert late.lag == pytest.approx(early.lag, abs=0.02)


def test_a_batch_is_due_when_the_time_left_is_what_batches_take() -> None:
    admission, clock = Admission(), count(0, 10)
    assert admission.due(0) == 2  # nothing is known yet
    for start in clock:
        admission.ask(start)  # works for 8 seconds, waits for 2
        admission.hand_over(start + 2, start - 2, start + 2)
        if start == 100:
            break
    needed = start + 2 + 8
    lead = 4.0 - 0.01 * 8
    assert admission.due(needed - lead - 0.01) == 0
    assert admission.due(needed - lead + 0.01) == 1
    assert admission.seconds_to_next(needed - 7) == pytest.approx(7 - lead)
    assert admission.seconds_to_next(needed + 1) is None  # until the trainer asks
    admission.ask(needed)
    assert admission.due(needed) == 1
    admission.hand_over(needed, needed - 40.0, needed)  # one batch that took ten times as long
    assert admission.due(needed) == 4
