"""Engine restarts: how launcher and sampler coordinate them, by small files in the run's work folder.

Files, so that no message is lost while either process is busy, and none is late: workers, too, look at an
engine's number after each answer, and must not see the old one when a new process has answered. A restarted
engine has the same socket, but no weights. Each process of an engine is an *incarnation*, numbered from 0:
the launcher writes the number before it starts the process, and the sampler discards what it knew of earlier
incarnations.

Where engines and trainer ranks share GPUs, a file also says which of them may use the GPUs: an engine
allocates all its memory while it starts, so a restart waits until the engines may use them.
"""

from __future__ import annotations

import json
from pathlib import Path

from rpg_megatron.config.files import atomic_write_text, read_json, read_text, remove


def incarnation_of(work: Path, index: int) -> int:
    """Number of the engine's current incarnation: how often it was restarted."""
    try:
        return int(read_text(work / f"engine-{index}.life"))
    except FileNotFoundError:
        return 0


def begin_incarnation(work: Path, index: int, incarnation: int) -> None:
    """Launcher: announce an incarnation, after the one before has ended and before this one starts."""
    atomic_write_text(work / f"engine-{index}.life", str(incarnation))


def note_answer(work: Path, index: int, incarnation: int) -> None:
    """Sampler: this incarnation has answered."""
    atomic_write_text(work / f"engine-{index}.answered", str(incarnation))


def has_answered(work: Path, index: int, incarnation: int) -> bool:
    """Launcher: whether this incarnation has answered the sampler, though maybe not yet the launcher."""
    try:
        return read_text(work / f"engine-{index}.answered") == str(incarnation)
    except FileNotFoundError:
        return False


def ask_restart(work: Path, index: int, incarnation: int, reason: str) -> None:
    """Sampler: request a restart, because this incarnation failed with ``reason``."""
    atomic_write_text(work / f"engine-{index}.restart", json.dumps([incarnation, reason]))


def take_request(work: Path, index: int, incarnation: int) -> str | None:
    """Launcher: take the request to restart this incarnation; returns its reason, None if there is none."""
    path = work / f"engine-{index}.restart"
    try:
        requested, reason = read_json(path)
    except FileNotFoundError:
        return None
    remove(path)
    # The launcher may have noticed the failure first: the request is then for an earlier incarnation.
    return str(reason) if requested == incarnation else None


def set_gpu_owner(work: Path, *, trainers: bool) -> None:
    """Set who may use the GPUs that engines and trainer ranks share; at first, the engines."""
    if trainers:
        atomic_write_text(work / "trainers-turn", "")
    else:
        remove(work / "trainers-turn")


def is_trainers_turn(work: Path) -> bool:
    """Whether it is the trainers' turn, so that an engine started now would find its GPU full."""
    return (work / "trainers-turn").exists()
