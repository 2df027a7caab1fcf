"""Settings and options that are gone, and what to use instead. An entry is removed at version 0.3."""

from __future__ import annotations

import re

RENAMED: dict[str, str] = {
    "rollout.dynamic.surplus": "remove it: groups beyond a step's batch are always discarded, and "
    "their prompts come again in the next step",
}
"""Dotted key of a setting (without an index: ``trackers.url``), or an option (``--gpus``) -> what to do, such
as "use rollout.dynamic.oversample" or "remove it: it had no effect"."""


def explain_renamed(key: str) -> str | None:
    """The message for a key or option that is gone; None: it never existed."""
    instead = RENAMED.get(re.sub(r"\[\d+\]", "", key))
    return f"{key!r} is gone; {instead}" if instead is not None else None
