"""A reward that notes what it grades and waits for the file ``go`` before some problems."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.support.runs import QUICKSTART

_REWARD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def reward(response, answer):
    with open(here / "graded", "a") as f:
        f.write(answer + "\\n")
    while {first} <= int(answer) < {end} and not (here / "go").exists():
        time.sleep(0.05)
    return float(len(response) % 3)
"""


def hold_rewards(folder: Path, held: range) -> list[str]:
    """Write problems in a fixed order, with their numbers as answers, and the reward; their settings.

    held: the problems that wait. ``folder`` must be in PYTHONPATH.
    """
    rows = [json.loads(line) for line in (QUICKSTART.parent / "quickstart" / "train.jsonl").open()]
    (folder / "data.jsonl").write_text(
        "".join(json.dumps(row | {"answer": str(i)}) + "\n" for i, row in enumerate(rows[:400]))
    )
    (folder / "held_reward.py").write_text(_REWARD.format(first=held.start, end=held.stop))
    return [
        f"data.path={folder / 'data.jsonl'}",
        "data.shuffle=false",
        "reward.type=held_reward:reward",
        "reward.deadline=600",
    ]


def graded(folder: Path) -> Counter[int]:
    """How often each problem was graded, checks before the run included."""
    file = folder / "graded"
    return Counter(int(line) for line in file.read_text().split()) if file.exists() else Counter()
