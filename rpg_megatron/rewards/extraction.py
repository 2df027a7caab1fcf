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

Thoughts (``<think>...</think>``) are left out first.
"""
STYLES: tuple[Style, ...] = get_args(Style)

WINDOW = 300
"""Characters at the end of a response that ``answer_line`` searches."""
TAIL = 100_000
"""Characters at the end of a response that the other styles search."""

# <think> of most models, [THINK] of Mistral, channels of gpt-oss, Kimi's marks.
_THOUGHTS = re.compile(
    r"(?P<begin><(?:think|thinking|thought|reasoning)>|\[THINK\]|\u25c1think\u25b7|<\|channel\|>analysis)"
    r"|</(?:think|thinking|thought|reasoning)>|\[/THINK\]|\u25c1/think\u25b7|<\|channel\|>final(?:<\|message\|>)?",
    re.IGNORECASE,
)
_MARK = re.compile(r"answer[ \t]*(?:\*\*|\*|__)?[ \t]*[:\uff1a]", re.IGNORECASE)
_EMPHASIS = re.compile(r"[ \t]*(?:[*_]{1,3}(?=\s|$))?\s*")  # the end of **Answer:**
_FENCE = re.compile(r"```[a-z]*\n+")
# Below Answer: bullets, a formula of any number of lines, and a line that only leads to the next.
_BULLET = re.compile(r"[ \t]*(?:[-*+>\u2022]|\d{1,2}[.)])[ \t]+(.*\S)\s*?(?:\n\s*|$)")
_ENVIRONMENT = r"\\begin\{(?:align|gather|equation|multline)(?:ed)?\*?\}"
_FORMULA = re.compile(
    rf"(?:\$\$.*?\$\$|\\\[.*?\\\]|\\\(.*?\\\)|\$[ \t]*\n.*?\$|{_ENVIRONMENT}.*?\\end\{{\w+\*?\}}).*?(?:\n|$)",
    re.DOTALL,
)
_OPEN_FORMULA = re.compile(r"\$\$?|\\[\[(]")
_LEAD_IN = re.compile(r"(?:.*(?:[:=]|\b(?:is|are|equals|be|by))|---+)[ \t*]*\n\s*")
_ALSO = re.compile(r"\s*(?:or\b|and\s*(?=\$|\\[\[(]))\s*")
_HASHES = re.compile(r"####(?!#)[ \t]*")
_PHRASE = re.compile(r"answer[ \t]+is[ \t]*:?", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?](?=\s|$)|\n")
_JOINED = re.compile(r"\\boxed\{([^{}]{1,100})\}\$?[ \t]+or[ \t]+\$?$")


class Found(NamedTuple):
    """An answer found in a text."""

    position: int
    """Where its marker (``Answer:``, \\boxed, ####) begins."""
    text: str


def find_answer(
    response: str, style: Style = "auto", *, thoughts: bool = False, opened: bool = False
) -> str | None:
    """The last answer of a response, verbatim; None if there is none in this style.

    thoughts: whether an answer in the thoughts counts. opened: see ``drop_thoughts``.
    """
    if not thoughts:
        response = drop_thoughts(response, opened)
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


def drop_thoughts(response: str, opened: bool = False) -> str:
    """A response without its thoughts, which are between two marks, before an end without a beginning (it was
    in the prompt), and after a beginning without an end. opened: whether the prompt ends with a beginning.
    """
    kept: list[str] = []
    start, begun, ended = None if opened else 0, int(opened), False
    """Where the part outside of thoughts begins, beginnings without an end, and whether there was an end."""
    for mark in _THOUGHTS.finditer(response):
        if mark["begin"]:
            kept += [response[start : mark.start()]] if start is not None else []
            start, begun = None, begun + 1
            continue
        if start is not None:
            kept = [] if begun or not ended else [*kept, response[start : mark.start()]]
        start, begun, ended = mark.end(), max(begun - 1, 0), True
    return "\n".join([*kept, response[start:]] if start is not None else kept)


def opens_thoughts(prompt: str) -> bool:
    """Whether a prompt, of which only the end matters, ends with a mark at which thoughts begin."""
    marks = list(_THOUGHTS.finditer(prompt))
    return bool(marks) and bool(marks[-1]["begin"]) and not prompt[marks[-1].end() :].strip()


def _answer_line(text: str) -> Found | None:
    """What follows the last ``Answer:``: the rest of its line, or the next expression below it."""
    for match in reversed(list(_MARK.finditer(text))):
        start = _EMPHASIS.match(text, match.end())
        assert start is not None  # it matches anything
        line = strip_end_tokens(_next_expression(text[start.end() :], "\n" in start[0]))
        if line.count("**") % 2 or line.count("__") % 2:  # **Answer:**5, **Answer: 5**
            line = line.strip(" *_")
        if line.strip("*_` "):
            return Found(match.start(), line)
    return None


def _next_expression(text: str, below: bool) -> str:
    """The line, list or formula that a text begins with. below: not on the line of ``Answer:``."""
    if text.startswith("```"):
        text = _FENCE.sub("", text, count=1)
    for _ in range(3):
        if lead := _LEAD_IN.match(text):
            text, below = text[lead.end() :], True
    items, position = [], 0
    while below and (bullet := _BULLET.match(text, position)):
        items.append(bullet[1])
        position = bullet.end()
    if items:
        return ", ".join(items)
    formula = _FORMULA.match(text)
    if formula is None:
        line = text.split("\n", 1)[0].strip()
        return "" if _OPEN_FORMULA.fullmatch(line) else line
    expression = _join_lines(formula[0])
    if also := _ALSO.match(text, formula.end()):  # a second answer
        expression += f" or {text[also.end() :].strip()}"
    return expression


def _join_lines(formula: str) -> str:
    r"""A formula as one line: x &= 2 + 3 \\ &= 5 is x = 2 + 3 = 5."""
    shorter = re.sub(rf"{_ENVIRONMENT}|\\end\{{(?:align|gather|equation|multline)(?:ed)?\*?\}}", "", formula)
    if shorter != formula:
        shorter = re.sub(r"\\\\\s*(?=&?\s*[=<>])", " ", shorter.replace("&=", "="))
        shorter = shorter.replace("\\\\", ", ").replace("&", "")
    return " ".join(shorter.split())


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
