"""Grades a response by its last ``Answer: ...`` line. Rules only: nothing is evaluated, no text can hang it.

Source: the RPG paper's grader for competition mathematics (arXiv 2505.17508, setup of DAPO): the last 300
characters, the last match, LaTeX and units taken off, then strings compared. Plain numbers are compared by
value as well, so that 18.0 is 18 and 1/2 is 0.5.
"""

from __future__ import annotations

import re
from fractions import Fraction

WINDOW = 300
"""Only so many characters at the end of a response are looked at."""
LONGEST_NUMBER = 64
"""A number of more characters is compared as text alone."""

_MARK = re.compile(r"answer[ \t]*:", re.IGNORECASE)
_WRAPPER = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_REMOVED = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;:()\[\] $]|[$`]")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = rf"[+-]?\s*(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\s*/\s*[+-]?[0-9]+)?"
# Letters that may as well be a variable (5m, 2g) need a space before them.
_UNITS = r"""
    \s*(?: \\?% | \^?\{?\\circ\}? | ° | degrees? | percent | dollars? | cents? | euros? | usd | feet | foot
         | (?:square\s+|cubic\s+)? (?: inch(?:es)? | ft | yards? | miles? | units?
                                     | (?:milli|centi|kilo)?met(?:er|re)s? | mm | cm | km )
         | (?:kilo)?grams? | kg | pounds? | lbs? | ounces? | oz | lit(?:er|re)s? | gallons?
         | seconds? | minutes? | hours? | days? | weeks? | months? | years? | mph | points? | people | ways )
    | \s+(?: m | g | l | s | h )
"""
_QUANTITY = re.compile(
    rf"(?P<number>{_NUMBER})(?:(?:{_UNITS})(?:\^?\{{?[23]\}}?)?)?".replace("\n", " "),
    re.IGNORECASE | re.VERBOSE,
)
_PLAIN = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:/([+-]?[0-9]+))?")


def grade(response: str, answer: str) -> bool:
    """Whether the last answer line of ``response`` says the same as ``answer``. Never raises on any text."""
    found = extract(response)
    return found is not None and same(found, answer)


def extract(response: str) -> str | None:
    """What follows the last ``Answer:`` (any case) on its line, as it stands; None if there is none.

    An ``Answer:`` with nothing on its line takes the next line that holds anything.
    """
    tail = response[-WINDOW:]
    for match in reversed(list(_MARK.finditer(tail))):
        rest = tail[match.end() :].lstrip(" \t\r\n*_")  # **Answer:** 5
        line = rest.split("\n", 1)[0].strip()
        if line:
            return line
    return None


def same(a: str, b: str) -> bool:
    """Whether two answers are the same after normalisation."""
    return canonical(a) == canonical(b)


def canonical(answer: str) -> str:
    """One spelling for all answers that count as the same: numbers as reduced fractions."""
    text = normalise(answer)
    number = as_number(text)
    return text if number is None else str(number)


def as_number(text: str) -> Fraction | None:
    """Value of a plain decimal or a/b of at most LONGEST_NUMBER characters; None for everything else.

    Exponents are not plain: 1e999999999 would take for ever to write out.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None


def normalise(answer: str) -> str:
    """Take off what does not change an answer.

    Gone are: dollars, boxes, LaTeX text and spacing, emphasis, a final full stop, spaces, the left side of an
    equation; of a number also its unit, separators of thousands and a plus. Capitals count, except in a plain
    word.
    """
    text = _REMOVED.sub("", answer.replace("\u2212", "-").replace("{,}", ",")).strip(" \t\r\n*_")
    # Each round opens the innermost braces; a bound on the rounds, since the text is anyone's.
    for _ in range(8):
        opened = _FRACTION.sub(_spell_fraction, _WRAPPER.sub(r"\1", text))
        if opened == text:
            break
        text = opened
    text = text.strip().rstrip(".,;: \t*_").strip()
    sides = _EQUALS.split(text)
    if len(sides) == 2 and sides[1].strip():
        text = sides[1].strip()
    quantity = _QUANTITY.fullmatch(text)
    if quantity is not None:
        text = quantity["number"].replace(",", "")
    text = "".join(text.split()).removeprefix("+")
    return text.lower() if text.isalpha() else text


def _spell_fraction(match: re.Match[str]) -> str:
    top = match[1] if match[1] is not None else match[2]
    bottom = match[3] if match[3] is not None else match[4]
    spelled = f"{_bracket(top)}/{_bracket(bottom)}"
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()  # 3\frac{1}{2} is not 31/2
    return f"({spelled})" if mixed else spelled


def _bracket(text: str) -> str:
    """A part of a fraction, in brackets unless it is a plain number."""
    text = text.strip()
    return text if _PLAIN.fullmatch(text) else f"({text})"
