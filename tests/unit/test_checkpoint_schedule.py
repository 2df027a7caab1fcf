"""When checkpoints are due: by steps, by minutes, and with room before the end of a job.

Why: a step may take an hour and a job four, so twenty steps between checkpoints lose a day; and a warning
that comes too late for an update and a save must cost a step, not a job. Not covered: what a save writes.
"""

import time

import pytest

from rpg_megatron.config.cluster import JOB_END_VARIABLE
from rpg_megatron.config.rollout import CheckpointSettings
from rpg_megatron.launcher.nodes import end_of_job
from rpg_megatron.training.checkpoint_schedule import CheckpointSchedule


def schedule(left: float | None = None, **settings: object) -> CheckpointSchedule:
    environment = {} if left is None else {JOB_END_VARIABLE: str(time.time() + left)}
    return CheckpointSchedule(CheckpointSettings(**settings), 100, environment)


def test_by_steps_and_at_the_end() -> None:
    due = [step for step in range(1, 101) if schedule(every=40).due_by_step(step)]
    assert due == [40, 80, 100]
    assert not any(schedule(every=None).due_by_step(step) for step in range(1, 101))


def test_by_minutes_since_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    checkpoints = schedule(minutes=30)
    now += 1799
    assert not checkpoints.due_by_time(60)
    now += 2
    assert checkpoints.due_by_time(60)
    checkpoints.saved()
    assert not checkpoints.due_by_time(60)
    now += 1801
    assert checkpoints.due_by_time(60)
    assert not schedule(every=None, minutes=1e-9).due_by_time(60)


@pytest.mark.parametrize(
    ("left", "step", "due"),
    [
        (4000, 3300, True),  # the next step would be warned
        (6000, 3300, False),
        (5500, 3300, True),
        (1200, 300, False),
        (1000, 300, True),
        (-5, 1, False),  # the job got more time
        (None, 10**6, False),  # no job, or no limit
    ],
)
def test_with_room_before_the_end_of_the_job(left: float | None, step: float, due: bool, monkeypatch) -> None:
    checkpoints, never = schedule(left, grace=600), schedule(left, every=None)
    assert not checkpoints.due_by_time(step)  # a run of short steps does not save after each
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert checkpoints.due_by_time(step) == due
    assert not never.due_by_time(step)


def test_the_end_of_a_job() -> None:
    assert end_of_job({}) is None
    assert end_of_job({"SLURM_JOB_ID": "7", JOB_END_VARIABLE: "123"}) == 123.0
    assert end_of_job({JOB_END_VARIABLE: "soon"}) is None
