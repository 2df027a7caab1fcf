"""Equality of LaTeX answers by math-verify. For worker processes only: no text is too odd for it to hang on.

Answers go through the LaTeX parser, never through sympy's own, which evaluates Python. Importing this takes a
second and warms that parser up, so that workers which are forked later start warm.
"""

from __future__ import annotations

import functools
import logging
import re

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns that we set no alarms: the pool does
logging.getLogger("latex2sympy2_extended").setLevel(logging.CRITICAL)

# Units are off: it takes letters that may be variables (3+5m) for units. ``spelling`` knows ours.
_LATEX = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
        )
    )
]
_DELIMITERS = re.compile(r"\\[()\[\]]|\$")


def equal(extracted: str, answer: str) -> bool:
    """Whether two answers in LaTeX are the same mathematically. May take for ever, or all memory."""
    wanted = _parse(answer)
    given = _parse(extracted) if wanted else []
    return bool(given) and verify(wanted, given, timeout_seconds=None)


@functools.lru_cache(256)  # a group's responses share the reference
def _parse(text: str) -> list[object]:
    inner = _DELIMITERS.sub(" ", text.replace("\u2212", "-")).strip(" \t\r\n*_.,;:")
    found: list[object] = parse(
        f"${inner}$",
        _LATEX,
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found


for _a, _b in (
    ("\\frac{1}{\\sqrt{2}}", "\\frac{\\sqrt{2}}{2}"),
    ("(1,2)", "x \\in [1,2]"),
    ("x^2", "(x+1)^2"),
):
    equal(_a, _b)
