r"""Compares LaTeX constants by value: \frac{\sqrt{3}}{2}, 4\pi, 2^{10} - 1.

Comparing 60 digits takes microseconds; math-verify takes milliseconds to simplify a difference. Expressions
that are not clearly constants are left to math-verify: decimals (it rounds some), a number before a fraction
or a bracket (a mixed number or a product), a slash before a product.
"""

from __future__ import annotations

import decimal
import re
from decimal import Decimal

MAX_CHARACTERS = 100
"""Maximum characters of a text that is parsed."""
_DIGITS = 60
_CONTEXT = decimal.Context(prec=_DIGITS, Emax=4000, Emin=-4000)
_EQUAL, _CLEAR = Decimal("1e-45"), Decimal("1e-25")
"""Relative differences: up to the first, values are equal; above the second, they differ."""
_MIN_SUM = Decimal("1e-6")
"""Smallest sum relative to its largest term; below it, cancellation may leave only rounding errors."""
_MAX_EXPONENT = 64
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,20})(?![0-9.,])"
    r"|(?P<command>\\(?:[dt]?frac|sqrt|pi|cdot|times|left|right|ln|log)(?![a-zA-Z]))"
    r"|(?P<sign>[-+/^(){}\[\]*|_\u2212]|e(?![a-z])))"
)


class _NotConstant(Exception):
    """The text is not clearly a constant."""


def compare_constants(a: str, b: str) -> bool | None:
    """Whether two constants are equal; None if one cannot be parsed here, or if they are too close."""
    x, y = value_of(a), value_of(b)
    if x is None or y is None:
        return None
    scale = max(abs(x), abs(y))
    gap = _CONTEXT.subtract(x, y).copy_abs()
    if gap <= scale * _EQUAL:
        return True
    return False if gap > scale * _CLEAR else None


def value_of(text: str) -> Decimal | None:
    """Value of a constant to sixty digits; None if the text is not clearly a constant."""
    text = text.strip().strip("$").strip()
    if not text or len(text) > MAX_CHARACTERS:
        return None
    try:
        with decimal.localcontext(_CONTEXT):
            return _Parser(text).parse()
    except (_NotConstant, decimal.DecimalException, RecursionError):
        return None


class _Parser:
    """Recursive-descent parser; raises _NotConstant for any other text."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        position = 0
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                raise _NotConstant
            token = match[match.lastgroup or 0]
            if token not in ("\\left", "\\right"):
                self._tokens.append(
                    {"\u2212": "-", "\\dfrac": "\\frac", "\\tfrac": "\\frac"}.get(token, token)
                )
            position = match.end()
        self._index = 0

    def parse(self) -> Decimal:
        """The value of the text."""
        value = self._sum()
        if self._index != len(self._tokens):
            raise _NotConstant
        return value

    def _next(self) -> str:
        return self._tokens[self._index] if self._index < len(self._tokens) else ""

    def _take(self, *expected: str) -> str:
        token = self._next()
        if not token or (expected and token not in expected):
            raise _NotConstant
        self._index += 1
        return token

    def _sum(self) -> Decimal:
        value = largest = Decimal(0)
        sign = self._take() if self._next() in ("+", "-") else "+"
        while True:
            term = self._product()
            value = value + term if sign == "+" else value - term
            largest = max(largest, abs(term))
            if self._next() not in ("+", "-"):
                break
            sign = self._take()
        if value and abs(value) < largest * _MIN_SUM:
            raise _NotConstant
        return value

    def _product(self) -> Decimal:
        value, divided = self._power(), False
        while token := self._next():
            if token in ("*", "\\cdot", "\\times", "/"):
                if divided:  # a/b*c and a/b/c are ambiguous
                    raise _NotConstant
                self._take()
                factor = self._power()
                divided = token == "/"
                value = value / factor if divided else value * factor
            elif token in ("\\sqrt", "\\pi", "e", "\\ln") and not divided:
                value *= self._power()
            elif token in ("+", "-", ")", "}", "]", "|"):
                break
            else:  # a number or a bracket after a factor: a mixed number, a product or an argument
                raise _NotConstant
        return value

    def _power(self) -> Decimal:
        value = self._atom()
        if self._next() != "^":
            return value
        self._take()
        exponent = self._group() if self._next() == "{" else self._digit()
        if self._next() == "^" or exponent != exponent.to_integral_value():
            raise _NotConstant
        if abs(exponent) > _MAX_EXPONENT or not value:
            raise _NotConstant
        return value ** int(exponent)

    def _atom(self) -> Decimal:
        token = self._take()
        if token.isdigit():
            return Decimal(token)
        if token == "\\pi":
            return +_PI
        if token == "e":
            return Decimal(1).exp()
        if token == "|":
            value = abs(self._sum())
            self._take("|")
            return value
        if token == "\\ln":
            return self._power().ln()
        if token == "\\log":
            self._take("_")
            base = self._group() if self._next() == "{" else self._digit()
            return self._power().ln() / base.ln()
        if token == "(":
            value = self._sum()
            self._take(")")
            return value
        if token == "\\frac":
            return self._argument() / self._argument()
        if token == "\\sqrt":
            degree = Decimal(2)
            if self._next() == "[":
                self._take()
                degree = self._sum()
                self._take("]")
            value = self._argument()
            if value < 0:
                if degree not in (3, 5):
                    raise _NotConstant
                return -((-value).ln() / degree).exp()  # the real root
            if degree == 2:
                return value.sqrt()
            if degree not in (3, 4, 5, 6) or not value:
                raise _NotConstant
            return (value.ln() / degree).exp()
        raise _NotConstant

    def _argument(self) -> Decimal:
        return self._group() if self._next() == "{" else self._digit()

    def _group(self) -> Decimal:
        self._take("{")
        value = self._sum()
        self._take("}")
        return value

    def _digit(self) -> Decimal:
        r"""One digit without braces, as in \sqrt2, \frac12 and 2^10."""
        token = self._take()
        if len(token) != 1 or not token.isdigit():
            raise _NotConstant
        return Decimal(token)
