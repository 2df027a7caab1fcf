r"""Compares two answers by their readings. Results are True, False, or None (math-verify must decide).

The function ``algebra`` compares two expressions or two equations; without it, the result for these is None.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from typing import Any

from rpg_megatron.rewards.latex_numbers import compare_constants
from rpg_megatron.rewards.notations import Clock, Congruence, Ratio, read_clock, residues_of, same_time
from rpg_megatron.rewards.quantity import Quantity, compact, read_quantity
from rpg_megatron.rewards.reading import (
    BasedNumber,
    Collection,
    Matrix,
    NamedValue,
    Option,
    Reading,
    Relation,
    read_answer,
    read_expression,
)
from rpg_megatron.rewards.regions import Region, merge_intervals
from rpg_megatron.rewards.units import same_unit

type Algebra = Callable[[str, str, bool], bool]
"""(first, second, whether they are equations, given as differences of their sides) -> whether they are equal.
"""

# Text that math-verify may get: plain algebra. No words, no relations, no unknown commands.
_ALGEBRA = re.compile(
    r"(?:\\(?:frac|sqrt|cdot|times|div|pi|binom|sin|cos|tan|sec|csc|cot|arcsin|arccos|arctan|sinh|cosh|tanh|ln|log|exp"
    r"|alpha|beta|gamma|delta|epsilon|theta|lambda|mu|rho|sigma|phi|psi|tau|omega|Delta|Omega|Gamma|infty"
    r"|lfloor|rfloor|lceil|rceil)(?![A-Za-z])"
    r"|(?<![A-Za-z])(?!(?:of|to|is|or|and|out|the|not|for|per)(?![A-Za-z]))"
    r"[A-Za-z]{1,3}(?![A-Za-z])|[0-9+\-*/^_(){}\[\]|!,']|(?<!\d) | (?!\d))+"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_OPERATORS = re.compile(r"\\(?:sum|prod|int|lim)")


def compare(expected: str, answer: str, algebra: Algebra | None = None) -> bool | None:
    """Whether an answer agrees with the reference; both are verbatim texts."""
    return _any(_agree(a, b, algebra) for a in read_answer(expected) for b in read_answer(answer))


def _compare_texts(expected: str, answer: str, algebra: Algebra | None) -> bool | None:
    """``compare`` for two texts in normal spelling."""
    if expected == answer:
        return True
    return _any(_agree(a, b, algebra) for a in read_expression(expected) for b in read_expression(answer))


def _any(verdicts: Iterable[bool | None]) -> bool | None:
    result: bool | None = False
    for verdict in verdicts:
        if verdict:
            return True
        if verdict is None:
            result = None
    return result


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    denied = _any(None if verdict is None else not verdict for verdict in verdicts)
    return None if denied is None else not denied


def _agree(a: Reading, b: Reading, algebra: Algebra | None) -> bool | None:
    for kind, how_many, rule in _RULES:
        if how_many(isinstance(reading, kind) for reading in (a, b)):
            return rule(a, b, algebra)
    return False


def _named_values(a: Any, b: Any, algebra: Algebra | None) -> bool | None:
    """X = 5 equals 5, and x = 5, but not y = 5 unless the equations are the same."""
    named = [side for side in (a, b) if isinstance(side, NamedValue)]
    if len(named) == 2 and (a.name == b.name or not a.name or not b.name):
        checks = _checks_hold(a, algebra), _checks_hold(b, algebra)
        return _all((*checks, _compare_texts(a.value, b.value, algebra)))
    if all(isinstance(side, NamedValue | Relation) for side in (a, b)):
        x, y = (Relation(n.name, "=", n.value) if isinstance(n, NamedValue) else n for n in (a, b))
        return _relations(x, y, algebra)
    first, second = (read_expression(n.value) if isinstance(n, NamedValue) else (n,) for n in (a, b))
    checked = _checks_hold(named[0], algebra)
    return _all((checked, _any(_agree(x, y, algebra) for x in first for y in second)))


def _checks_hold(named: NamedValue, algebra: Algebra | None) -> bool | None:
    return _all(_compare_texts(named.value, check, algebra) for check in named.checks)


def _options(a: Any, b: Any, algebra: Algebra | None) -> bool | None:
    option, other = _in_order(Option, a, b)
    if isinstance(other, Option):
        if a.letter != b.letter:
            return False
        return not a.text or not b.text or a.text == b.text or _compare_texts(a.text, b.text, algebra)
    if not option.text:
        return isinstance(other, Quantity) and other.text == option.letter.lower() == other.text.lower()
    return _any(_agree(r, other, algebra) for r in read_expression(option.text))


def _based_numbers(a: Any, b: Any, _: Algebra | None) -> bool:
    r"""An answer may omit the reference's base. With a base, it may have the value of a plain reference."""
    if isinstance(a, BasedNumber):
        return bool(a == b) or (isinstance(b, Quantity) and b.text.upper() == a.digits)
    try:
        return isinstance(a, Quantity) and a.number is not None and a.number == int(b.digits, b.base)
    except ValueError:
        return False


def _ratios(a: Any, b: Any, algebra: Algebra | None) -> bool | None:
    """Ratios agree if they are proportional, but 2:40 and 1:20 are times; 9:16 is also the fraction 9/16."""
    ratio, other = _in_order(Ratio, a, b)
    if isinstance(other, Ratio):
        if len(a.parts) != len(b.parts) or (read_clock(":".join(a.parts)) and read_clock(":".join(b.parts))):
            return bool(a == b)
        pairs = itertools.pairwise(zip(a.parts, b.parts, strict=True))
        return _all(
            _compare_texts(f"({p}) \\cdot ({t})", f"({q}) \\cdot ({s})", algebra) for (p, q), (s, t) in pairs
        )
    if len(ratio.parts) != 2 or not isinstance(other, Quantity) or not re.search(r"/|\\frac", other.text):
        return False
    return _compare_texts(other.text, f"\\frac{{{ratio.parts[0]}}}{{{ratio.parts[1]}}}", algebra)


def _congruences(a: Any, b: Any, _: Algebra | None) -> bool:
    """The same residues by the same modulus, of the same name if both have one. A remainder is a number."""
    congruence, other = _in_order(Congruence, a, b)
    if isinstance(other, Congruence):
        if a.modulus != b.modulus or (a.left != b.left and a.left and b.left):
            return False
        return residues_of(a.residues, a.modulus) == residues_of(b.residues, b.modulus)
    if not isinstance(other, Quantity) or other.number is None or (congruence is a and a.left):
        return False  # x \\equiv 3 \\pmod 7 as the reference is more than 3
    return bool(congruence.residues == str(other.number) and 0 <= other.number < congruence.modulus)


def _in_order[T](kind: type[T], a: Any, b: Any) -> tuple[T, Any]:
    """The two readings, of which one is of this kind: that one first."""
    return (a, b) if isinstance(a, kind) else (b, a)


def _quantities(a: Quantity, b: Quantity, algebra: Algebra | None) -> bool | None:
    if not same_unit(a.unit, b.unit):
        return False
    if a.percent != b.percent:  # 25% equals 25 and also 0.25; but 0.05, a fraction, does not equal 0.05%
        percent, plain = (a, b) if a.percent else (b, a)
        fraction = read_quantity(f"\\frac{{{percent.text}}}{{100}}")
        if percent.number is not None:
            fraction = read_quantity(str(percent.number / 100))
        if b.percent and a.number is not None and 0 < abs(a.number) < 1:
            return _values(a, fraction, algebra)
        return _any((_values(percent, plain, algebra), _values(fraction, plain, algebra)))
    return _values(a, b, algebra)


def _values(a: Quantity, b: Quantity, algebra: Algebra | None) -> bool | None:
    if a.text == b.text:
        return bool(a.text)
    if a.number is not None and b.number is not None:
        return a.number == b.number
    if a.words or b.words:
        if not (a.words and b.words):
            return _same_label(a.text, b.text)
        return a.text.replace(" ", "") == b.text.replace(" ", "") or _same_product(a.text, b.text)
    if len(a.text) == len(b.text) == 1 and a.text.lower() == b.text.lower():
        return True
    if a.text.lower() == b.text.lower() and _COMMAND.findall(a.text) != _COMMAND.findall(b.text):
        return False  # math-verify does not distinguish \\Delta from \\delta
    if "\\infty" in a.text or "\\infty" in b.text:
        return False
    equal = compare_constants(a.text, b.text)
    if equal is not None:
        return equal
    if not all(_ALGEBRA.fullmatch(q.text) and not _OPERATORS.search(q.text) for q in (a, b)):
        return False
    return None if algebra is None else algebra(a.text, b.text, False)


def _same_label(a: str, b: str) -> bool:
    r"""Whether two labels are equal, one of which is written as mathematics: \\text{H}_2\\text{O}, 11:30."""
    return re.sub(r"[\s{}]", "", a) == re.sub(r"[\s{}]", "", b)


def _same_product(a: str, b: str) -> bool:
    """Whether two products of lower-case letters differ only in order: ab and ba."""
    short = a.isalpha() and b.isalpha() and max(len(a), len(b)) <= 3 and a.islower() and b.islower()
    return short and sorted(a) == sorted(b) and {a, b} != {"no", "on"}


def _collections(a: Collection, b: Collection, algebra: Algebra | None) -> bool | None:
    if (a.kind == "tuple") != (b.kind == "tuple") or len(a.items) != len(b.items):
        return False
    if a.kind == "tuple":
        return _all(_compare_texts(x, y, algebra) for x, y in zip(a.items, b.items, strict=True))
    rest, result = list(b.items), True
    for x in a.items:
        verdicts = [_compare_texts(x, y, algebra) for y in rest]
        if True in verdicts:
            rest.pop(verdicts.index(True))
        elif None in verdicts:
            result = False  # undecided
        else:
            return False
    return True if result else None


def _matrices(a: Any, b: Any, algebra: Algebra | None) -> bool | None:
    """A matrix of one column or row may be written as a tuple."""
    matrix, other = _in_order(Matrix, a, b)
    if isinstance(other, Matrix):
        if [len(r) for r in a.rows] != [len(r) for r in b.rows]:
            return False
        return _all(_compare_texts(x, y, algebra) for x, y in zip(_cells(a), _cells(b), strict=True))
    if not isinstance(other, Collection) or other.kind != "tuple":
        return False
    if len(matrix.rows) != 1 and any(len(row) != 1 for row in matrix.rows):
        return False
    return _collections(Collection("tuple", tuple(_cells(matrix))), other, algebra)


def _cells(matrix: Matrix) -> list[str]:
    cells = [cell for row in matrix.rows for cell in row]
    return [f"({matrix.factor}) \\cdot ({cell})" for cell in cells] if matrix.factor else cells


def _regions(a: Region, b: Region, algebra: Algebra | None) -> bool | None:
    first, second = merge_intervals(a), merge_intervals(b)
    if first is None or second is None:  # an end with a letter
        first, second = list(a.atoms), list(b.atoms)
        if len(first) != 1:
            return False
    ends = [[(t.closed_low, t.closed_high) for t in atoms] for atoms in (first, second)]
    if not first or ends[0] != ends[1]:
        return False
    return _all(
        _compare_texts(p, q, algebra)
        for x, y in zip(first, second, strict=True)
        for p, q in ((x.low, y.low), (x.high, y.high))
    )


def _relations(a: Relation, b: Relation, algebra: Algebra | None) -> bool | None:
    """Equations are equal if they have the same solutions, as 2x + 2y = 4 and y = 2 - x; inequalities if
    their sides are equal.
    """
    if a.sign != b.sign:
        return False
    if a.sign != "=":
        return _all((_compare_texts(a.left, b.left, algebra), _compare_texts(a.right, b.right, algebra)))
    if (compact(a.left), compact(a.right)) in (
        (compact(b.left), compact(b.right)),
        (compact(b.right), compact(b.left)),
    ):
        return True
    sides = [compact(s) for s in (a.left, a.right, b.left, b.right)]
    if not all(_ALGEBRA.fullmatch(s) for s in sides):
        return False
    if algebra is None:
        return None
    return algebra(f"({sides[0]})-({sides[1]})", f"({sides[2]})-({sides[3]})", True)


_RULES: tuple[tuple[Any, Callable[[Iterable[bool]], bool], Callable[..., bool | None]], ...] = (
    (NamedValue, any, _named_values),
    (Option, any, _options),
    (BasedNumber, any, _based_numbers),
    (Clock, all, lambda a, b, _: same_time(a, b)),
    (Ratio, any, _ratios),
    (Congruence, any, _congruences),
    (Quantity, all, _quantities),
    (Region, all, _regions),
    (Collection, all, _collections),
    (Relation, all, _relations),
    (Matrix, any, _matrices),
)
"""Kind of a reading, how many of two readings must be of it, and their comparison. The first that fits."""
