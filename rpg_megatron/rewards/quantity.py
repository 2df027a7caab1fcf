r"""Reads one value with its unit: 36\pi cm^2, 2\frac{1}{2} hours, 0.\overline{3}, 4 \times 10^{3}, 25%."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from rpg_megatron.rewards import prose
from rpg_megatron.rewards.latex_numbers import value_of
from rpg_megatron.rewards.units import CURRENCY, GLUED, MULTIPLIERS, Unit, parse_unit

MAX_NUMBER_CHARACTERS = 64
"""A number with more characters is compared as text only."""
_MAX_EXPONENT = 400
_PLAIN = re.compile(r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:/([+-]?[0-9]+))?")


def as_number(text: str) -> Fraction | None:
    """Value of a plain decimal or a/b of at most MAX_NUMBER_CHARACTERS characters; None for everything else.

    Exponents are not supported, because 1e999999999 would have too many digits.
    """
    if len(text) > MAX_NUMBER_CHARACTERS:
        return None
    match = _PLAIN.fullmatch(text)
    if match is None:
        return None
    if text.isdigit():
        return Fraction(int(text))
    denominator = Fraction(match[2]) if match[2] else Fraction(1)
    return Fraction(match[1]) / denominator if denominator else None


class Quantity(NamedTuple):
    """A value."""

    text: str
    """Without unit; number words and mixed numbers as numbers."""
    number: Fraction | None
    """Exact value if it is rational and written plainly; else None."""
    unit: Unit | None
    percent: bool
    """Whether it is a percentage."""
    words: bool
    """Whether the value is words and not mathematics."""


_MIXED = re.compile(
    r"(-?)\s*(\d+)(?:\s+and\s+|\s+|\s*(?=\\frac))(?:\\frac\s*\{(\d+)\}\s*\{(\d+)\}|(\d+)\s?/\s?(\d+))(?![\d^])"
)
_MIXED_IN = re.compile(r"(?<![\w.}\\^/*)])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}(?![\d^])")
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)(?:\\(?:overline|bar)\s*\{(\d+)\}|\((\d+)\))(?:\.\.\.)?")
_DOTS = re.compile(r"(-?)(\d*)\.(\d{2,})\s*\.\.\.")
_DOT = re.compile(r"(-?)(\d*)\.(\d*)\\dot\s*\{?(\d)\}?(?:(\d*)\\dot\s*\{?(\d)\}?)?")
_POWER_OF_TEN = re.compile(
    r"(?:(-?[\d.]+(?:/\d+)?)\s*(?:\\times|\\cdot|\*)\s*|(-?))10\^(?:\{\s*([+-]?\d{1,4})\s*\}|(\d))"
)
_PLAIN_FRACTION = re.compile(r"(-?)\s*\\frac\{\s*([+-]?\d+(?:\.\d+)?)\s*\}\{\s*([+-]?\d+(?:\.\d+)?)\s*\}")
_DECIMAL = re.compile(r"(?<![\d.])(\d*)\.(\d+)(?![\d.])")
_BEFORE_NUMBER = re.compile(r"(?:(?<![A-Za-z\\])\w\^\{[^{}]*\}|!)(?=\s*\d)|(?<![\w^_.])\d+(?=\(\d+\))")
"""math-verify reads e^{-40}40^3 as one with 4 and 0^3, and 2(3) as a mixed number."""
_VALUE_END = re.compile(r"[\d)}\]|!]$|\\pi$|\\infty$|[a-z]$")
_LETTER = re.compile(r"(?<![\\A-Za-z])[A-Za-z](?![A-Za-z])")
_UNITS_OF_ANYTHING = re.compile(r"(?:square |cubic |sq\.? )?units?(?: squared| cubed|\s?\^\d)?")
_WORDS = re.compile(r"[A-Za-z][A-Za-z' .,:-]*")


def read_quantity(text: str) -> Quantity:
    """Read a text in normal spelling as one value."""
    text = text.strip()
    if not text.isascii() or not text.isdigit():
        text = GLUED.sub(" ", text) if text[:1] in "0123456789-." else text
        value, unit, percent, factor = _without_unit(text)
        return _quantity(value, unit, percent, factor)
    return Quantity(text, as_number(text), None, False, False)


def _quantity(value: str, unit: Unit | None, percent: bool, factor: Fraction) -> Quantity:
    spelt = value.lower().removeprefix("-").strip()
    if spelt in prose.NUMBERS:
        value = f"{'-' if value.startswith('-') else ''}{prose.NUMBERS[spelt]}"
    number = exact(value)
    if number is not None:
        number *= factor
        return Quantity(str(number), number, unit, percent, False)
    if factor != 1:
        value = f"{factor} \\cdot ({value})"
    words = _WORDS.fullmatch(value) is not None and re.search(r"[A-Za-z]{4}|[A-Z]{2}| ", value) is not None
    return Quantity(prose.canonical_words(value) if words else compact(value), None, unit, percent, words)


def _without_unit(text: str) -> tuple[str, Unit | None, bool, Fraction]:
    """Split a text into: value, unit, whether it is a percentage, factor of a multiplier such as "dozen"."""
    one = Fraction(1)
    text = re.sub(r"(?<=\d )(pairs?|couples?) of [a-z ]+$", r"\1", text)
    currency = re.fullmatch(rf"(-?)\s*([{CURRENCY}])\s*(-?[\d.,]+.*)", text)
    if currency:
        value, unit, percent, factor = _without_unit(currency[1] + currency[3])
        return value, parse_unit(currency[2]) if unit is None else None, percent, factor
    percentage = re.fullmatch(r"(.*?[\d})])\s*(?:%|percent|per cent|percentage points?)", text)
    if percentage:
        return percentage[1], None, True, one
    match = re.fullmatch(r"(.+?)\s*(\^\s*\{?\\circ\s*\}?\s*[CF]?|[" + CURRENCY + r"]|(?<=\d)'{1,2})", text)
    if match and parse_unit(match[2]):
        return match[1].strip(), parse_unit(match[2]), False, one
    spaces = [m.start() for m in re.finditer(" ", text)][:12]
    for space in spaces:
        head, tail = text[:space].rstrip(), text[space:].strip()
        if (
            head.count("{") != head.count("}")
            or not _VALUE_END.search(head)
            or (not re.search(r"\d|\\pi|\\infty", head) and head.lower() not in prose.NUMBERS)
        ):
            continue
        if len(tail) == 1 and _LETTER.search(head):  # in \pi r^2 h, h does not mean hours
            continue
        if _UNITS_OF_ANYTHING.fullmatch(tail):
            return head, None, False, one
        unit = parse_unit(tail)
        if unit is not None:
            return head, unit, False, one
        if "\\" in tail or (not tail[:1].isalpha() and tail[:1] != "-"):
            continue
        rest = prose.drop_nouns(tail)
        if rest == "":
            leading = re.match(r"((?:square |cubic )?[A-Za-z/]+)\b", tail)
            return head, parse_unit(leading[1]) if leading and len(leading[1]) > 2 else None, False, one
        if rest is not None:
            key = prose.multiplier(rest)
            return (head, None, False, MULTIPLIERS[key]) if key else (head, parse_unit(rest), False, one)
    return text, None, False, one


def exact(text: str) -> Fraction | None:
    r"""The rational number in a text such as 0.5, 3/4, \frac34, 0.\overline{3}; None for others."""
    text = text.strip()
    number = as_number(
        text.replace("+", "", 1)
        if text.startswith("+")
        else re.sub(r"\s*/\s*|(?<=^-)\s+", lambda m: m[0].strip(), text)
    )
    if number is not None or len(text) > 80:
        return number
    if match := _PLAIN_FRACTION.fullmatch(text):
        top, bottom = as_number(match[2]), as_number(match[3])
        return None if top is None or not bottom else (-1 if match[1] else 1) * top / bottom
    if match := _MIXED.fullmatch(text):
        n, d = int(match[3] or match[5]), int(match[4] or match[6])
        return (-1 if match[1] else 1) * (int(match[2]) + Fraction(n, d)) if d else None
    if match := _POWER_OF_TEN.fullmatch(text):
        exponent = int(match[3] or match[4])
        mantissa = as_number(match[1]) if match[1] else Fraction(-1 if match[2] else 1)
        return (
            None if mantissa is None or abs(exponent) > _MAX_EXPONENT else mantissa * Fraction(10) ** exponent
        )
    return _repeating(text)


def _repeating(text: str) -> Fraction | None:
    r"""0.1\\overline{6}, 0.(3), 0.\\dot{3}, 0.1666..."""
    if match := _REPEATING.fullmatch(text):
        fixed, period = match[3], match[4] or match[5]
    elif match := _DOT.fullmatch(text):
        fixed, period = match[3], match[4] + (match[5] or "") + (match[6] or "")
    elif match := _DOTS.fullmatch(text):
        digits = match[3]
        for length in range(1, len(digits) // 2 + 1):  # the shortest period that fills the end at least twice
            period = digits[-length:]
            start = len(digits)
            while start >= length and digits[start - length : start] == period:
                start -= length
            if (len(digits) - start) // length >= 2:
                break
        else:
            return None
        fixed = digits[:start]
    else:
        return None
    nines = 10 ** len(period) - 1
    value = Fraction(int(match[2] or "0")) + Fraction(
        int(fixed or "0") * nines + int(period), 10 ** len(fixed) * nines
    )
    return -value if match[1] else value


def compact(text: str) -> str:
    """Remove spaces without meaning; write decimals and mixed numbers as fractions; dots in some products."""
    text = _MIXED_IN.sub(lambda m: f"\\frac{{{int(m[1]) * int(m[3]) + int(m[2])}}}{{{m[3]}}}", text)
    text = _BEFORE_NUMBER.sub(r"\g<0> \\cdot ", text)
    if "." in text:
        text = _DECIMAL.sub(_as_fraction, text)
    text = (
        re.sub(r"(?<!\w)\s+|\s+(?!\w)|(?<=\d)\s+(?=[A-Za-z])|(?<=[a-z])\s+(?=\d)(?<!\\[a-z]\s)", "", text)
        if " " in text and "\\" not in text
        else re.sub(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+", "", text)
    )
    return text.removeprefix("+")


def _as_fraction(match: re.Match[str]) -> str:
    value = Fraction(f"{match[1] or 0}.{match[2]}")
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)


def constant_value(text: str) -> Decimal | Fraction | None:
    """Value of a constant, to sixty digits; None if the text is not clearly a constant."""
    number = exact(text)
    return number if number is not None else value_of(compact(text))
