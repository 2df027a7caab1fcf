"""Built-in filters for dynamic sampling, called like a user's own filter: docs/extend.md.

All public functions in this file are available; there is no list to extend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Protocol

    class _Scores(Protocol):
        @property
        def correct(self) -> Sequence[bool]: ...


def mixed(scores: _Scores) -> bool:
    """Keep groups with correct and wrong responses."""
    return 0 < sum(scores.correct) < len(scores.correct)
