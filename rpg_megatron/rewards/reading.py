r"""Readings of an answer: quantity, list, tuple, region, matrix, equation, option, or number with a base.

A text may have several readings: (2,5) is a point or an interval. Two answers agree if any two readings
agree.
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from rpg_megatron.rewards import prose
from rpg_megatron.rewards.notations import Clock, Congruence, Ratio, read_clock, read_congruence, read_ratio
from rpg_megatron.rewards.quantity import Quantity, as_number, constant_value, exact, read_quantity
from rpg_megatron.rewards.regions import Region, read_region
from rpg_megatron.rewards.spelling import bracket_depths, join_comma_groups, normalise_spelling

MAX_CHARACTERS = 300
"""Longer texts have no readings and are compared verbatim."""
_MAX_ITEMS = 40


class Collection(NamedTuple):
    """Several values. kind: "list" or "set" (both unordered), or "tuple"."""

    kind: str
    items: tuple[str, ...]


class Matrix(NamedTuple):
    """Rows of entries, times a factor ("" for 1)."""

    rows: tuple[tuple[str, ...], ...]
    factor: str


class NamedValue(NamedTuple):
    """A named value: x = 5. checks: constants between name and value (x = 2 + 3 = 5) that must equal it."""

    name: str
    value: str
    checks: tuple[str, ...]


class Relation(NamedTuple):
    """An equation or inequality that is not a value, such as x^2 = 25."""

    left: str
    sign: str
    right: str


class Option(NamedTuple):
    """A multiple-choice option: its letter and its text, which may be empty."""

    letter: str
    text: str


class BasedNumber(NamedTuple):
    """A number with its base, such as 1010_2."""

    digits: str
    base: int


type Reading = (
    Quantity
    | Collection
    | Matrix
    | NamedValue
    | Relation
    | Option
    | BasedNumber
    | Region
    | Clock
    | Ratio
    | Congruence
)

_EQUALS = re.compile(r"(?<![<>!:=])=+(?!=)")
_LETTER = r"(?:[A-Za-z]|\\[a-z]+|\\[A-Z][a-z]+|[A-Z]{2,4})"
_INDEX = r"(?:_(?:[A-Za-z0-9]|\{[^{}]*\}))?'{0,2}"
# Left sides that may be dropped: x, a_1, AB, \angle ABC, f(2), P(A \cap B), [ABC], |AB|, dy/dx, \lim, area.
_NAME = re.compile(
    rf"(?:(?:\\angle|\\triangle|\\unit_|\\Delta|\\nabla|arc|m\\angle)\s*)?{_LETTER}{_INDEX}"
    r"(?:\s*\([^()=]*(?:\([^()]*\)[^()=]*)*\))?"
    r"|\[[A-Z]{3,6}\]|\|[A-Z]{2}\||\\frac\{(?:d|\\partial)[^{}]*\}\{(?:d|\\partial)[^{}]*\}"
    r"|\\(?:lim|int|sum|prod|max|min|gcd|lcm|deg|det)(?![A-Za-z]).*|\([a-z](?:,\s*[a-z]){1,4}\)"
    r"|[A-Z]?[a-z]{3,}(?: [A-Za-z]+){0,4}"
)
_FUNCTIONS = re.compile(
    r"\\?(?:sqrt|log|ln|sin|cos|tan|sec|csc|cot|exp|arcsin|arccos|arctan|abs|frac|pi)(?![a-z])"
)
_VARIABLE = re.compile(r"(?<![\\A-Za-z])[A-Za-z]|\\(?:theta|alpha|beta|lambda|phi|omega|mu|sigma|rho|unit)")
_MATRIX = re.compile(
    r"(.*?)[\[(]?\s*\\begin\{(pmatrix|bmatrix|matrix|array|smallmatrix|Bmatrix)\}"
    r"(?:\{[lcr| ]*\})?(.*?)\\end\{\2\}\s*[\])]?(\^\{?(?:T|\\top|\\intercal)\}?)?",
    re.DOTALL,
)
_OPTION = re.compile(
    r"\(([A-H])\)[ .:]*(.*)|([A-H])[.:)]\s+(.+)|([A-H])\)\s*(.*)"
    r"|(?:option|choice)\s+\(?([A-H])\)?[ .:]*(.*)|([A-H])",
    re.IGNORECASE,
)
_BASED = re.compile(
    r"\(?([0-9A-F]+)\)?\s*(?:_\{?\s*([0-9]+|two|three|four|five|six|seven|eight|nine|ten|sixteen)\s*\}?"
    r"|\s*\(base ([0-9]+|[a-z]+)\)|\s+(?:in\s+)?base ([0-9]+|[a-z]+))"
)
_SEPARATOR = re.compile(r"\s*(?:[,;]\s*(?:and|or)\s|[,;]|\s(?:and|or)\s)\s*")


def read_answer(answer: str) -> tuple[Reading, ...]:
    """All readings of an answer, given verbatim."""
    return _read_spelled(answer) if len(answer) <= MAX_CHARACTERS else ()


@lru_cache(8192)
def _read_spelled(answer: str) -> tuple[Reading, ...]:
    return read_expression(prose.extract_core(normalise_spelling(answer)), bare=True)


@lru_cache(8192)
def read_expression(text: str, *, bare: bool = False) -> tuple[Reading, ...]:
    """Readings of a text in normal spelling. bare: not inside brackets, so that 1,234 is one number."""
    text = text.strip()
    if bare:
        text = join_comma_groups(text)
    if not text or len(text) > MAX_CHARACTERS:
        return ()
    if as_number(text) is not None or exact(text) is not None:
        return (read_quantity(text),)
    option = _option(text)
    if option is not None:
        return (option, read_quantity(text)) if not option.text else (option,)
    if "\\begin" in text or text.startswith("[["):
        matrix = _matrix(text)
        if matrix is not None:
            return (matrix,)
    text = _approximation(text)
    if "mod" in text and (congruence := read_congruence(text)) is not None:
        return (congruence,)
    clock, ratio = read_clock(text), read_ratio(text)
    if clock is not None or ratio is not None:
        return tuple(r for r in (clock, ratio) if r is not None)
    region = read_region(text)
    if region is not None and (len(region.atoms) != 1 or region.explicit):
        return (region,)
    readings: list[Reading] = [region] if region is not None else []
    collection = _collection(text)
    if collection is not None:
        if bare and re.fullmatch(r"-?0,\d+|-?\d+,\d\d?\s?[€¤£]", text):  # a decimal comma
            readings.append(read_quantity(text.replace(",", ".")))
        return (*readings, *collection)
    sides = _EQUALS.split(text)
    if len(sides) > 1:
        return (*readings, _equation([s.strip() for s in sides]))
    relation = re.fullmatch(r"(.+?)(\\le|\\ge|\\ne|<|>)(?![A-Za-z])(.+)", text)
    if relation and not re.search(r"\\le(?![A-Za-z])|\\ge(?![A-Za-z])|\\ne(?![A-Za-z])|[<>]", relation[3]):
        return (*readings, Relation(relation[1].strip(), relation[2], relation[3].strip()))
    based = _BASED.fullmatch(text)
    if based is not None:
        base = based[2] or based[3] or based[4]
        number = prose.NUMBERS.get(base) if not base.isdigit() else int(base)
        if number is not None and 2 <= number <= 36:
            return (BasedNumber(based[1], number),)
    if re.fullmatch(r"0[xX][0-9A-Fa-f]+", text):
        return (BasedNumber(text[2:].upper(), 16),)
    return (*readings, read_quantity(text))


def split_top(text: str, separator: re.Pattern[str]) -> list[str]:
    """Split a text at separators that are outside of all brackets."""
    # These two are brackets too; the length stays.
    depths = bracket_depths(text.replace("\\langle", "(langle").replace("\\rangle", ")rangle"))
    parts, start = [], 0
    for match in separator.finditer(text):
        if depths[match.start()] == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return [*parts, text[start:].strip()]


def _option(text: str) -> Option | None:
    match = _OPTION.fullmatch(text)
    if match is None:
        return None
    groups = [g for g in match.groups() if g is not None]
    letter, rest = groups[0], groups[1] if len(groups) > 1 else ""
    if (
        not letter.isupper()
        or re.match(r"[+\-*/^=]|\\(?:cup|cap|in|and|or)(?![a-z])|(?:and|or)\b|[,;]", rest)
    ) and not re.match(r"(?:[A-H][:.)]|\([A-H]\))\s+-[\d\\]", text):
        return None
    return Option(letter, rest.strip())


def _matrix(text: str) -> Matrix | None:
    if text.startswith("[["):
        rows = [row.split(",") for row in text.strip("[]").replace("] ,", "],").split("],")]
        rows = [[cell.strip(" []") for cell in row] for row in rows]
        return Matrix(tuple(map(tuple, rows)), "")
    sides = _EQUALS.split(text, maxsplit=1)
    if len(sides) == 2 and _NAME.fullmatch(sides[0].strip()):
        text = sides[1].strip()
    match = _MATRIX.fullmatch(text)
    if match is None:
        return None
    factor = match[1].strip().rstrip("[(").strip()
    lines = [line for line in re.split(r"\\\\|\\cr", match[3]) if line.strip()]
    rows = [[cell.strip() for cell in line.replace("\\hline", "").split("&")] for line in lines]
    if match[4]:
        rows = [list(column) for column in zip(*rows, strict=False)]
    return Matrix(tuple(map(tuple, rows)), factor)


def _approximation(text: str) -> str:
    r"""Rewrite x \approx 2.45 as x = 2.45; \sqrt{2} \approx 1.41 keeps both sides if it is true."""
    sides = text.split("\\approx")
    if len(sides) != 2 or not sides[1].strip():
        return text
    left, right = (s.strip() for s in sides)
    if not left:
        return right
    *names, exact = (s.strip() for s in _EQUALS.split(left))
    if not names and _NAME.fullmatch(exact) and not _FUNCTIONS.match(exact):
        return f"{exact} = {right}"
    value, rounded = constant_value(exact), read_quantity(right)
    if value is None:
        return exact if exact != right else text
    if rounded.number is None:
        return text
    decimals = re.search(r"\.(\d+)", right)
    ulp = Fraction(1, 10 ** (len(decimals[1]) if decimals else 0))
    near = abs(Fraction(value) - rounded.number) <= ulp / 2 * Fraction(1001, 1000)
    return f"{exact} \\either {right}" if near else text


def _collection(text: str) -> list[Reading] | None:
    """Readings of several values; None for one value."""
    if "\\either" in text:
        return [r for side in text.split("\\either") for r in read_expression(side)]
    if text in ("\\emptyset", "\\{\\}", "\\{ \\}") or prose.NO_SOLUTION.fullmatch(text):
        return [Collection("set", ())]
    inside = _inside(text)
    if inside is not None:
        kind, content = inside
        items = [t for t in split_top(content, re.compile(r"\s*[,;]\s*")) if t]
        if kind == "set" and len(items) == 1 and not text.startswith("\\"):  # {5} may be a group
            return [Collection("set", _expand(items)), *read_expression(content)]
        if kind == "set":
            return [Collection("set", _expand(items))]
        if len(items) > 1:
            return [Collection("tuple", tuple(items))]
        return [*read_expression(content)] if kind == "tuple" and content.strip() else None
    scaled = re.fullmatch(
        r"(\S.*?)\s*(?:\\cdot\s*|\\times\s*)?(\((?:[^()]+,)+[^()]+\))(?:\^\{?(?:T|\\top)\}?)?", text
    )
    if scaled and not scaled[1].endswith(("=", ",", "f", "g", "P", ";")) and "=" not in scaled[1]:
        cells = split_top(scaled[2][1:-1], re.compile(r"\s*[,;]\s*"))
        if constant_value(scaled[1]) is not None:
            return [Collection("tuple", tuple(f"({scaled[1]})({cell})" for cell in cells))]
    vector = _unit_vectors(text)
    if vector is not None:
        return [vector]
    parts = split_top(text, _SEPARATOR)
    if len(parts) > 1 and len(parts) <= _MAX_ITEMS and all(parts):
        return _list(parts)
    membership = re.fullmatch(rf"{_LETTER}{_INDEX}\s*\\in\s*(.+)", text)
    if membership:
        return [*read_expression(membership[1])]
    if "\\pm" in text or "\\mp" in text:
        sides = _EQUALS.split(text)
        if len(sides) == 1 or (len(sides) == 2 and _NAME.fullmatch(sides[0].strip())):
            return [Collection("list", _expand([sides[-1].strip()]))]
    return None


def _inside(text: str) -> tuple[str, str] | None:
    """Kind and content of a text that is enclosed in one pair of brackets; None for other texts."""
    text = re.sub(r"\^\{?(?:T|\\top)\}?$", "", text)
    for kind, opening, closing in (
        ("set", "\\{", "\\}"),
        ("set", "{", "}"),
        ("tuple", "(", ")"),
        ("tuple", "\\langle", "\\rangle"),
        ("tuple", "<", ">"),
    ):
        if text.startswith(opening) and text.endswith(closing) and len(text) >= len(opening) + len(closing):
            content = text[len(opening) : -len(closing)]
            return None if min(bracket_depths(content), default=0) < 0 else (kind, content)
    return None


def _expand(items: list[str]) -> tuple[str, ...]:
    r"""Replace items with \pm by two items. All signs of an item change together, as in 1 \pm i."""
    result: list[str] = []
    for item in items:
        if "\\pm" in item or "\\mp" in item:
            upper = item.replace("\\pm", "+").replace("\\mp", "-").strip().removeprefix("+")
            lower = item.replace("\\pm", "-").replace("\\mp", "+").strip().removeprefix("+")
            result += [upper.strip(), lower.strip()]
        else:
            result.append(item.removeprefix("+").strip())
    return tuple(result)


def _list(parts: list[str]) -> list[Reading]:
    sides = [[s.strip() for s in _EQUALS.split(part)] for part in parts]
    named = [len(s) == 2 and _NAME.fullmatch(s[0]) is not None for s in sides]
    if all(named):
        letters = [re.sub(r"_.*", "", s[0]) for s in sides]
        if len(set(letters)) == 1:  # x = 5 or x = 2; x_1 = 6, x_2 = -6
            return [Collection("list", _expand([s[1] for s in sides]))]
        if len({s[0] for s in sides}) == len(sides):
            if set(letters) <= set("xyz"):
                sides = sorted(sides)
            return [Collection("tuple", tuple(s[1] for s in sides)), Collection("set", tuple(parts))]
    if named[0] and not any(len(s) > 1 for s in sides[1:]):  # x = 4, -1
        parts = [sides[0][1], *parts[1:]]
    return [Collection("list", _expand(parts))]


_VECTOR_TERM = re.compile(r"\s*([+-]?)\s*([^+\-\\]*?|\\(?:frac|sqrt)\{[^\\]*?\})\s*\\unit_([ijk])\s*")


def _unit_vectors(text: str) -> Collection | None:
    r"""4\mathbf{i} - \mathbf{j} as the tuple (4, -1)."""
    if "\\unit_" not in text:
        return None
    values, position = {}, 0
    while position < len(text):
        match = _VECTOR_TERM.match(text, position)
        if match is None or match[3] in values:
            return None
        values[match[3]] = f"{match[1]}{match[2] or 1}".removeprefix("+")
        position = match.end()
    return Collection("tuple", tuple(values.get(c, "0") for c in ("ijk" if "k" in values else "ij")))


def _equation(sides: list[str]) -> Reading:
    first, last = sides[0], sides[-1]
    if not all(sides):
        return read_quantity(" = ".join(sides))
    constant = not _VARIABLE.search(_FUNCTIONS.sub("", first))
    if len(sides) == 2 and constant and _is_name(last) and not _is_name(first):  # 5 = x
        return NamedValue(last, first, ())
    checks = tuple(s for s in sides[1:-1] if not _VARIABLE.search(_FUNCTIONS.sub("", s)))
    if _is_name(first):
        names = re.fullmatch(r"\(([xyz](?:,\s*[xyz])+)\)", first)
        values = _inside(last)
        if names and values:  # (y,x) = (3,4) is (x,y) = (4,3)
            pairs = list(zip(re.split(r",\s*", names[1]), split_top(values[1], _SEPARATOR), strict=False))
            last = f"({', '.join(value for _, value in sorted(pairs))})"
        return NamedValue(re.sub(r"\s", "", first), last, checks)
    if constant:  # 2^{12} = 4096
        return NamedValue("", last, (first, *checks))
    return Relation(" = ".join(sides[:-1]) if len(sides) > 2 else first, "=", last)


def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None and (
        _FUNCTIONS.match(text) is None or re.match(r"\\frac\{(?:d|\\partial)", text) is not None
    )
