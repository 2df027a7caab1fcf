r"""Compares LaTeX constants by value: \frac{\sqrt{3}}{2}, 4\pi, 2^{10} - 1, \frac{1}{25!}.

Sixty digits with a bound of their error take microseconds; math-verify takes milliseconds to simplify a
difference. Two constants differ if the bound says so, however small both are. They are equal if their
difference is smaller than any but zero of this form (``_Number.separation``), which may need more digits.
What needs too many, and what is not clearly a constant, is left to math-verify: decimals, which ``quantity``
writes as fractions, a number before a fraction or a bracket (a mixed number or a product), a slash before a
product.
"""

from __future__ import annotations

import decimal
import math
import re
from contextlib import AbstractContextManager
from decimal import Decimal
from typing import NamedTuple

MAX_CHARACTERS = 100
"""Maximum characters of a text that is parsed."""
_DIGITS, _MAX_DIGITS = 60, 2000
_MAX_FUNCTION_DIGITS = 300
"""Digits up to which roots other than square ones, powers of e and logarithms take milliseconds."""
_MAX_EXPONENT, _MAX_FACTORIAL = 10**6, 1000
_BITS_PER_DIGIT = math.log2(10)
_MARGIN = 200
"""Bits beyond the bound, for constants with pi, e or logarithms, of which no bound is known."""

_PI = Decimal(
    "3.141592653589793238462643383279502884197169399375105820974944592307816406286208998628034825342117067"
    "9821480865132823066470938446095505822317253594081284811174502841027019385211055596446229489549303819"
    "6442881097566593344612847564823378678316527120190914564856692346034861045432664821339360726024914127"
    "37245870066"
)

_TOKEN = re.compile(
    r"\s*(?:(?P<number>[0-9]{1,100})(?![0-9.,])"
    r"|(?P<command>\\(?:[dt]?frac|[dt]?binom|sqrt|pi|cdot|times|div|left|right|ln|log)(?![a-zA-Z]))"
    r"|(?P<sign>[-+/^(){}\[\]*|_!\u2212]|e(?![a-z]|(?<=[0-9]e)[-+]?[0-9])))"
)
_SPELT = {"\u2212": "-", "\\times": "*", "\\cdot": "*", "\\div": "/"}
_SPELT |= {f"\\{style}{name}": f"\\{name}" for style in "dt" for name in ("frac", "binom")}
_FACTORS = ("\\sqrt", "\\pi", "e", "\\ln", "\\log", "\\binom")
"""What may follow a factor without a sign."""


class _NotConstant(Exception):
    """The text is not clearly a constant."""


class _TooFewDigits(Exception):
    """With these digits it is open whether a divisor or the argument of a root or logarithm is zero."""


class _Number(NamedTuple):
    """A real number. Its operations use the digits of the current decimal context."""

    value: Decimal
    error: Decimal = Decimal(0)
    """Bound of the distance to the exact value."""
    upper: float = 0.0
    lower: float = 0.0
    """log2 of u and l: the number is a quotient of algebraic integers with conjugates of at most u and l."""
    roots: frozenset[tuple[int, str]] = frozenset()
    """Degree and radicand of each root in it; ``_FUNCTION`` for pi, e and logarithms."""

    def plus(self, b: _Number) -> _Number:
        upper = max(self.upper + b.lower, self.lower + b.upper) + 1
        return self._with(b, self.value + b.value, self.error + b.error, upper, self.lower + b.lower)

    def minus(self, b: _Number) -> _Number:
        return self.plus(b._replace(value=-b.value))

    def times(self, b: _Number) -> _Number:
        error = abs(self.value) * b.error + abs(b.value) * self.error + self.error * b.error
        return self._with(b, self.value * b.value, error, self.upper + b.upper, self.lower + b.lower)

    def over(self, b: _Number) -> _Number:
        value = self.value / b.nonzero.value
        error = (self.error + abs(value) * b.error) / (abs(b.value) - b.error)
        return self._with(b, value, error, self.upper + b.lower, self.lower + b.upper)

    def power(self, n: int) -> _Number:
        """To the nth power, by squaring."""
        if abs(n) > _MAX_EXPONENT:
            raise _NotConstant
        result, square, rest = _Number(Decimal(1)), self.nonzero, abs(n)
        while rest:
            result = result.times(square) if rest % 2 else result
            square, rest = square.times(square) if rest > 1 else square, rest // 2
        return _Number(Decimal(1)).over(result) if n < 0 else result

    def root(self, k: int, radicand: str) -> _Number:
        """The real kth root."""
        if not self.value and not self.error:
            return self
        if self.nonzero.value < 0:
            if k % 2 == 0:
                raise _NotConstant
            return self._replace(value=-self.value).root(k, radicand).times(_Number(Decimal(-1)))
        value = self.value.sqrt() if k == 2 else (_checked(self.value).ln() / k).exp()
        error = self.error * value / (self.value - self.error)
        low = min(self.upper, self.lower)
        upper, lower = ((bits + (k - 1) * low) / k for bits in (self.upper, self.lower))
        return self._with(_Number(value, roots=frozenset({(k, radicand)})), value, error, upper, lower)

    def exp(self) -> _Number:
        if abs(self.value) > _MAX_EXPONENT:
            raise _NotConstant
        if self.error > 1:
            raise _TooFewDigits
        value, size = _checked(self.value).exp(), 1.5 * abs(float(self.value)) + 2
        bits = max(self.upper, size), max(self.lower, size)
        return self._with(_FUNCTION, value, 2 * value * self.error, *bits)

    def ln(self) -> _Number:
        if self.nonzero.value < 0:
            raise _NotConstant
        error = self.error / (self.value - self.error)
        return self._with(_FUNCTION, _checked(self.value).ln(), error, self.upper + 1, self.lower)

    @property
    def nonzero(self) -> _Number:
        """The number itself, if it is certainly not zero."""
        if abs(self.value) <= 2 * self.error:
            raise _TooFewDigits if self.error else _NotConstant
        return self

    @property
    def integer(self) -> int | None:
        """Its exact value, if it is an integer; None for others."""
        if self.roots or max(self.upper, self.lower) > decimal.getcontext().prec:
            return None
        nearest = self.value.to_integral_value()
        apart = abs(self.value - nearest) + self.error  # at least 1 / denominator if it is no integer
        return int(nearest) if apart < Decimal(2) ** -math.ceil(self.lower + 1) else None

    @property
    def separation(self) -> int:
        """Bits: the number is 0 or its absolute value is above 2 ** -bits.

        Burnikel, Funke, Mehlhorn, Schirra and Schmitt (2001): the numerator has no more conjugates than the
        product of the degrees, and their product is an integer.
        """
        degree = math.prod(k for k, _ in self.roots)
        margin = _MARGIN if self.roots & _FUNCTION.roots else 1
        return math.ceil((degree - 1) * self.upper + self.lower) + margin

    def _with(self, b: _Number, value: Decimal, error: Decimal, upper: float, lower: float) -> _Number:
        error = (error + abs(value).scaleb(2 - decimal.getcontext().prec)) * _ROUNDED_UP
        return _Number(value, error, upper, lower, self.roots | b.roots)


_ROUNDED_UP = Decimal("1.01")
"""For the rounding of the bound itself."""
_FUNCTION = _Number(Decimal(0), roots=frozenset({(1, "")}))
_UNDECIDED = (_NotConstant, _TooFewDigits, decimal.DecimalException, RecursionError, OverflowError)


def compare_constants(a: str, b: str) -> bool | None:
    """Whether two constants are equal; None if one cannot be parsed here, or if it takes too many digits."""
    digits, most = _DIGITS, _MAX_DIGITS
    while True:
        try:
            with _precision(digits):
                x, y = _parse(a), _parse(b)
                gap = x.minus(y)
                if abs(gap.value) > gap.error:
                    return False
                bits = gap.separation
                if gap.error < Decimal(2) ** -(bits + 1):
                    return True
                whole = max(abs(x.value), abs(y.value)).adjusted()
                needed = max(2 * digits, int(bits / _BITS_PER_DIGIT) + max(whole, 0) + 10)
                most = _MAX_DIGITS if all(k == 2 for k, _ in gap.roots) else _MAX_FUNCTION_DIGITS
        except _TooFewDigits:
            needed = 4 * digits
        except _UNDECIDED:
            return None
        if digits >= most:
            return None
        digits = min(needed, most)


def value_of(text: str) -> Decimal | None:
    """Value of a constant to forty digits; None if the text is not clearly a constant."""
    if compare_constants(text, "0"):
        return Decimal(0)
    try:
        with _precision(_DIGITS):
            number = _parse(text).nonzero
            return number.value if number.error < abs(number.value).scaleb(-40) else None
    except _UNDECIDED:
        return None


def integer_value(text: str) -> int | None:
    """Value of a sum, product, power or factorial of whole numbers, of at most some thousand digits."""
    if re.fullmatch(r"(?:[-\d+*^!(){}\s]|\\cdot|\\times)+", text) is None:
        return None
    try:
        with _precision(30_000):
            return _parse(text).integer
    except _UNDECIDED:
        return None


def _precision(digits: int) -> AbstractContextManager[decimal.Context]:
    return decimal.localcontext(decimal.Context(prec=digits, Emax=10**9, Emin=-(10**9)))


def _parse(text: str) -> _Number:
    text = text.strip().strip("$").strip()
    if not text or len(text) > MAX_CHARACTERS:
        raise _NotConstant
    return _Parser(text).parse()


def _checked(value: Decimal) -> Decimal:
    """The value, for a function that takes long for many digits."""
    if decimal.getcontext().prec > _MAX_FUNCTION_DIGITS:
        raise _NotConstant
    return value


def _integer(n: int) -> _Number:
    value = +Decimal(n)
    return _Number(value, abs(value - Decimal(n)), math.log2(max(abs(n), 1)))


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
                self._tokens.append(_SPELT.get(token, token))
            position = match.end()
        self._index = 0

    def parse(self) -> _Number:
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

    def _sum(self) -> _Number:
        sign = self._take() if self._next() in ("+", "-") else "+"
        value = self._product() if sign == "+" else _integer(0).minus(self._product())
        while self._next() in ("+", "-"):
            value = value.plus(self._product()) if self._take() == "+" else value.minus(self._product())
        return value

    def _product(self) -> _Number:
        value, divided = self._power(), False
        while token := self._next():
            if token in ("*", "/"):
                if divided:  # a/b*c and a/b/c are ambiguous
                    raise _NotConstant
                self._take()
                factor = self._power()
                divided = token == "/"
                value = value.over(factor) if divided else value.times(factor)
            elif token in _FACTORS and not divided:
                value = value.times(self._power())
            elif token in ("+", "-", ")", "}", "]", "|"):
                break
            else:  # a number or a bracket after a factor: a mixed number, a product or an argument
                raise _NotConstant
        return value

    def _power(self) -> _Number:
        value = self._atom()
        if self._next() == "!":
            self._take()
            count = self._whole(value)
            if self._next() == "!":
                self._take()
                value = _integer(math.prod(range(count, 0, -2)))
            else:
                value = _integer(math.factorial(count))
        if self._next() == "^":
            self._take()
            exponent = self._argument()
            n = exponent.integer
            value = exponent.times(value.ln()).exp() if n is None else value.power(n)
        if self._next() in ("^", "!"):  # 2^3!, 2^{3}^{2}
            raise _NotConstant
        return value

    @staticmethod
    def _whole(value: _Number) -> int:
        n = value.integer
        if n is None or not 0 <= n <= _MAX_FACTORIAL:
            raise _NotConstant
        return n

    def _atom(self) -> _Number:
        token = self._take()
        if token.isdigit():
            return _integer(int(token))
        if token == "\\pi":
            return _Number(+_checked(_PI), upper=2.0)._with(_FUNCTION, +_PI, Decimal(0), 2.0, 0.0)
        if token == "e":
            return _integer(1).exp()
        if token == "|":
            value = self._sum()
            self._take("|")
            return value._replace(value=abs(value.value))
        if token == "\\ln":
            return self._logarithm()
        if token == "\\log":
            self._take("_")
            base = self._argument().ln()
            return self._logarithm().over(base)
        if token == "(":
            value = self._sum()
            self._take(")")
            return value
        if token == "\\frac":
            return self._argument().over(self._argument())
        if token == "\\binom":
            return _integer(math.comb(self._whole(self._argument()), self._whole(self._argument())))
        if token == "\\sqrt":
            degree = 2
            if self._next() == "[":
                self._take()
                degree = self._whole(self._sum())
                self._take("]")
            start = self._index
            value = self._argument()
            if not 2 <= degree <= 100:
                raise _NotConstant
            return value.root(degree, "".join(self._tokens[start : self._index]))
        raise _NotConstant

    def _logarithm(self) -> _Number:
        value = self._power().ln()
        if self._next() in _FACTORS:  # \ln 2\pi is that of 2, or of 2\pi
            raise _NotConstant
        return value

    def _argument(self) -> _Number:
        r"""A group, or one digit without braces, as in \sqrt2, \frac12 and 2^10."""
        token = self._take()
        if token == "{":
            value = self._sum()
            self._take("}")
            return value
        if len(token) != 1 or not token.isdigit():
            raise _NotConstant
        return _integer(int(token))
