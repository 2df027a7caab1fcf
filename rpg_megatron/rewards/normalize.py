"""Normal forms of answers: plain numbers, simple answers, and one text for most answers that are equal.

The rules are in ``spelling`` (LaTeX, Unicode, Markdown), ``prose`` (words around an answer), ``units`` and
``quantity`` (one value), ``regions`` and ``reading`` (all else); ``compare`` compares answers by them.
"""

from __future__ import annotations

import re
from fractions import Fraction

from rpg_megatron.rewards.quantity import Quantity
from rpg_megatron.rewards.reading import NamedValue, Option, read_answer, read_expression
from rpg_megatron.rewards.spelling import normalise_spelling

MAX_CHARACTERS = 1000
"""An answer with more characters is compared without normalisation."""

_PLAIN = re.compile(
    r"\s*\\?\$?([+-]?(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}|[0-9]{1,64}))(?:\.(?:0{0,64}|([0-9]{1,64})))?\$?\s*"
)


def plain_number(answer: str) -> Fraction | int | None:
    """The value of an answer that is only digits, with a sign or a decimal point; None for others. Fast."""
    match = _PLAIN.fullmatch(answer) if len(answer) < 100 else None
    if match is None:
        return None
    whole = match[1].replace(",", "")
    return Fraction(f"{whole}.{match[2]}") if match[2] else int(whole)


def is_simple(answer: str) -> bool:
    """Whether an answer is a plain number or words."""
    readings = read_answer(answer)
    return all(isinstance(r, Quantity) and (r.number is not None or r.words) for r in readings)


def canonical(answer: str) -> str:
    """A text that is the same for most answers that are equal; numbers become reduced fractions."""
    number = plain_number(answer)
    return str(number) if number is not None else normalise(answer)


def normalise(answer: str) -> str:
    """The value of an answer without name and unit; the text in normal spelling if it has no single value."""
    if len(answer) > MAX_CHARACTERS:
        return answer.strip()
    readings = read_answer(answer)
    while readings and isinstance(readings[0], NamedValue):
        readings = read_expression(readings[0].value)
    first = readings[0] if readings else None
    if isinstance(first, Option):
        return first.letter
    if isinstance(first, Quantity):
        return first.text
    return re.sub(r"(?<!\w)\s|\s(?!\w)", "", normalise_spelling(answer))
