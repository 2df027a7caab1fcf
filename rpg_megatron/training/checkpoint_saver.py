"""The whole state of a run, to a checkpoint and back, so that it goes on as if it had never stopped.

Checkpoints are written beside training, and what goes wrong with that does not stop the run.

A save has three parts. The first is on training's time: ranks agree on who writes what, and each copies its
part of weights and optimizer state to host memory. The second is on a thread of each rank: it writes the
copy and hashes what it wrote. The third ends it, on the same threads, over a process group of their own: once
every rank's files are whole, rank 0 writes index and manifest, and gives the checkpoint its name.

Threads, not Megatron's writer processes: a process would be forked from one with threads and open sockets,
outlive a rank that is killed, and see every later change to weights that lie in shared memory. Writing and
hashing let go of the interpreter.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.checkpoints.megatron import PlannedSave, load_weights, plan_save
from rpg_megatron.checkpoints.megatron_folder import CheckpointMetadata, hash_files, write_manifest
from rpg_megatron.checkpoints.run_folder import (
    ANCHOR,
    CONFIG,
    FORMAT,
    MODEL,
    RNG,
    STATE,
    part_folder,
    publish,
    read_state,
    remove_old,
    remove_parts,
    step_folder,
)
from rpg_megatron.config import UserError
from rpg_megatron.config.rollout import CheckpointSettings
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.collectives import gather_objects, new_gloo_group, run_together


@dataclass(frozen=True)
class SaveResult:
    """How a save ended; the same on every rank."""

    step: int
    folder: Path
    seconds: float
    """From its beginning until it was whole, or had failed."""
    problem: str | None
    """Why there is no such checkpoint; None: it is whole."""


@dataclass
class _Job:
    """A save under way."""

    step: int
    folder: Path
    begun: float
    parts: dict[str, PlannedSave]
    """Folder below the checkpoint's -> what this rank writes into it."""
    small: dict[str, bytes]
    """Rank 0: the other files."""


class Saver:
    """This rank's share in saving. One save is under way at most."""

    def __init__(
        self, run_dir: Path, policy: Policy, anchor: HeldAnchor | None, settings: CheckpointSettings
    ) -> None:
        """Collective, like ``start``; the other methods are not."""
        self._run_dir, self._policy, self._anchor, self._settings = run_dir, policy, anchor, settings
        self._first = policy.mesh.rank == 0
        # A group of its own: its thread's messages may not mix with those of the main thread.
        self._group = new_gloo_group()
        self._thread: threading.Thread | None = None
        self._outcomes: deque[SaveResult] = deque()

    def start(self, step: int, rest: Callable[[], dict[str, Any]]) -> None:
        """Save the present state as that of ``step``, after the save before, if one is still under way.

        rest: called on rank 0 alone; what else ``load_run`` shall hand back, for JSON. Unless
        ``checkpoint.asynchronous`` is off, everything may change as soon as this returns. That it cannot be
        written is no error: ``outcomes`` tells, and what there was before stays.
        """
        self.wait()
        begun = time.monotonic()
        folder = step_folder(self._run_dir, step)
        part = part_folder(folder)
        told = run_together(lambda: rest() if self._first else {})
        generators = gather_objects(_random_state())
        small: dict[str, bytes] = {}

        def prepare() -> None:
            if not self._first:
                return
            self._clean()  # of a run that was killed
            folder.parent.mkdir(exist_ok=True)
            for name in self._folders():
                (part / name).mkdir(parents=True)
            anchor = self._anchor and self._anchor.state()
            state = {"format": FORMAT, "step": step, "anchor": anchor, **told}
            buffer = io.BytesIO()
            torch.save(generators, buffer)
            small[STATE] = (json.dumps(state) + "\n").encode()
            small[RNG] = buffer.getvalue()
            small[CONFIG] = (self._run_dir / CONFIG).read_bytes()

        try:
            run_together(prepare)
        except (OSError, UserError) as e:
            self._clean()
            self._end(step, folder, begun, str(e))
            return
        job = _Job(step, folder, begun, self._plan(part, step), small)
        # A daemon: a rank that fails does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._run, args=(job,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._settings.asynchronous:
            self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Until no save is under way, or for so many seconds; says whether none is."""
        if self._thread:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is None

    def outcomes(self) -> list[SaveResult]:
        """Saves that have ended since this was asked last."""
        return [self._outcomes.popleft() for _ in range(len(self._outcomes))]

    def _folders(self) -> list[str]:
        return [MODEL, *([ANCHOR] if self._anchor else [])]

    def _plan(self, part: Path, step: int) -> dict[str, PlannedSave]:
        stage, policy = self._settings.asynchronous, self._policy
        try:
            parts = {MODEL: policy.plan_save(part / MODEL, step, stage=stage)}
            if self._anchor:
                with self._anchor.swapped_in():  # its weights are out again before anything is written
                    parts[ANCHOR] = plan_save(part / ANCHOR, policy.chunks, iteration=step, stage=True)
        except OSError as e:  # one rank's: the others are about to wait for it in vain
            raise UserError(f"step {step}: {part} went away in the middle of a save ({e})") from None
        return parts

    def _run(self, job: _Job) -> None:
        """On the thread: write, agree that all have, finish."""
        try:
            everyone: list[Any] = [None] * self._policy.mesh.world
            dist.all_gather_object(everyone, self._write(job), group=self._group)
            problems = [f"rank {r}: {share}" for r, share in enumerate(everyone) if isinstance(share, str)]
            result = ["; ".join(problems) or None]
            if self._first:
                if not problems:
                    result = [self._finish(job, everyone)]
                if result[0]:
                    self._clean()
            dist.broadcast_object_list(result, src=0, group=self._group)
            problem = result[0]
        except Exception as e:  # another rank is gone, and the run with it
            problem = _reason(e)
        self._end(job.step, job.folder, job.begun, problem)

    def _write(self, job: _Job) -> tuple[list[Any], dict[str, dict[str, Any]]] | str:
        """What each part's files hold, and their sums; or why they could not be written."""
        try:
            found = [part.write() for part in job.parts.values()]
            names = [f"{folder}/{name}" for folder, part in job.parts.items() for name in part.files]
            return found, hash_files(part_folder(job.folder), names)
        except Exception as e:
            return _reason(e)

    def _finish(self, job: _Job, everyone: list[Any]) -> str | None:
        """Rank 0, when all have written. Says what went wrong, if something did."""
        part, policy = part_folder(job.folder), self._policy
        try:
            for i, planned in enumerate(job.parts.values()):
                planned.finish([found[i] for found, _ in everyone])
            for name, content in job.small.items():
                with (part / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            facts = CheckpointMetadata(
                megatron_core=importlib.metadata.version("megatron-core"),
                dtype=policy.settings.precision.dtype,
                tensor=policy.mesh.tensor,
                pipeline=policy.mesh.pipeline,
            )
            write_manifest(part, facts, known={n: s for _, sums in everyone for n, s in sums.items()})
            publish(part, job.folder, job.step)
        except Exception as e:
            return _reason(e)
        with suppress(OSError):  # what cannot be removed is tried again after the next save
            remove_old(self._run_dir, self._settings.keep, self._settings.milestone)
        return None

    def _clean(self) -> None:
        """Remove what a failed save has left, if the disk lets us; else the next save does."""
        if self._first:
            with suppress(OSError):
                remove_parts(self._run_dir)

    def _end(self, step: int, folder: Path, begun: float, problem: str | None) -> None:
        self._outcomes.append(SaveResult(step, folder, time.monotonic() - begun, problem))


def load_run(folder: Path, policy: Policy, anchor: HeldAnchor | None) -> dict[str, Any]:
    """Take up a checkpoint, written in whatever layout; returns what its ``state.json`` holds. Collective.

    The random generators are taken up if there are as many ranks as there were.
    """
    state = read_state(folder)
    load_model(folder, policy, anchor)
    if anchor:
        anchor.restore(state["anchor"])
    generators = torch.load(folder / RNG, weights_only=True)
    if len(generators) == policy.mesh.world:
        own = generators[policy.mesh.rank]
        torch.set_rng_state(own["cpu"])
        if "cuda" in own and torch.cuda.is_available():
            torch.cuda.set_rng_state(own["cuda"])
    return state


def load_model(folder: Path, policy: Policy, anchor: HeldAnchor | None) -> None:
    """Take up weights, optimizer state and anchor, written in whatever layout. Collective."""
    if anchor:
        with anchor.swapped_in():  # what is read stays behind as the anchor's
            load_weights(folder / ANCHOR, policy.chunks, policy.vocab)
    policy.load(folder / MODEL)


def _random_state() -> dict[str, torch.Tensor]:
    """This rank's random state. Nothing draws from it today; a model with dropout would."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def _reason(error: BaseException) -> str:
    """The message of what began it: torch wraps what the disk said."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__cause__ or first.__context__
    return str(first or error) or repr(error)
