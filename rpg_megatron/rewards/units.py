"""Units of measurement: a table of units, and a parser for the text after a number."""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

type Unit = tuple[tuple[str, int], ...]
"""Base units with their exponents, sorted: km/h is (("h", -1), ("km", 1))."""

# Each unit: its symbols (case matters), then its names in the singular.
_PREFIXED = {
    "m": ("m", "meter metre"),
    "g": ("g gm", "gram gramme"),
    "s": ("s sec", "second"),
    "L": ("L l", "liter litre"),
    "N": ("N", "newton"),
    "J": ("J", "joule"),
    "W": ("W", "watt"),
    "V": ("V", "volt"),
    "A": ("A", "ampere amp"),
    "ohm": (r"\Omega", "ohm"),
    "eV": ("eV", "electronvolt"),
    "Pa": ("Pa", "pascal"),
    "Hz": ("Hz", "hertz"),
    "K": ("K", "kelvin"),
    "C": ("C", "coulomb"),
    "mol": ("mol", "mole"),
    "cal": ("cal", "calorie"),
    "T": ("T", "tesla"),
    "F": ("F", "farad"),
    "B": ("B", "byte"),
    "bit": ("bit", "bit"),
    "pc": ("pc", "parsec"),
}
_PREFIXES = {
    "k": "kilo",
    "M": "mega",
    "G": "giga",
    "m": "milli",
    "c": "centi",
    "d": "deci",
    r"\mu ": "micro",
    "u": "micro",
    "n": "nano",
    "p": "pico",
    "f": "femto",
}
_OTHERS = {
    "min": ("min mins", "minute"),
    "h": ("h hr hrs", "hour"),
    "day": ("", "day"),
    "week": ("wk", "week"),
    "month": ("", "month"),
    "year": ("yr yrs", "year"),
    "in": ("in", "inch"),
    "ft": ("ft", "foot"),
    "yd": ("yd yds", "yard"),
    "mi": ("mi", "mile"),
    "lb": ("lb lbs \u00a3 GBP", "pound"),
    "oz": ("oz", "ounce"),
    "gal": ("gal", "gallon"),
    "acre": ("", "acre"),
    "ha": ("ha", "hectare"),
    "ton": ("t", "ton tonne"),
    "USD": ("USD \u00a4 $", "dollar buck"),
    "EUR": ("EUR \u20ac", "euro"),
    "JPY": ("JPY \u00a5", "yen yuan"),
    "cent": ("\u00a2", "cent"),
    "rad": ("rad", "radian"),
    "deg": (r"^\circ", "degree deg"),
    "degC": (r"^\circC", "celsius"),
    "degF": (r"^\circF", "fahrenheit"),
    "arcmin": ("'", "arcminute"),
    "arcsec": ("''", "arcsecond"),
    "atm": ("atm", "atmosphere"),
    "bar": ("bar", ""),
    "M_sun": (r"M_\odot", ""),
    "AU": ("AU", ""),
    "erg": ("erg", ""),
    "dyn": ("dyn", "dyne"),
    "ly": ("ly", ""),
}
_COMPOUND = {"mph": "mi/h", "kph": "km/h", "kmph": "km/h", "kmh": "km/h", "cc": "cm^3", "fps": "ft/s"}
_IRREGULAR = {"feet": "ft", "inches": "in", "hertz": "Hz"}
CURRENCY = "\u00a3\u20ac\u00a5\u00a4"


def _table() -> dict[str, str]:
    table = dict(_IRREGULAR)

    def add(unit: str, symbols: str, names: str) -> None:
        for symbol in symbols.split():
            table[symbol] = unit
        for name in names.split():
            table[name] = table[name + "s"] = unit

    for unit, (symbols, names) in _PREFIXED.items():
        add(unit, symbols, names)
        for symbol, name in _PREFIXES.items():
            prefixed = ("u" if name == "micro" else symbol) + unit
            add(prefixed, "", " ".join(name + n for n in names.split()))
            for s in symbols.split():
                table[symbol + s] = prefixed
    for unit, (symbols, names) in _OTHERS.items():
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


# Words after a number that multiply it: 2 dozen, 5 eighths, 3 lakh.
MULTIPLIERS: dict[str, Fraction] = {
    "hundred": Fraction(100),
    "thousand": Fraction(1000),
    "million": Fraction(10**6),
    "billion": Fraction(10**9),
    "trillion": Fraction(10**12),
    "quadrillion": Fraction(10**15),
    "lakh": Fraction(10**5),
    "crore": Fraction(10**7),
    "ten": Fraction(10),
    "dozen": Fraction(12),
    "score": Fraction(20),
    "gross": Fraction(144),
    "half": Fraction(1, 2),
    "halve": Fraction(1, 2),
    "third": Fraction(1, 3),
    "quarter": Fraction(1, 4),
    "fourth": Fraction(1, 4),
    "fifth": Fraction(1, 5),
    "sixth": Fraction(1, 6),
    "seventh": Fraction(1, 7),
    "eighth": Fraction(1, 8),
    "ninth": Fraction(1, 9),
    "tenth": Fraction(1, 10),
    "eleventh": Fraction(1, 11),
    "twelfth": Fraction(1, 12),
    "sixteenth": Fraction(1, 16),
    "twentieth": Fraction(1, 20),
    "hundredth": Fraction(1, 100),
    "thousandth": Fraction(1, 1000),
    "millionth": Fraction(1, 10**6),
}
