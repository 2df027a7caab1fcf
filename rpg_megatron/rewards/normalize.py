r"""When two answers are the same without mathematics: spelling, numbers, units, lists, intervals.

The rules are in ``spelling`` (LaTeX, Unicode, Markdown), ``prose`` (words around an answer), ``units`` and
``quantity`` (one value), ``regions`` and ``reading`` (everything else); ``compare`` applies them.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rpg_megatron.rewards.compare import compare
from rpg_megatron.rewards.quantity import Quantity, as_number
from rpg_megatron.rewards.reading import Named, Option, read, read_part
from rpg_megatron.rewards.spelling import spell

__all__ = ["LONGEST", "answers_match", "as_number", "canonical", "is_simple", "normalise", "plain_number"]

LONGEST = 1000
"""An answer with more characters is compared without normalisation."""

_PLAIN = re.compile(
    r"\s*\\?\$?([+-]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]{1,64}))(?:\.(?:0{0,64}|([0-9]{1,64})))?\$?\s*"
)


def plain_number(answer: str) -> Fraction | int | None:
    """The value of digits alone, with a point or a sign; the quick way for most answers."""
    match = _PLAIN.fullmatch(answer) if len(answer) < 100 else None
    if match is None:
        return None
    whole = match[1].replace(",", "")
    return Fraction(f"{whole}.{match[2]}") if match[2] else int(whole)


def answers_match(a: str, b: str) -> bool:
    """Whether two answers are the same by rules alone."""
    if a.strip() == b.strip():
        return bool(a.strip())
    x, y = plain_number(a), plain_number(b)
    if x is not None and y is not None:
        return x == y
    return compare(b, a) is True


def is_simple(answer: str) -> bool:
    """Whether an answer is one plain number or words."""
    readings = read(answer)
    return all(isinstance(r, Quantity) and (r.number is not None or r.words) for r in readings)


def canonical(answer: str) -> str:
    """The same text for most answers that match; numbers become reduced fractions."""
    number = plain_number(answer)
    return str(number) if number is not None else normalise(answer)


def normalise(answer: str) -> str:
    """The value of an answer, without name, unit and spelling; other answers only in one spelling."""
    if len(answer) > LONGEST:
        return answer.strip()
    readings = read(answer)
    while readings and isinstance(readings[0], Named):
        readings = read_part(readings[0].value)
    first = readings[0] if readings else None
    if isinstance(first, Option):
        return first.letter
    if isinstance(first, Quantity):
        return first.text
    return re.sub(r"(?<!\w)\s|\s(?!\w)", "", spell(answer))
