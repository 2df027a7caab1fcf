"""A reward function for runs with kills: in a worker process, and slow enough to be killed there."""

from __future__ import annotations

import time

from rpg_megatron.rewards.extraction import find_answer


def is_correct(response: str, answer: str) -> bool:
    time.sleep(0.005)
    return find_answer(response) == answer
