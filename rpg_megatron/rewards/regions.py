r"""Reads sets of real numbers: [1,2), 1 \le x < 2, |x| < 2, x \ne 2, {x : x > 3}, unions, intersections."""

from __future__ import annotations

import itertools
import re
from decimal import Context, Decimal
from fractions import Fraction
from typing import NamedTuple

from rpg_megatron.rewards.quantity import constant_value
from rpg_megatron.rewards.spelling import bracket_depths

type Bound = Fraction | None
"""None: infinity."""


class Atom(NamedTuple):
    """An interval; a point if both ends are the same and closed."""

    low: str
    closed_low: bool
    high: str
    closed_high: bool


class Region(NamedTuple):
    """A union of intervals. explicit: whether the text has no other meaning."""

    atoms: tuple[Atom, ...]
    explicit: bool


_REST = r"(?![A-Za-z])"
_SIGN = re.compile(rf"\\le{_REST}|\\ge{_REST}|\\ne{_REST}|<|>")
_INTERVAL = re.compile(r"([(\[\]])(.+)([)\]\[])")
_VARIABLE = re.compile(
    r"(?:[a-zA-Z]|\\(?:theta|alpha|beta|lambda|phi|omega|mu))(?:_(?:[a-zA-Z0-9]|\{[a-z0-9]+\}))?(?:\([a-z]\))?"
)
_BUILDER = re.compile(
    r"\\?\{\s*[a-zA-Z]\s*(?:\\in\s*\(-\\infty,\\infty\)\s*)?[:|]\s*(.+?)\s*\\?\}", re.DOTALL
)
_MEMBER = re.compile(r"[a-zA-Z](?:_\w)?\s*\\in(?![a-z])\s*(.+)", re.DOTALL)
_FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
_INFINITY = re.compile(r"([+-]?)\s*\\infty")
# Words join inequalities only: (1,2) and (3,4) are two points.
_CUP, _CAP = re.compile(r"\\cup(?![a-z])"), re.compile(r"\\cap(?![a-z])")
_OR = re.compile(r"\\cup(?![a-z])|\s*,?\s+or\s+|\\vee(?![a-z])")
_AND = re.compile(r"\\cap(?![a-z])|\s*,?\s+and\s+|\\wedge(?![a-z])")


def read_region(text: str) -> Region | None:
    """The region that a text describes; None for any other text."""
    text = text.strip()
    if not re.search(r"[<>\[\](|]|\\[lgn]e|\\c[ua]p|\\in", text):
        return None
    builder = _BUILDER.fullmatch(text)
    inner = builder[1] if builder else text
    member = _MEMBER.fullmatch(inner)
    if member:
        inner = member[1].strip()
    words = _SIGN.search(inner) is not None
    unions = re.split(_OR if words else _CUP, inner)
    atoms: list[Atom] = []
    explicit = builder is not None or len(unions) > 1
    for union in unions:
        both = re.split(_AND if words else _CAP, union)
        sides = [found for p in both if (found := _atoms(p.strip())) is not None]
        meet = _intersect(sides) if len(sides) == len(both) else None
        if meet is None:
            return None
        atoms += meet
        explicit = explicit or len(both) > 1 or _SIGN.search(union) is not None
    if atoms and all(a.low == a.high and a.closed_low for a in atoms):  # a set of numbers
        return None
    return Region(tuple(atoms), explicit)


def _atoms(text: str) -> list[Atom] | None:
    if text.startswith("\\{") and text.endswith("\\}"):
        items = text[2:-2].split(",")
        return [Atom(p.strip(), True, p.strip(), True) for p in items if p.strip()]
    if "\\setminus" in text:
        whole, _, points = text.partition("\\setminus")
        if whole.strip() == "(-\\infty,\\infty)" and (outside := _atoms(points.strip())) is not None:
            return _without([a.low for a in outside])
        return None
    signs = list(_SIGN.finditer(text))
    if signs:
        return _inequality(text, signs)
    match = _INTERVAL.fullmatch(text)
    if match is None:
        return None
    ends = _comma(match[2])
    if ends is None:
        return None
    low, high = bound(ends[0]), bound(ends[1])
    if low is not None and high is not None and low >= high:  # (3,1) is a point, no interval
        return None
    return [Atom(ends[0], match[1] == "[", ends[1], match[3] == "]")]


def _comma(text: str) -> tuple[str, str] | None:
    depths = bracket_depths(text)
    commas = [i for i, c in enumerate(text) if c in ",;" and depths[i] == 0]
    if len(commas) != 1 or min(depths) < 0:
        return None
    return text[: commas[0]].strip(), text[commas[0] + 1 :].strip()


def _inequality(text: str, signs: list[re.Match[str]]) -> list[Atom] | None:
    parts = [p.strip() for p in _SIGN.split(text)]
    names = [s[0] for s in signs]
    if len(names) == 1:
        left, right, sign = parts[0], parts[1], names[0]
        if _VARIABLE.fullmatch(right) and not _VARIABLE.fullmatch(left):
            left, right, sign = right, left, _FLIPPED.get(sign, sign)
        below, closed = sign in ("<", "\\le"), sign in ("\\le", "\\ge")
        above = Atom(right, closed, "\\infty", False)
        absolute = re.fullmatch(r"\|\s*(.+?)\s*\|", left)
        if absolute and _VARIABLE.fullmatch(absolute[1]):
            if below:
                return [Atom(f"-({right})", closed, right, closed)]
            return None if sign == "\\ne" else [Atom("-\\infty", False, f"-({right})", closed), above]
        if not _VARIABLE.fullmatch(left) or re.search(r"(?<![\\a-z])[a-zA-Z](?![a-z])", right):
            return None
        if sign == "\\ne":
            return _without([right])
        return [Atom("-\\infty", False, right, closed) if below else above]
    if len(names) == 2 and _VARIABLE.fullmatch(parts[1]):
        low, high, first, second = parts[0], parts[2], names[0], names[1]
        if first in (">", "\\ge"):
            low, high, first, second = high, low, _FLIPPED.get(second, ""), _FLIPPED.get(first, "")
        if first in ("<", "\\le") and second in ("<", "\\le"):
            return [Atom(low, first == "\\le", high, second == "\\le")]
    return None


def _without(points: list[str]) -> list[Atom] | None:
    values = sorted((v, p) for p in points if (v := bound(p)) is not None)
    if len(values) != len(points):
        return None
    ends = ["-\\infty", *(p for _, p in values), "\\infty"]
    return [Atom(a, False, b, False) for a, b in itertools.pairwise(ends)]


def bound(text: str) -> Fraction | None:
    """Value of an interval's end, with infinity as a very large number; None if it is not a constant. Forty
    digits of what is not rational, so that equal ends have equal values.
    """
    infinity = _INFINITY.fullmatch(text.strip())
    if infinity:
        return Fraction(-(10**300) if infinity[1] == "-" else 10**300)
    value = constant_value(text)
    return Fraction(Context(prec=40).plus(value)) if isinstance(value, Decimal) else value


def _intersect(parts: list[list[Atom]]) -> list[Atom] | None:
    meet = parts[0]
    for other in parts[1:]:
        result = []
        for a in meet:
            for b in other:
                ends = [e for text in (a.low, b.low, a.high, b.high) if (e := bound(text)) is not None]
                if len(ends) < 4:
                    return None
                low = max((ends[0], not a.closed_low, a.low), (ends[1], not b.closed_low, b.low))
                high = min((ends[2], a.closed_high, a.high), (ends[3], b.closed_high, b.high))
                atom = Atom(low[2], not low[1], high[2], high[1])
                if low[0] < high[0] or (low[0] == high[0] and atom.closed_low and atom.closed_high):
                    result.append(atom)
        meet = result
    return meet


def merge_intervals(region: Region) -> list[Atom] | None:
    """The region's intervals, sorted by value and joined if they touch; None if an end is not a constant."""
    pieces = []
    for atom in region.atoms:
        low, high = bound(atom.low), bound(atom.high)
        if low is None or high is None:
            return None
        if low < high or (low == high and atom.closed_low and atom.closed_high):
            pieces.append((low, not atom.closed_low, high, atom.closed_high, atom))
    result: list[Atom] = []
    last: tuple[Fraction, bool] | None = None
    """Value of the last interval's high end, and whether it is closed."""
    for low, opened, high, closed, atom in sorted(pieces):
        if last is None or low > last[0] or (low == last[0] and opened and not last[1]):
            result.append(atom)
            last = high, closed
        elif (high, closed) > last:
            result[-1] = result[-1]._replace(high=atom.high, closed_high=closed)
            last = high, closed
    return result
