"""Compares LaTeX answers with math-verify. Only for worker processes, because it hangs on some texts.

Answers are parsed as LaTeX, never by sympy's own parser, which evaluates Python. Importing this module takes
a second and warms up the parser for workers that are forked later.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import sympy  # type: ignore[import-untyped]
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

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
        return bool(verify(x, y, timeout_seconds=None))
    top, other = (sympy.numer(sympy.together(side.doit())) for side in (x, y))
    if top.free_symbols != other.free_symbols or not top.free_symbols:
        return False
    ratio = sympy.simplify(sympy.cancel(top / other))
    return bool(ratio.is_number and ratio.is_finite and not ratio.is_zero)


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
