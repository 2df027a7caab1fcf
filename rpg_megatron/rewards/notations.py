r"""Reads times of day (12:30 p.m., noon), ratios (3:2, 3 to 2) and congruences (x \equiv 3 \pmod 7)."""

from __future__ import annotations

import re
from typing import NamedTuple

from rpg_megatron.rewards.latex_numbers import integer_value
from rpg_megatron.rewards.quantity import constant_value


class Clock(NamedTuple):
    """A time of day in seconds. half: "am", "pm", "" if it is open, or "24" on a clock of 24 hours."""

    seconds: int
    half: str


class Ratio(NamedTuple):
    """A ratio of constants."""

    parts: tuple[str, ...]


class Congruence(NamedTuple):
    """What is congruent ("" if not given), to which numbers (one of them), by which modulus."""

    left: str
    residues: str
    modulus: int


_DAY = 24 * 3600
_TIME = re.compile(r"(\d{1,2})(?::([0-5]\d))?(?::([0-5]\d))?\s*(?:([ap])\.?\s?m\.?|o'clock)?", re.IGNORECASE)
_WORDS = {"noon": Clock(_DAY // 2, "pm"), "midnight": Clock(0, "am")}
_MOD = r"\s*,?\s*\(?\s*mod(?:ulo)?\s*\{?\s*(?P<modulus>\d{1,20})\s*\}?\s*\)?"
_EQUALS = r"\s*(?:\\equiv|=)(?![A-Za-z])\s*"
_CONGRUENCES = (
    re.compile(rf"(?:(?P<left>[^=]+?){_EQUALS})?(?P<right>[^=]+?){_MOD}"),
    re.compile(rf"(?P<left>[^=]+?){_MOD}{_EQUALS}(?P<right>[^=]+)"),
)


def read_clock(text: str) -> Clock | None:
    """The time of day that a text names; None for others, and for a number alone."""
    match = _TIME.fullmatch(text)
    if match is None:
        return _WORDS.get(text.lower().removeprefix("12 ").removeprefix("12:00 "))
    hour, half = int(match[1]), f"{(match[4] or '').lower()}m".lstrip("m")
    if text.isdigit() or hour > (12 if half else 23) or (half and not hour):
        return None
    if half:
        hour = hour % 12 + 12 * (half == "pm")
    elif not 1 <= hour <= 12:
        half = "24"
    return Clock(hour * 3600 + int(match[2] or 0) * 60 + int(match[3] or 0), half)


def same_time(a: Clock, b: Clock) -> bool:
    """Whether two times agree; a missing a.m. or p.m. agrees with both."""
    open_half = "" in (a.half, b.half) and {a.half, b.half} & {"am", "pm"}
    return (a.seconds - b.seconds) % (_DAY // 2 if open_half else _DAY) == 0


def read_ratio(text: str) -> Ratio | None:
    """The ratio that a text gives; None for others."""
    parts = re.split(r"\s*:\s*|(?<=\d) to (?=\d)", text)
    if 2 <= len(parts) <= 6 and all(p and constant_value(p) is not None for p in parts):
        return Ratio(tuple(parts))
    return None


def read_congruence(text: str) -> Congruence | None:
    """The congruence or remainder that a text states; None for others, and if it is false for its numbers."""
    match = next((m for pattern in _CONGRUENCES if (m := pattern.fullmatch(text))), None)
    if match is None:
        return None
    left, modulus = re.sub(r"\s", "", match["left"] or ""), int(match["modulus"]) or 1
    residues, value = residues_of(match["right"], modulus), integer_value(left)
    if residues is None or (value is not None and residues != {value % modulus}):
        return None
    return Congruence(left, match["right"].strip(), modulus)


def residues_of(text: str, modulus: int) -> set[int] | None:
    r"""The residues that a text lists, such as 2, 3 or \pm 1; None if one is no whole number."""
    signs = re.sub(r"\\pm\s*(\d+)", r"\1,-\1", text)
    values = [integer_value(part) for part in re.split(r"\s*(?:,|\bor\b|\band\b)\s*", signs)]
    return None if None in values else {value % modulus for value in values if value is not None}
