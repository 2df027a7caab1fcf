"""The checkpoint folders of a run: names, completeness, and pruning of old ones. Without torch.

    checkpoints/latest.json              {"step": 50, "folder": "step_000050"}: the newest, for other tools
    checkpoints/best.json                with checkpoint.keep_best: the best checkpoints
    checkpoints/step_000050/
        model/                           weights and optimizer state, in Megatron-Core's torch_dist format
        anchor/                          the held anchor's weights, if there is one
        state.json, rng.pt, config.yaml  other state to resume from, and the settings of the run
        manifest.json                    every file with its size and SHA-256; written last

A checkpoint is written under a hidden name and renamed when it is complete.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Container
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.megatron_folder import MANIFEST, MEGATRON, find_damage, read_manifest
from rpg_megatron.config import UserError

CHECKPOINTS = "checkpoints"
LATEST = "latest.json"
MODEL, ANCHOR = "model", "anchor"
STATE, RNG, CONFIG = "state.json", "rng.pt", "config.yaml"
FORMAT = 1
"""Format version of ``state.json`` and of the folder."""
ROLLOUTS = "rollouts"
_CARRIED = re.compile(r"carried_(\d{6,})_\d+\.parquet")
"""Files of groups that a step carried over, by step and sampler worker (``rollout/carried_groups.py``)."""
_NAME = re.compile(r"step_(\d{6,})")


def step_folder(run: Path, step: int) -> Path:
    """Folder of a run's checkpoint of a step."""
    return run / CHECKPOINTS / f"step_{step:06d}"


def part_folder(folder: Path) -> Path:
    """Folder of a checkpoint while it is written."""
    return folder.with_name(f".{folder.name}.part")


def list_folders(run: Path) -> dict[int, Path]:
    """Step -> folder of the run's checkpoints, complete or not, newest first."""
    try:
        entries = list((run / CHECKPOINTS).iterdir())
    except OSError:
        return {}
    found = {int(m[1]): e for e in entries if (m := _NAME.fullmatch(e.name))}
    return dict(sorted(found.items(), reverse=True))


def list_steps(run: Path) -> dict[int, Path]:
    """Step -> folder of the run's checkpoints that have a manifest, newest first."""
    return {step: folder for step, folder in list_folders(run).items() if (folder / MANIFEST).is_file()}


def find_problems(folder: Path) -> list[str]:
    """One line for each missing or damaged file of a run's checkpoint. Reads every byte."""
    try:
        manifest = read_manifest(folder)
    except UserError as e:
        return [str(e)]
    if manifest is None:
        return [f"{MANIFEST} is missing"]
    if missing := [name for name in (STATE, RNG, CONFIG, f"{MODEL}/{MEGATRON}") if name not in manifest[1]]:
        return [f"{MANIFEST} does not list {', '.join(missing)}"]
    try:
        return find_damage(folder, manifest[1])
    except OSError as e:
        return [f"{e.filename or folder} cannot be read ({e.strerror})"]


def read_state(folder: Path) -> dict[str, Any]:
    """Content of ``state.json`` of a complete checkpoint. Raises UserError if its format version differs."""
    state: dict[str, Any] = json.loads((folder / STATE).read_text(encoding="utf-8"))
    if state["format"] != FORMAT:
        raise UserError(
            f"{folder}: checkpoint format {state['format']}, this version reads {FORMAT}; resume with the "
            "version that wrote it, or start over with --fresh"
        )
    return state


def publish(part: Path, folder: Path, step: int) -> None:
    """Rename a finished checkpoint to its final name and point ``latest.json`` to it."""
    latest = folder.parent / LATEST
    draft = latest.with_name(f".{LATEST}.part")
    with draft.open("w", encoding="utf-8") as f:  # first, so that a full disk changes nothing
        json.dump({"step": step, "folder": folder.name}, f)
        f.flush()
        os.fsync(f.fileno())
    shutil.rmtree(folder, ignore_errors=True)  # an incomplete one of the same step
    os.replace(part, folder)
    os.replace(draft, latest)
    directory = os.open(folder.parent, os.O_RDONLY)  # or a power cut may undo the renames
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def remove_parts(run: Path) -> None:
    """Remove the leftovers of interrupted saves and removals. Raises OSError."""
    for old in (run / CHECKPOINTS).glob(".*.part"):
        shutil.rmtree(old) if old.is_dir() else old.unlink()


def remove_old(run: Path, keep: int, milestone: int | None, best: Container[int] = ()) -> None:
    """Remove old checkpoints.

    Keeps the ``keep`` newest, those at multiples of ``milestone`` steps, and those of the steps in ``best``.
    Also removes files of carried groups to which no checkpoint refers any more.
    """
    for step, folder in list(list_steps(run).items())[keep:]:
        if step not in best and (milestone is None or step % milestone):
            # Renamed first: if the process is killed, ``remove_parts`` removes the rest.
            os.replace(folder, part_folder(folder))
            shutil.rmtree(part_folder(folder), ignore_errors=True)
    _remove_carried(run)


def carried_files(checkpoint: Path) -> set[Path]:
    """Files of the run with the groups that dynamic sampling carried over to the next step."""
    surplus = read_state(checkpoint).get("sampler", {}).get("surplus", [])
    folder = checkpoint.parents[1] / ROLLOUTS
    # Earlier versions had the groups themselves in the state, as lists.
    return {folder / Path(group["file"]).name for group in surplus if isinstance(group, dict)}


def _remove_carried(run: Path) -> None:
    """Remove files of carried groups that are not needed. Those after the newest checkpoint are kept.

    The next checkpoint may refer to them. A group that is carried over several steps is in the states of all
    checkpoints in between.
    """
    files = {f: int(m[1]) for f in (run / ROLLOUTS).glob("carried_*") if (m := _CARRIED.fullmatch(f.name))}
    checkpoints = list_steps(run)
    if not files or not checkpoints:
        return
    try:
        used = set().union(*map(carried_files, checkpoints.values()))
    except (UserError, ValueError, KeyError):
        return  # a damaged checkpoint, or one of another version: the files that it needs are not known
    for file, step in files.items():
        if step <= max(checkpoints) and file not in used:
            file.unlink(missing_ok=True)
