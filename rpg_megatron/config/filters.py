"""Our filters for dynamic sampling, called as a filter of a user's is: docs/extend.md.

The public functions below are all there are: a new one needs no entry anywhere.
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
