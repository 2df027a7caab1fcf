"""Compares LaTeX answers with math-verify's parser and sympy. Only for worker processes: they may hang.

Answers are parsed as LaTeX, never by sympy's own parser, which evaluates Python. math-verify's comparison is
not used: it takes any two constants below 1e-15 for equal. Importing this module takes a second and warms up
the parser for workers that are forked later.
"""

from __future__ import annotations

import functools
import itertools
import logging
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from sympy.core.evalf import PrecisionExhausted  # type: ignore[import-untyped]

from rpg_megatron.rewards.compare import compare

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # warns that no timeout is set: the pool has one
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

# Units are off: it treats letters that may be variables (3+5m) as units. ``normalize`` handles units.
_LATEX = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
        )
    )
]


def equal(extracted: str, answer: str) -> bool:
    """Whether an answer agrees with the reference; math-verify compares expressions. May hang."""
    return compare(answer, extracted, _algebra) is True


def _algebra(a: str, b: str, equations: bool) -> bool:
    """Whether two expressions are equal; for equations, whether their differences are, up to a factor."""
    first = _parse(a)
    second = _parse(b) if first else []
    if not first or not second:
        return False
    x, y = first[0], second[0]
    if not equations:
        return _same_value(x, y)
    top, other = (sympy.numer(sympy.together(side.doit())) for side in (x, y))
    if top.free_symbols != other.free_symbols or not top.free_symbols:
        return False
    ratio = sympy.simplify(sympy.cancel(top / other))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


def _same_value(x: Any, y: Any) -> bool:
    """Whether two expressions are equal wherever both are real. What is not proved counts as different."""
    if x == y or not (isinstance(x, sympy.Expr) and isinstance(y, sympy.Expr)):
        return bool(x == y)
    difference = x - y
    symbols = sorted(difference.free_symbols, key=str)
    for numbers in _POINTS if symbols else _POINTS[:1]:
        point = {
            s: n * (1 + sympy.Rational(i, 7))
            for i, (s, n) in enumerate(zip(symbols, itertools.cycle(numbers)))
        }
        if _is_real(x, point) and _is_real(y, point) and _is_nonzero(difference, point):
            return False
    positive = difference.xreplace({s: sympy.Symbol(s.name, positive=True) for s in symbols}).doit()
    return bool(sympy.simplify(positive) == 0 or (not symbols and positive.equals(0)))


_POINTS = tuple(
    tuple(map(sympy.Rational, numbers))
    for numbers in (("3/5", "7/3"), ("9/4", "2/7"), ("-5/3", "-3/4"), ("-2/9", "8/5"))
)


def _is_real(expression: Any, point: dict[Any, Any]) -> bool:
    """Whether no root or logarithm in it is that of a negative number."""
    parts = [power.base for power in expression.atoms(sympy.Pow) if not power.exp.is_integer]
    parts += [logarithm.args[0] for logarithm in expression.atoms(sympy.log)]
    return not any(part.evalf(subs=point).is_negative for part in parts)


def _is_nonzero(expression: Any, point: dict[Any, Any]) -> bool:
    """Whether an expression is certainly not zero: with digits enough for a relative error of its value."""
    try:
        value = expression.evalf(15, subs=point, maxn=60 if point else 1000, strict=True)
    except PrecisionExhausted:
        return False
    return bool(value.is_number and value.is_finite and not value.is_zero)


@functools.lru_cache(256)  # a group's responses share the reference
def _parse(text: str) -> list[Any]:
    expressions: list[Any] = parse(
        f"${text}$",
        _LATEX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return expressions


for _a, _b in (
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("(1,2)", "x \\in [1,2]"),
    ("x^2", "(x+1)^2"),
):
    equal(_a, _b)
