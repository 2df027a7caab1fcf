"""Rewards: answer extraction, graders of responses, and the worker processes that grade."""

from rpg_megatron.rewards.grader import Grader, Verdict, grade

__all__ = ["Grader", "Verdict", "grade"]
