"""Compare LaTeX answers with math-verify. For worker processes only, because some texts make it hang.

Answers go through the LaTeX parser, never through sympy's own parser, which evaluates Python. Importing this
module takes a second and warms up the parser for workers that are forked later.
"""

from __future__ import annotations

import functools
import logging
import re

from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse, verify

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
_DELIMITERS = re.compile(r"\\[()\[\]]|\$")


def equal(extracted: str, answer: str) -> bool:
    """Whether two LaTeX answers are mathematically equal. May hang or use all memory."""
    expected = _parse(answer)
    found = _parse(extracted) if expected else []
    return bool(found) and verify(expected, found, timeout_seconds=None)


@functools.lru_cache(256)  # a group's responses share the reference
def _parse(text: str) -> list[object]:
    inner = _DELIMITERS.sub(" ", text.replace("\u2212", "-")).strip(" \t\r\n*_.,;:")
    expressions: list[object] = parse(
        f"${inner}$",
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
