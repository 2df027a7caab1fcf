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
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Discriminator, Field, Tag, ValidationError

from rpg_megatron.checkpoints.megatron_folder import (
    MANIFEST,
    MEGATRON,
    CheckpointMetadata,
    find_damage,
    read_manifest,
)
from rpg_megatron.config import UserError
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.files import (
    atomic_write,
    parse_json,
    read_text,
    real_path,
    remove,
    rename,
    sync_folder,
)

CHECKPOINTS = "checkpoints"
LATEST = "latest.json"
MODEL, ANCHOR = "model", "anchor"
ADAPTERS = "adapters"
"""Folder of a run with exported adapters, in PEFT's format."""
STATE, RNG, CONFIG = "state.json", "rng.pt", "config.yaml"
FORMAT = 1
"""Format version of ``state.json`` and of the folder."""
_NAME = re.compile(r"step_(\d{6,})")

_Count = Annotated[int, Field(ge=0, le=2**53)]


class AnyState(BaseModel):
    """What every ``state.json`` has; more keys are allowed here and below."""

    format: int
    step: _Count


class _Stream(BaseModel):
    seed: int = Field(ge=-(2**63), lt=2**63)
    taken: list[_Count] = Field(min_length=1)
    weights: list[float]
    prompts: str
    rows: str = ""


class _Streaming(BaseModel):
    """Of a source that is asked during the run (``data.streaming``)."""

    streaming: Literal[True]
    drawn: _Count
    digest: str


def _kind_of_stream(value: Any) -> str:
    return "streaming" if isinstance(value, dict) and "streaming" in value else "epochs"


class _Sampler(BaseModel):
    stream: Annotated[
        Annotated[_Stream, Tag("epochs")] | Annotated[_Streaming, Tag("streaming")],
        Discriminator(_kind_of_stream),
    ]
    next_ticket: _Count = 0


class _Anchor(BaseModel):
    refreshes: int
    updates: int
    kl: float | None


class _Summary(BaseModel):
    accuracy_before: dict[str, float] = {}
    accuracy_after: dict[str, float] = {}
    rates: list[float] = []


class RunState(BaseModel):
    """What the ``state.json`` of a run has."""

    format: int
    step: _Count
    metrics_bytes: _Count
    row: dict[str, float | bool | str | None] | None = None
    sampler: _Sampler
    anchor: _Anchor | None = None
    skipped_updates: _Count = 0
    summary: _Summary
    seconds: float


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
    folders = {int(m[1]): e for e in entries if (m := _NAME.fullmatch(e.name))}
    return dict(sorted(folders.items(), reverse=True))


def list_steps(run: Path) -> dict[int, Path]:
    """Step -> folder of the run's checkpoints that have a manifest, newest first."""
    return {step: folder for step, folder in list_folders(run).items() if (folder / MANIFEST).is_file()}


def read_step(folder: Path, root: Path | None = None) -> tuple[CheckpointMetadata, dict[str, dict[str, Any]]]:
    """Content of the manifest of a run's checkpoint, as ``read_manifest`` returns it. Reads no other file.

    root: the folder that no link of the checkpoint may leave, if others may have made it.
    Raises UserError if the checkpoint is not complete, or if a link leaves ``root``.
    """
    inside = (real_path(root),) if root else ()
    manifest = read_manifest(folder, *inside)
    if manifest is None:
        raise UserError(f"{MANIFEST} is missing")
    if missing := [name for name in (STATE, RNG, CONFIG, f"{MODEL}/{MEGATRON}") if name not in manifest[1]]:
        raise UserError(f"{MANIFEST} does not list {', '.join(missing)}")
    try:
        links = _find_links(folder, *inside)
    except OSError as e:
        raise UserError(f"{e.filename or folder} cannot be read ({e.strerror})") from None
    if links:
        raise UserError("; ".join(links[:3]))
    return manifest


def find_problems(folder: Path, root: Path | None = None) -> list[str]:
    """One line for each missing or damaged file of a run's checkpoint. Reads every byte.

    root: see ``read_step``.
    """
    try:
        return find_damage(folder, read_step(folder, root)[1], inside=(real_path(root),) if root else ())
    except UserError as e:
        return [str(e)]
    except OSError as e:
        return [f"{e.filename or folder} cannot be read ({e.strerror})"]


def _find_links(folder: Path, *inside: Path) -> list[str]:
    """One line for each link to outside these folders, also of files that the manifest does not list."""
    links = [(p, real_path(p)) for p in sorted(folder.rglob("*")) if inside and p.is_symlink()]
    return [
        f"{link.relative_to(folder)} leads to {real}, outside {inside[0]}"
        for link, real in links
        if not any(real.is_relative_to(place) for place in inside)
    ]


def read_state(folder: Path, form: type[BaseModel] = AnyState) -> dict[str, Any]:
    """Content of ``state.json`` of a complete checkpoint.

    form: ``RunState`` for that of a run. Raises UserError if it has another form or format version.
    """
    try:
        text = read_text(folder / STATE)
        state = parse_json(text)
        saved = state.get("format") if isinstance(state, dict) else None
        if isinstance(saved, int) and saved != FORMAT:
            raise UserError(
                f"{folder}: checkpoint format {saved}, this version reads {FORMAT}; resume with the version "
                "that wrote it, or start over with --fresh"
            )
        form.model_validate_json(text, strict=True)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise _unreadable(folder, f"{place}: {first['msg']}, got {first['input']!r}") from None
    except (OSError, ValueError) as e:
        raise _unreadable(folder, str(e)) from None
    return cast("dict[str, Any]", state)


def _unreadable(folder: Path, why: str) -> UserError:
    return UserError(
        f"{folder / STATE}: not the state of a run ({shorten(why, 200)}); choose another checkpoint, or copy "
        "this one again"
    )


def publish(part: Path, folder: Path, step: int) -> None:
    """Rename a finished checkpoint to its final name and point ``latest.json`` to it."""
    with atomic_write(folder.parent / LATEST) as f:  # first, so that a full disk changes nothing
        f.write(json.dumps({"step": step, "folder": folder.name}).encode())
        f.flush()
        os.fsync(f.fileno())
        remove(folder, ignore_errors=True)  # an incomplete one of the same step
        rename(part, folder)
    sync_folder(folder.parent)


def remove_parts(run: Path) -> None:
    """Remove the leftovers of interrupted saves and removals. Raises OSError."""
    for old in (run / CHECKPOINTS).glob(".*.part"):
        remove(old)


def remove_old(run: Path, keep: int, milestone: int | None, best: Container[int] = ()) -> None:
    """Remove old checkpoints.

    Keeps the ``keep`` newest, those at multiples of ``milestone`` steps, and those of the steps in ``best``.
    """
    for step, folder in list(list_steps(run).items())[keep:]:
        if step not in best and (milestone is None or step % milestone):
            # Renamed first: if the process is killed, ``remove_parts`` removes the rest.
            rename(folder, part_folder(folder))
            remove(part_folder(folder), ignore_errors=True)
