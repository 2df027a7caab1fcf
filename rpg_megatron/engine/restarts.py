"""What launcher and sampler tell each other about an engine that must be restarted: small files in the run's
work folder, so that nothing is lost however busy either of them is.

An engine's process may end and come back on the same socket, without weights. Each of its processes is a
*life*, numbered from 0: the launcher writes the number down before it starts one, and what the sampler knows
of one life it does not believe of the next.

Where engines and trainer ranks share GPUs, files say as well whose turn it is: an engine that is restarted
takes all of its memory while it starts, so that waits for the engines' turn.
"""

from __future__ import annotations

import json
from pathlib import Path

from rpg_megatron.system.files import atomic_write_text


def incarnation_of(work: Path, index: int) -> int:
    """Number of the engine's latest life: how often it was restarted."""
    try:
        return int((work / f"engine-{index}.life").read_text(encoding="ascii"))
    except FileNotFoundError:
        return 0


def begin_incarnation(work: Path, index: int, incarnation: int) -> None:
    """The launcher's: call it when the life before has ended and this one is not started yet."""
    atomic_write_text(work / f"engine-{index}.life", str(incarnation))


def note_answer(work: Path, index: int, incarnation: int) -> None:
    """The sampler's: this life has come up."""
    atomic_write_text(work / f"engine-{index}.answered", str(incarnation))


def has_answered(work: Path, index: int, incarnation: int) -> bool:
    """The launcher's, whose own look at a busy engine may come late: whether this life had come up."""
    try:
        return (work / f"engine-{index}.answered").read_text(encoding="ascii") == str(incarnation)
    except FileNotFoundError:
        return False


def ask_restart(work: Path, index: int, incarnation: int, reason: str) -> None:
    """The sampler's: this life of the engine is of no use any more; ``reason`` says what it did."""
    atomic_write_text(work / f"engine-{index}.restart", json.dumps([incarnation, reason]))


def take_request(work: Path, index: int, incarnation: int) -> str | None:
    """The launcher's: the reason why this life is to be ended, once; None if nobody asked for that."""
    path = work / f"engine-{index}.restart"
    try:
        asked, reason = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    path.unlink()
    # The launcher may have seen a death before the sampler did: the request is then for a life that is over.
    return str(reason) if asked == incarnation else None


def set_gpu_owner(work: Path, *, trainers: bool) -> None:
    """Whose turn it is on GPUs that engines and trainer ranks share; while nothing was said, the engines'."""
    if trainers:
        atomic_write_text(work / "trainers-turn", "")
    else:
        (work / "trainers-turn").unlink(missing_ok=True)


def is_trainers_turn(work: Path) -> bool:
    """Whether an engine that was started now would find its GPU full."""
    return (work / "trainers-turn").exists()
