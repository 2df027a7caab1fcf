r"""Extracts the final answer of a response: ``Answer:`` line, \boxed{} or GSM8K's ####, in linear time."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple, get_args

from rpg_megatron.data.boxed import last_box
from rpg_megatron.rewards.spelling import strip_end_tokens

Style = Literal["auto", "answer_line", "boxed", "gsm8k"]
"""Where to search for the answer:

- ``answer_line``: after the last ``Answer:`` (any case) in the last 300 characters, as in DAPO;
- ``boxed``: in the last complete ``\\boxed{}`` or ``\\fbox{}``;
- ``gsm8k``: after the last ``####``, on its line;
- ``auto``: whichever of these comes last; if there is none, after "the answer is", or the entire response if
  it is one short line.
"""
STYLES: tuple[Style, ...] = get_args(Style)

WINDOW = 300
"""Characters at the end of a response that ``answer_line`` searches."""
TAIL = 100_000
"""Characters at the end of a response that the other styles search."""

_MARK = re.compile(r"answer[ \t]*(?:\*\*|\*|__)?[ \t]*[:\uff1a]", re.IGNORECASE)
_EMPHASIS = re.compile(r"\s*(?:[*_]{1,3}(?=\s|$))?\s*")  # the end of **Answer:**
_FENCE = re.compile(r"```[a-z]*\n+")
_HASHES = re.compile(r"####(?!#)[ \t]*")
_PHRASE = re.compile(r"answer[ \t]+is[ \t]*:?", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
_JOINED = re.compile(r"\\boxed\{([^{}]{1,100})\}\$?[ \t]+or[ \t]+\$?$")


class Found(NamedTuple):
    """An answer found in a text."""

    position: int
    """Where its marker (``Answer:``, \\boxed, ####) begins."""
    text: str


def find_answer(response: str, style: Style = "auto") -> str | None:
    """The last answer of a response, verbatim; None if there is none in this style."""
    if style == "answer_line":
        match = _answer_line(response[-WINDOW:])
    elif style == "boxed":
        match = _boxed(response[-TAIL:])
    elif style == "gsm8k":
        match = _hashes(response[-TAIL:])
    else:
        tail = response[-TAIL:]
        forms = [f for f in (_answer_line(tail), _boxed(tail), _hashes(tail, heading=True)) if f is not None]
        match = max(forms) if forms else _hashes(tail) or _phrase(tail) or _bare(response)
    return match.text if match is not None and match.text else None


def _answer_line(text: str) -> Found | None:
    """The rest of the line after the last ``Answer:``, or the next line that is not empty."""
    for match in reversed(list(_MARK.finditer(text))):
        rest = _EMPHASIS.sub("", text[match.end() :], count=1)
        if rest.startswith("```"):
            rest = _FENCE.sub("", rest, count=1)
        line = strip_end_tokens(rest.split("\n", 1)[0].strip())
        if line.count("**") % 2 or line.count("__") % 2:  # **Answer:**5, **Answer: 5**
            line = line.strip(" *_")
        if line.strip("*_` "):
            return Found(match.start(), line)
    return None


def _boxed(text: str) -> Found | None:
    box = last_box(text)
    if box is None:
        return None
    joined = _JOINED.search(text, max(box[0] - 130, 0), box[0])
    if joined is not None:  # \\boxed{5} or \\boxed{6}: two answers
        return Found(joined.start(), f"{joined[1]} or {box[1]}")
    return Found(*box)


def _hashes(text: str, *, heading: bool = False) -> Found | None:
    """The rest of the line after the last ####. heading: ignore Markdown headings (a letter follows)."""
    for match in reversed(list(_HASHES.finditer(text))):
        line = strip_end_tokens(text[match.end() :].split("\n", 1)[0].strip())
        if line and not (heading and line[0].isalpha()):
            return Found(match.start(), line)
    return None


def _phrase(text: str) -> Found | None:
    matches = list(_PHRASE.finditer(text))
    if not matches:
        return None
    rest = text[matches[-1].end() :].lstrip(" \t\r\n*_")
    answer = _SENTENCE.split(rest, maxsplit=1)[0].strip()
    return Found(matches[-1].start(), answer) if answer else None


def _bare(response: str) -> Found | None:
    text = response.strip()
    return Found(0, text) if 0 < len(text) <= WINDOW and "\n" not in text else None
