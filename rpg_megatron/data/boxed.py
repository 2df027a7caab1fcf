r"""Find the last ``\boxed{}`` of a text, in linear time for any nesting of braces."""

from __future__ import annotations

import re

_BOX = re.compile(r"\\f?box(?:ed)?(?![a-zA-Z])[ \t]*")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_BARE = re.compile(r"[^\s${}\\]+")


def last_box(text: str) -> tuple[int, str] | None:
    r"""Position and content of the last complete ``\boxed{}`` or ``\fbox{}``; None if there is none."""
    boxes = list(_BOX.finditer(text))
    if not boxes:
        return None
    closing: dict[int, int] = {}
    opened: list[int] = []
    for brace in _BRACE.finditer(text, boxes[0].start()):
        if brace[0] == "{":
            opened.append(brace.start())
        elif brace[0] == "}" and opened:
            closing[opened.pop()] = brace.start()
    for box in reversed(boxes):
        start = box.end()
        if start in closing:
            return box.start(), text[start + 1 : closing[start]].strip()
        if bare := _BARE.match(text, start):  # \boxed 5
            return box.start(), bare[0]
    return None
