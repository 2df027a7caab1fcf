"""Finds the answer that a response gives, by the form that it is given in. Linear in the text."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from rpg_megatron.data.boxed import last_box

Style = Literal["auto", "answer_line", "boxed", "gsm8k"]
"""Where the answer stands:

- ``answer_line``: after the last ``Answer:`` (any case) in the last 300 characters, as in DAPO;
- ``boxed``: in the last whole ``\\boxed{}`` or ``\\fbox{}``;
- ``gsm8k``: after the last ``####``, on its line;
- ``auto``: whichever of these comes last; without any, after "the answer is", or the whole of a response
  that is one short line.
"""
STYLES: tuple[Style, ...] = get_args(Style)

WINDOW = 300
"""``answer_line`` looks at so many characters at the end."""
TAIL = 100_000
"""The other forms are looked for in so many."""

_MARK = re.compile(r"answer[ \t]*:", re.IGNORECASE)
_HASHES = re.compile(r"####(?!#)[ \t]*")
_PHRASE = re.compile(r"answer[ \t]+is[ \t]*:?", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")


class Found(NamedTuple):
    """An answer in a text."""

    place: int
    """Where its mark begins."""
    text: str


def find_answer(response: str, style: Style = "auto") -> str | None:
    """The answer that a response ends on, as it stands there; None if there is none in this form."""
    if style == "answer_line":
        found = _answer_line(response[-WINDOW:])
    elif style == "boxed":
        found = _boxed(response[-TAIL:])
    elif style == "gsm8k":
        found = _hashes(response[-TAIL:])
    else:
        tail = response[-TAIL:]
        forms = [f for f in (_answer_line(tail), _boxed(tail), _hashes(tail, heading=True)) if f is not None]
        found = max(forms) if forms else _phrase(tail) or _bare(response)
    return found.text if found is not None and found.text else None


def _answer_line(text: str) -> Found | None:
    """The rest of the line, or of the next that holds anything."""
    for match in reversed(list(_MARK.finditer(text))):
        rest = text[match.end() :].lstrip(" \t\r\n*_")  # **Answer:** 5
        line = rest.split("\n", 1)[0].strip()
        if line:
            return Found(match.start(), line)
    return None


def _boxed(text: str) -> Found | None:
    box = last_box(text)
    return None if box is None else Found(*box)


def _hashes(text: str, *, heading: bool = False) -> Found | None:
    """heading: leave out what looks like a Markdown heading, which begins with a letter."""
    for match in reversed(list(_HASHES.finditer(text))):
        line = text[match.end() :].split("\n", 1)[0].strip()
        if line and not (heading and line[0].isalpha()):
            return Found(match.start(), line)
    return None


def _phrase(text: str) -> Found | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].lstrip(" \t\r\n*_")
    said = _SENTENCE.split(rest, maxsplit=1)[0].strip()
    return Found(matches[-1].start(), said) if said else None


def _bare(response: str) -> Found | None:
    text = response.strip()
    return Found(0, text) if 0 < len(text) <= WINDOW and "\n" not in text else None
