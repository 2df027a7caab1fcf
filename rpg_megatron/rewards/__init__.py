"""From responses to rewards."""

from rpg_megatron.rewards.grader import Grader, Verdict, grade

__all__ = ["Grader", "Verdict", "grade"]
