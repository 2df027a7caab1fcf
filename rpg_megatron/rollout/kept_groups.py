"""Graded groups that were in no batch when a run was stopped: kept in its folder, used when it resumes.

    unfinished/groups.msgpack     list[KeptGroup]
    unfinished/group_12.parquet   the trajectories of group 12, unless dynamic sampling rejected it

The seeds of a group follow from its ticket, so a resumed run would sample the same responses again.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from rpg_megatron.config import Settings
from rpg_megatron.config.files import atomic_write, open_own, remove, rename
from rpg_megatron.rollout.groups import GroupScores, GroupTask
from rpg_megatron.system.encoding import decode, encode

UNFINISHED = "unfinished"
"""Folder in that of the run."""
_INDEX = "groups.msgpack"


class KeptGroup(msgspec.Struct, frozen=True):
    """A graded group."""

    task: GroupTask
    scores: GroupScores
    rejected: bool
    """Whether dynamic sampling drops it; then it has no trajectories."""

    def is_for(self, task: GroupTask, *, older: bool) -> bool:
        """Whether it has what ``task`` asks for: same prompt, seed and sampling, and the weights' version.

        older: whether groups of older weights may be in a batch (``rollout.ahead``).
        """
        same = msgspec.structs.replace(self.task, version=task.version)
        allowed = self.task.version <= task.version if older else self.task.version == task.version
        return allowed and encode(same) == encode(task)


def may_keep(settings: Settings) -> bool:
    """Whether there are groups that can be kept: files have no top-k log-probs of a teacher's server."""
    return settings.sft is None and (settings.teacher is None or settings.teacher.top_k is None)


def group_file(folder: Path, ticket: int) -> Path:
    """File of a group's trajectories."""
    return folder / f"group_{ticket}.parquet"


def part_of(folder: Path) -> Path:
    """The folder while it is written."""
    return folder.with_name(f".{folder.name}.part")


def publish_kept(part: Path, folder: Path, groups: Sequence[KeptGroup]) -> None:
    """Make ``part``, which has the trajectories, the ``folder`` of kept groups. Raises OSError."""
    with atomic_write(part / _INDEX) as file:
        file.write(encode(list(groups)))
    remove(folder)
    rename(part, folder)


def read_kept(folder: Path) -> list[KeptGroup]:
    """The kept groups whose trajectories are there; none if nothing was kept, or if the index is damaged."""
    try:
        with open_own(folder / _INDEX) as file:
            groups: list[KeptGroup] = decode(file.read(), list[KeptGroup])
    except (OSError, msgspec.MsgspecError):
        return []
    return [g for g in groups if g.rejected or group_file(folder, g.task.ticket).is_file()]
