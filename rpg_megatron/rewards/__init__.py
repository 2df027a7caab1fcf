"""Answer extraction, graders, rewards, and their worker processes."""

from rpg_megatron.rewards.grader import Grader, Verdict, grade

__all__ = ["Grader", "Verdict", "grade"]
