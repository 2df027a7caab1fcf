"""Answers graded per second, with the pool warm: plain numbers, and LaTeX by math-verify.

``python -m benchmarks.grading [WORKERS]`` prints a table. Each row is the best of three runs of the same
work; the last column is the ratio to plain numbers. "In groups of 16" repeats answers as the responses to a
prompt do; "all different" is math-verify's own speed, times the cores that there are. CPU is what this
process and its workers used: on a busy machine it says more than the clock.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from rpg_megatron.rewards import Grader

COUNT = 2000


def plain() -> list[tuple[str, str]]:
    """Numbers as a model writes them; half of them wrong."""
    forms = ["{:,}", "${}$", "{}.0", "\\boxed{{{}}}", "\\text{{{} cm}}", "\\frac{{{}}}{{1}}"]
    work = "We add the numbers and simplify. " * 40
    return [
        (f"{work}\nAnswer: {forms[i % len(forms)].format(i)}", str(i + i % 2))
        for i in range(1000, 1000 + COUNT)
    ]


CONSTANTS = [
    ("\\frac{{\\sqrt{{{0}}}}}{{2}}", "\\sqrt{{{0}}}/{1}"),
    ("{0}\\pi", "{0} \\cdot \\pi + {1} - 2"),
    ("{0}\\sqrt{{3}}", "\\sqrt{{3}} \\cdot {0} \\cdot {1} / 2"),
]
EXPRESSIONS = [
    ("x^2 + {0}x", "x(x+{0}) + {1} - 2"),
    ("\\frac{{n(n+{0})}}{{2}}", "\\frac{{n^2 + {0}n}}{{{1}}}"),
    ("({0}, \\sqrt{{2}})", "({0}, \\frac{{{1}}}{{\\sqrt{{2}}}})"),
]


def latex(forms: list[tuple[str, str]], different: int) -> list[tuple[str, str]]:
    """So many different pairs in all; half of them wrong."""
    work = "We add the numbers and simplify. " * 40
    pairs = []
    for i in range(COUNT):
        number = i * different // COUNT
        given, answer = forms[number % len(forms)]
        pairs.append(
            (
                f"{work}\\boxed{{{given.format(number + 2, 2)}}}",
                answer.format(number + 2, 2 + number % 6 // 3),
            )
        )
    return pairs


def cpu_seconds() -> float:
    """Of this process and of all that descend from it and live."""
    parents, used = {}, {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry)], used[int(entry)] = int(fields[1]), int(fields[11]) + int(fields[12])
    mine = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in mine and pid not in mine}:
        mine |= more
    return sum(used[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


def speed(workers: int, pairs: list[tuple[str, str]]) -> tuple[float, float, float]:
    """Answers per second, milliseconds of CPU for one, and the share that was right."""
    best, cpu, right = 0.0, 1e9, 0
    for _ in range(3):
        with Grader(workers=workers) as grader:
            warm = [grader.submit(f"\\boxed{{{n}x\\sqrt{{8}}}}", f"{2 * n}x\\sqrt{{2}}") for n in range(64)]
            assert all(f.result().correct for f in warm)
            started, used = time.perf_counter(), cpu_seconds()
            futures = [grader.submit(*pair) for pair in pairs]
            right = sum(f.result().correct for f in futures)
            best = max(best, len(pairs) / (time.perf_counter() - started))
            cpu = min(cpu, 1000 * (cpu_seconds() - used) / len(pairs))
    return best, cpu, right / len(pairs)


def main() -> None:
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    rows = [
        ("plain numbers", plain()),
        ("constants in LaTeX, all different", latex(CONSTANTS, COUNT)),
        ("expressions, in groups of 16", latex(EXPRESSIONS, COUNT // 16)),
        ("expressions, all different", latex(EXPRESSIONS, COUNT)),
    ]
    print(f"{workers} workers, {os.cpu_count()} cores, {COUNT:,} answers of about 1,300 characters")
    print(f"{'':<35}{'answers/s':>10}{'CPU ms each':>13}{'right':>8}{'ratio':>8}")
    first = None
    for name, pairs in rows:
        rate, cpu, right = speed(workers, pairs)
        first = first or rate
        print(f"{name:<35}{rate:>10,.0f}{cpu:>13.3f}{right:>8.0%}{rate / first:>8.3f}", flush=True)


if __name__ == "__main__":
    main()
