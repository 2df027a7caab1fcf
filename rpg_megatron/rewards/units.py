"""Units of measurement: a table of units, and a parser for the text after a number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fractions import Fraction
from functools import lru_cache

type Unit = tuple[tuple[str, int], ...]
"""Base units with their exponents, sorted: km/h is (("h", -1), ("km", 1))."""

# Each unit: its symbols (case matters), then its names in the singular.
_PREFIXED = r"""
    m = m / meter metre; g = g gm / gram gramme; s = s sec / second; L = L l / liter litre; N = N / newton;
    J = J / joule; W = W / watt; V = V / volt; A = A / ampere amp; ohm = \Omega / ohm;
    eV = eV / electronvolt; Pa = Pa / pascal; Hz = Hz / hertz; K = K / kelvin; C = C / coulomb;
    mol = mol / mole; cal = cal / calorie; T = T / tesla; F = F / farad; B = B / byte; bit = bit / bit;
    pc = pc / parsec
"""
_PREFIXES = {"k": "kilo", "M": "mega", "G": "giga", "m": "milli", "c": "centi", "d": "deci"}
_PREFIXES |= {r"\mu ": "micro", "u": "micro", "n": "nano", "p": "pico", "f": "femto"}
_OTHERS = r"""
    min = min mins / minute; h = h hr hrs / hour; day = / day; week = wk / week; month = / month;
    year = yr yrs / year; in = in / inch; ft = ft / foot; yd = yd yds / yard; mi = mi / mile;
    lb = lb lbs £ GBP / pound; oz = oz / ounce; gal = gal / gallon; acre = / acre; ha = ha / hectare;
    ton = t / ton tonne; USD = USD ¤ $ / dollar buck; EUR = EUR € / euro; JPY = JPY ¥ / yen yuan;
    cent = ¢ / cent; rad = rad / radian; deg = ^\circ / degree deg; degC = ^\circC / celsius;
    degF = ^\circF / fahrenheit; arcmin = ' / arcminute; arcsec = '' / arcsecond; atm = atm / atmosphere;
    bar = bar /; M_sun = M_\odot /; AU = AU /; erg = erg /; dyn = dyn / dyne; ly = ly /
"""
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h", "cc": "cm^3", "fps": "ft/s"}
_IRREGULAR = {"feet": "ft", "inches": "in", "hertz": "Hz"}
CURRENCY = "\u00a3\u20ac\u00a5\u00a4"


def _rows(table: str) -> Iterator[tuple[str, str, str]]:
    """Unit, symbols and names of each row of a table."""
    for row in table.split(";"):
        unit, rest = row.split("=")
        symbols, names = rest.split("/")
        yield unit.strip(), symbols, names


def _table() -> dict[str, str]:
    table = dict(_IRREGULAR)

    def add(unit: str, symbols: str, names: str) -> None:
        for symbol in symbols.split():
            table[symbol] = unit
        for name in names.split():
            table[name] = table[name + "s"] = unit

    for unit, symbols, names in _rows(_PREFIXED):
        add(unit, symbols, names)
        for symbol, name in _PREFIXES.items():
            prefixed = ("u" if name == "micro" else symbol) + unit
            add(prefixed, "", " ".join(name + n for n in names.split()))
            for s in symbols.split():
                table[symbol + s] = prefixed
    for unit, symbols, names in _rows(_OTHERS):
        add(unit, symbols, names)
    return table


_UNITS = _table()
_TOKEN = re.compile(
    r"\s*(?:(?P<circle>\^\s*\{?\\circ\}?\s*[CF]?(?![A-Za-z]))"
    r"|\^\s*(?:\{\s*(?P<group>-?\d)\s*\}|(?P<digit>-?\d))"
    r"|(?P<micro>\\mu\s*[A-Za-z]{1,3})"
    r"|(?P<name>k?\s?\\Omega|M_\\odot|[A-Za-z]+|''|'|[" + CURRENCY + r"])"
    r"|(?P<mark>/|\\cdot|\*|\(|\)|\{|\}|-))"
)
# Units directly after a number: 24cm. A single letter could be a variable.
GLUED = re.compile(
    r"(?<=\d)(?=(?:[cmk]m|k?g|mg|m[lL]|ft|mph|km/h|kWh?|eV|inches|feet|dollars|degrees|hours)\b(?<!\dg))"
)


@lru_cache(4096)
def parse_unit(text: str) -> Unit | None:
    r"""The unit that a text names, such as "square meters" or "m/s^2"; None for any other text."""
    text = text.strip()
    if not text or len(text) > 60:
        return None
    powers: dict[str, int] = {}
    position, sign, pending, last = 0, 1, 0, None
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            return None
        position = match.end()
        word = match["name"] or match["micro"]
        if match["circle"]:
            word = re.sub(r"[\s{}]", "", match["circle"])
        elif match["group"] or match["digit"]:
            if last is None:
                return None
            name, direction = last
            powers[name] += direction * (int(match["group"] or match["digit"]) - 1)
            last = None
            continue
        elif match["mark"]:
            sign = -1 if match["mark"] == "/" else sign
            continue
        assert word is not None
        if word in ("per", "a", "each") and last is not None:
            sign = -1
        elif word in ("square", "sq", "cubic", "cu"):
            pending = 2 if word.startswith("s") else 3
        elif word in ("squared", "cubed") and last is not None:
            powers[last[0]] += last[1] * (1 if word == "squared" else 2)
        elif word in _COMPOUND:
            last = None
            for part, power in parse_unit(_COMPOUND[word]) or ():
                powers[part] = powers.get(part, 0) + power
        else:
            unit = _UNITS.get(word) or _UNITS.get(word.replace(" ", "")) or _UNITS.get(word.lower())
            if unit is None:
                return None
            powers[unit] = powers.get(unit, 0) + sign * (pending or 1)
            last, pending = (unit, sign), 0
    if pending or not powers:
        return None
    if len(powers) > 1 and {"degC", "degF"} & set(powers):
        powers.pop("deg", None)  # degrees Celsius
    return tuple(sorted((unit, power) for unit, power in powers.items() if power))


def same_unit(a: Unit | None, b: Unit | None) -> bool:
    """Whether two units agree, without conversion. A missing unit agrees with all others."""
    if a is None or b is None or a == b:
        return True
    degrees = {(("deg", 1),), (("degC", 1),), (("degF", 1),)}
    return a in degrees and b in degrees and (("deg", 1),) in (a, b)


_WHOLE = """
    ten 10; dozen 12; score 20; hundred 100; gross 144; thousand 1_000; lakh 100_000; million 1_000_000;
    crore 10_000_000; billion 1_000_000_000; trillion 1_000_000_000_000; quadrillion 1_000_000_000_000_000
"""
_PARTS = """
    half 2; halve 2; third 3; quarter 4; fourth 4; fifth 5; sixth 6; seventh 7; eighth 8; ninth 9; tenth 10;
    eleventh 11; twelfth 12; sixteenth 16; twentieth 20; hundredth 100; thousandth 1_000; millionth 1_000_000
"""
# Words after a number that multiply it: 2 dozen, 5 eighths, 3 lakh.
MULTIPLIERS = {
    word: Fraction(int(number)) ** power
    for table, power in ((_WHOLE, 1), (_PARTS, -1))
    for word, number in map(str.split, table.split(";"))
}
