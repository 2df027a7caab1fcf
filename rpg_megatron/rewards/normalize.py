"""Normalise answers to a canonical form and compare them. Rules only: nothing is evaluated, no text can hang.

Follows the rule-based grader of the RPG paper (arXiv 2505.17508, after DAPO): remove LaTeX and units, then
compare strings. Plain numbers are also compared by value, so that 18.0 equals 18 and 1/2 equals 0.5.
"""

from __future__ import annotations

import re
from fractions import Fraction

LONGEST_NUMBER = 64
"""A number with more characters is compared as text only."""
LONGEST = 1000
"""An answer with more characters is compared without normalisation."""

_WRAPPER = re.compile(
    r"\\(?:boxed|fbox|text|textbf|textit|textrm|mathrm|mathbf|mbox|overline)\s*\{([^{}]*)\}"
)
_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_COMMAND = re.compile(r"\\[a-zA-Z]+")
_EQUALS = re.compile(r"(?<![<>!:=])=(?!=)")
_REMOVED = re.compile(r"\\(?:left|right|displaystyle)(?![a-zA-Z])|\\[,!;:()\[\] $]|[$`]")

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"
_NUMBER = rf"[+-]?\s*(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)(?:\s*/\s*[+-]?[0-9]+)?"
# Units that could also be a variable (5m, 2g) need a space before them.
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
# Words after a number that change its value or its meaning.
_COUNTING = (
    "dozen|hundred|thousand|million|billion|trillion|pair|score|half|halves|third|quarter|fifth|tenth"
    "|squared|cubed|factorial|and|plus|minus|times|mod|modulo|base|choose|over|divided|percentage|not|per"
)
_COUNTED = re.compile(
    rf"(?P<number>{_NUMBER})(?:\s+(?!(?:{_COUNTING})s?\b)[a-z]{{3,20}}){{1,2}}", re.IGNORECASE
)
_PLAIN = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:/([+-]?[0-9]+))?")


def answers_match(a: str, b: str) -> bool:
    """Whether two answers are the same after normalisation."""
    return canonical(a) == canonical(b) or _same_percentage(a, b)


def answers_differ(a: str, b: str) -> bool:
    r"""Whether two answers that do not match are certainly different, because they are numbers or words.

    Two letters may be a product: ab equals ba. Longer words are compared as words, not as products of
    letters. Commands that differ only in case are different, which math-verify misses: \Delta and \delta.
    """
    a, b = normalise(a), normalise(b)
    numbers = (as_number(a) is not None) + (as_number(b) is not None)
    if numbers == 2 or (numbers and any(len(x) > 2 and x.isalpha() for x in (a, b))):
        return True
    if a.lower() == b.lower():
        return _COMMAND.findall(a) != _COMMAND.findall(b)
    return a.isalpha() and b.isalpha() and max(len(a), len(b)) != 2


def canonical(answer: str) -> str:
    """Canonical form, the same for all answers that match; numbers become reduced fractions."""
    text = normalise(answer)
    number = as_number(text)
    return text if number is None else str(number)


def _same_percentage(a: str, b: str) -> bool:
    """Whether one is a percentage and the other its value: 50% and 0.5."""
    if len(a) > LONGEST or len(b) > LONGEST or ("%" in a) == ("%" in b):
        return False
    percent, plain = (as_number(normalise(x)) for x in ((a, b) if "%" in a else (b, a)))
    return percent is not None and plain is not None and percent == 100 * plain


def as_number(text: str) -> Fraction | None:
    """Value of a plain decimal or a/b of at most LONGEST_NUMBER characters; None for everything else.

    Exponents are not supported: 1e999999999 would take forever to write out.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None


def normalise(answer: str) -> str:
    """Remove what does not change the meaning of an answer.

    Removes dollar signs, boxes, LaTeX text and spacing commands, emphasis, a final full stop, spaces, and the
    left side of an equation; from a number also its unit, a counted noun (18 eggs), thousands separators and
    a plus sign. Case matters, except in a plain word. Longer texts than LONGEST are only stripped.
    """
    if len(answer) > LONGEST:
        return answer.strip()
    text = _REMOVED.sub("", answer.replace("\u2212", "-").replace("{,}", ",")).strip(" \t\r\n*_")
    # Each round unwraps the innermost braces; the number of rounds is bounded, because any text may come.
    for _ in range(8):
        unwrapped = _FRACTION.sub(_plain_fraction, _WRAPPER.sub(r"\1", text))
        if unwrapped == text:
            break
        text = unwrapped
    text = text.strip().rstrip(".,;: \t*_").strip()
    sides = _EQUALS.split(text)
    if len(sides) == 2 and sides[1].strip():
        text = sides[1].strip()
    quantity = _QUANTITY.fullmatch(text) or _COUNTED.fullmatch(text)
    if quantity is not None:
        text = quantity["number"].replace(",", "")
    text = "".join(text.split()).removeprefix("+")
    return text.lower() if text.isalpha() else text


def _plain_fraction(match: re.Match[str]) -> str:
    r"""\frac{a}{b} as a/b."""
    numerator = match[1] if match[1] is not None else match[2]
    denominator = match[3] if match[3] is not None else match[4]
    fraction = f"{_bracket(numerator)}/{_bracket(denominator)}"
    mixed = match.start() > 0 and match.string[match.start() - 1].isdigit()  # 3\frac{1}{2} is not 31/2
    return f"({fraction})" if mixed else fraction


def _bracket(text: str) -> str:
    """A numerator or denominator, in brackets unless it is a plain number."""
    text = text.strip()
    return text if _PLAIN.fullmatch(text) else f"({text})"
