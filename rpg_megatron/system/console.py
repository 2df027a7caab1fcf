"""Tables, colours and live displays on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from rpg_megatron.system.terminal import printable


class PlainTextConsole(Console):
    """A console that escapes control characters in what it shows; its own colours and moves stay."""

    def __init__(self, *, stderr: bool = False, **options: Any):
        """stderr: standard error instead of standard output. options: of ``Console``."""
        stream = sys.stderr if stderr else sys.stdout
        defaults: dict[str, Any] = {"file": getattr(stream, "unfiltered", stream)}
        defaults["emoji"] = False  # in "module:x: ..." there is none
        super().__init__(**defaults | options)

    def render_str(self, text: str, **options: Any) -> Text:
        """A string as a text; escaped before it is measured."""
        return super().render_str(printable(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)
