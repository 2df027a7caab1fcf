"""Graders on the labelled sets in tests/data: the table "Against other graders" of docs/rewards.md.

``python -m benchmarks.grader`` grades every row with this package, with math-verify alone and with the text
rules of DAPO's recipe, and prints how many verdicts are right. ``--rows`` lists the wrong ones of this
package, ``--kinds`` counts them by kind.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from rpg_megatron.rewards import Grader

DATA = Path(__file__).parents[1] / "tests" / "data"
FILES = ("grader_rewrites.jsonl", "grader_near_misses.jsonl")

_DAPO_REMOVED = [
    "square",
    "ways",
    "integers",
    "dollars",
    "mph",
    "inches",
    "hours",
    "km",
    "units",
    "\\ldots",
    "sue",
    "points",
    "feet",
    "minutes",
    "digits",
    "cents",
    "degrees",
    "cm",
    "gm",
    "pounds",
    "meters",
    "meals",
    "edges",
    "students",
    "childrentickets",
    "multiples",
    "\\text{s}",
    "\\text{.}",
    "\\text{\ns}",
    "\\text{}^2",
    "\\text{}^3",
    "\\text{\n}",
    "\\text{}",
    "\\mathrm{th}",
    "^\\circ",
    "^{\\circ}",
    "\\;",
    ",\\!",
    "{,}",
    '"',
    "\\dots",
]
_DAPO_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)


def read_rows() -> list[dict[str, object]]:
    """The rows of both files."""
    return [json.loads(line) for file in FILES for line in (DATA / file).read_text("utf-8").splitlines()]


def dapo(response: str, reference: str) -> bool:
    """DAPO: the last ``Answer:`` line of the last 300 characters; equal texts after normalisation."""
    found = re.findall(r"(?i)Answer\s*:\s*([^\n]+)", response[-300:])
    return bool(found) and _dapo_normalise(found[-1]) == _dapo_normalise(reference)


def _dapo_normalise(text: str) -> str:
    """The published steps: right side, replacements, removals, wrappers, short fractions, commas."""
    text = text.rpartition("=")[2]
    for old, new in _DAPO_REPLACED:
        text = text.replace(old, new)
    for old in _DAPO_REMOVED:
        text = text.replace(old, "")
    for pattern, new in (
        (r"(.*?)(\$)(.*?)(\$)(.*)", r"$\3$"),
        (r"\\(?:text|textbf|overline)\{(.*?)\}", r"\1"),
        (r"\\boxed\{(.*)\}", r"\1"),
        (r"frac([^{])(.)", r"frac{\1}{\2}"),
        (r"sqrt([^{])", r"sqrt{\1}"),
    ):
        text = re.sub(pattern, new, text)
    text = text.replace("$", "")
    return text.replace(",", "").strip() if text.replace(",", "").isdigit() else text.strip()


def math_verify_alone(response: str, reference: str) -> bool:
    """math-verify with its own extraction and its defaults."""
    from math_verify import parse, verify

    expected = parse(f"${reference}$", parsing_timeout=None)
    found = parse(response, parsing_timeout=None)
    return bool(expected and found) and verify(expected, found, timeout_seconds=None)


def measure(grade: Callable[[str, str], bool]) -> list[dict[str, object]]:
    """The rows that a grader gets wrong."""
    return [r for r in read_rows() if grade(str(r["response"]), str(r["reference"])) is not r["correct"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="graders on the labelled sets of tests/data")
    parser.add_argument("--rows", action="store_true", help="list this package's wrong verdicts")
    parser.add_argument("--kinds", action="store_true", help="count them by kind")
    parser.add_argument("--only-ours", action="store_true", help="leave the other graders out")
    options = parser.parse_args()
    count = len(read_rows())
    right = sum(bool(r["correct"]) for r in read_rows())
    print(f"| grader | right of {count} | right answers rejected of {right} "
          f"| wrong answers accepted of {count - right} |\n|---|---|---|---|")  # fmt: skip
    with Grader(workers=2, deadline=20.0) as grader:
        graders: dict[str, Callable[[str, str], bool]] = {
            "rpg_megatron": lambda response, answer: grader.submit(response, answer).result().correct
        }
        if not options.only_ours:
            graders |= {"math-verify alone": math_verify_alone, "DAPO's text rules": dapo}
        ours: list[dict[str, object]] = []
        for name, grade in graders.items():
            wrong = measure(grade)
            rejected = sum(bool(r["correct"]) for r in wrong)
            accepted = len(wrong) - rejected
            shares = f"{rejected} ({rejected / right:.1%}) | {accepted} ({accepted / (count - right):.1%})"
            print(f"| {name} | {count - len(wrong)} ({1 - len(wrong) / count:.1%}) | {shares} |")
            ours = ours or wrong
    if options.kinds:
        for (kind, correct), wrong_verdicts in sorted(
            Counter((str(r["kind"]), r["correct"]) for r in ours).items()
        ):
            print(f"{wrong_verdicts:4} {kind} ({'rejected' if correct else 'accepted'})")
    if options.rows:
        for r in ours:
            print(
                "rejected" if r["correct"] else "ACCEPTED",
                r["kind"],
                "|",
                r["reference"],
                "|",
                repr(r["response"])[-90:],
            )


if __name__ == "__main__":
    main()
