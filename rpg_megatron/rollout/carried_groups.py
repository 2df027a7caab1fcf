"""Surplus groups that dynamic sampling carries over to the next step, and their files for checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.dynamic_sampling import Group
from rpg_megatron.rollout.groups import GroupTask
from rpg_megatron.rollout.task_stream import TaskStream


class CarriedGroups:
    """The surplus groups of the last step."""

    def __init__(self, folder: Path, dispatcher: Dispatcher, stream: TaskStream):
        """folder: where the files are written."""
        self._folder, self._dispatcher, self._stream = folder, dispatcher, stream
        self.groups: list[Group] = []
        self._files: dict[int, Path] = {}
        """File of each group, by ticket."""

    async def put(self, groups: list[Group], step: int) -> None:
        """Replace the groups; new ones are written to files, for checkpoints and restarted workers."""
        new = [g.task.ticket for g in groups if g.task.ticket not in self._files]

        def name(worker: int) -> Path:
            return self._folder / f"carried_{step:06d}_{worker}.parquet"

        files = self._files | await self._dispatcher.save(new, name)
        self.groups, self._files = groups, {g.task.ticket: files[g.task.ticket] for g in groups}

    def keep(self, tickets: Sequence[int]) -> None:
        """Forget all groups but these."""
        self.groups = [g for g in self.groups if g.task.ticket in tickets]

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, JSON-serialisable."""
        return {
            "surplus": [
                {"ticket": g.task.ticket, "prompt": g.task.prompt_id, "file": self._files[g.task.ticket].name}
                for g in self.groups
            ]
        }

    async def restore(self, state: dict[str, Any]) -> None:
        """Restore what ``state()`` returned. Raises UserError if a group's file is missing or damaged."""
        await self._dispatcher.forget([g.task.ticket for g in self.groups])
        self.groups, self._files = [], {}
        tasks: dict[Path, list[GroupTask]] = {}
        for group in state["surplus"]:
            # The last part only, as in ``carried_files``: the state may be that of another user's run.
            file = self._files[group["ticket"]] = self._folder / Path(group["file"]).name
            tasks.setdefault(file, []).append(self._stream.carried(group["prompt"], group["ticket"]))
        for file, some in tasks.items():
            scores = await self._dispatcher.load(some, file)
            self.groups += [Group(task, found) for task, found in zip(some, scores, strict=True)]
        self.groups.sort(key=lambda group: group.task.ticket)
