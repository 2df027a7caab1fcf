"""60 adversarial answers that make parsers, sympy or regular expressions hang, crash or use much memory.

Why: a policy that is rewarded finds such texts by itself. Each must get a verdict, wrong unless it really is
the answer: a deadline ends what would never end, and nothing is left.
Not covered: functions of the user's own (test_reward_pool).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rpg_megatron.rewards import Grader
from tests.support.commands import read_stats

TOWER = "9^{9^{9^{9^{9}}}}"
HOSTILE: list[str] = [
    # nested exponents and factorials
    TOWER,
    "2^{2^{2^{2^{2^{2}}}}}",
    "10^{10^{10}}",
    "(10^{10})^{10^{10}}",
    "99999^{99999^{99}}",
    "((9999!)!)!",
    "100000000!",
    "(10^9)!",
    "\\binom{10^9}{5 \\cdot 10^8}",
    "\\frac{" + TOWER + "}{" + TOWER + "}",
    "\\sqrt[" + TOWER + "]{2}",
    "\\log_{2}(" + TOWER + ")",
    "-" + TOWER + " + " + TOWER,
    "e^{e^{e^{e^{e^{e^{9}}}}}}",
    "\\sin(10^{10^{9}})",
    "0.1^{-10^{12}}",
    # numbers
    "9" * 1_000_000,
    "1" + "0" * 999_999 + "/3",
    "0." + "3" * 1_000_000,
    "1" * 900,
    "1" * 400 + "^{" + "2" * 400 + "}",
    "1e999999999",
    "1,000" * 100_000,
    "-" * 500 + "7",
    "1/0",
    "0/0",
    "\\infty - \\infty",
    # braces
    "{" * 100_000,
    "}" * 100_000,
    "\\frac{" * 200,
    "\\boxed{" * 50_000,
    "\\sqrt{" * 300 + "2" + "}" * 300,
    "(" * 900,
    "(" * 400 + "7" + ")" * 400,
    "\\left(" * 100 + "7",
    "\\text{" * 10_000 + "7",
    "{7}}{{7}",
    "\\frac{1}{\\frac{1}{" * 60 + "2" + "}}" * 60,
    # sympy at work
    "\\sum_{n=1}^{10^{12}} \\frac{1}{n^n}",
    "\\prod_{n=1}^{10^9} n",
    "\\int_0^{\\infty} e^{-x^{7}} \\sin(x^{5}) \\log(x)^{9} dx",
    "\\lim_{x \\to 0} \\frac{\\sin(\\tan x) - \\tan(\\sin x)}{x^7}",
    "(a+b+c+d+e+f)^{200}",
    "(x+1)^{10000} - (x-1)^{10000}",
    "\\sqrt{2+\\sqrt{3+\\sqrt{5+\\sqrt{7+\\sqrt{11+\\sqrt{13}}}}}}",
    "+".join(f"\\sqrt{{{n}}}" for n in range(2, 90)),
    "\\{" + ",".join(str(n) for n in range(230)) + "\\}",
    "x" * 900,
    "x^{" * 150 + "2" + "}" * 150,
    "|" * 300 + "x",
    # regular expressions
    "a" * 50_000 + "!",
    "1," * 50_000,
    "=" * 100_000,
    " " * 100_000 + "x",
    "\\text{ }" * 100 + "x",
    "1 cm" * 200,
    # text
    "7\x007",
    "\x00" * 1000,
    "\ud800\udfff",
    ("The quick brown fox. " * 50_000)[:1_000_000],
]


def resident(pid: int | str = "self") -> int:
    """Bytes in memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descendants() -> set[int]:
    """Live descendants of this process."""
    parents = {pid: int(stat[1]) for pid, stat in read_stats().items()}
    pids = {os.getpid()}
    while more := {p for p, parent in parents.items() if parent in pids and p not in pids}:
        pids |= more
    return pids - {os.getpid()}


@pytest.mark.parametrize(
    ("answer", "rounds", "deadline"),
    [("\\frac{\\sqrt{3}}{2}", 1, 4.0), pytest.param("7", 5, 5.0, marks=pytest.mark.long)],
)
def test_sixty_hostile_answers_each_get_a_verdict_in_time(answer: str, rounds: int, deadline: float) -> None:
    assert len(HOSTILE) == len(set(HOSTILE)) == 60
    workers = 8  # more than cores: workers that hang need none
    before = descendants()
    with Grader(workers=workers, deadline=deadline) as grader:
        assert grader.submit("\\boxed{\\sqrt{8}}", "2\\sqrt{2}").result().correct  # the pool is warm
        memory = resident()
        for _ in range(rounds):
            futures = [grader.submit(f"So.\nAnswer: {text}", answer) for text in HOSTILE]
            verdicts = [future.result(timeout=300) for future in futures]
            counts = grader.pop_counts()
            assert not any(verdict.correct for verdict in verdicts)
            assert counts["timeout"] >= 4
            assert grader.submit("\\boxed{\\sqrt{8}}", "2\\sqrt{2}").result().correct
        assert resident() - memory < 64 * 1024**2
    assert descendants() == before


def test_the_command_grades_them_too(tmp_path: Path) -> None:
    file, out = tmp_path / "hostile.jsonl", tmp_path / "verdicts.jsonl"
    lines = [{"response": f"Answer: {text}", "answer": "\\sqrt{3}"} for text in HOSTILE[:2] + HOSTILE[16:20]]
    file.write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"response": "#### 5", "answer": 5}])
    )
    command = [sys.executable, "-m", "rpg_megatron.cli", "grade", str(file), "--out", str(out)]
    done = subprocess.run(
        [*command, "--deadline", "1"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "1 of 7 correct" in done.stderr.splitlines()[-1]
    verdicts = [json.loads(line) for line in out.read_text().splitlines()]
    assert [v["row"] for v in verdicts] == list(range(1, 8))
    assert [v["correct"] for v in verdicts] == [False] * 6 + [True]
