"""Save and load the complete state of a run; saves are asynchronous, and a failed save does not stop the run.

A save has three phases:

1. Blocking: ranks agree on who writes what, and each copies its part of weights and optimizer state to host
   memory.
2. On a thread of each rank: write the copy and hash the files.
3. On the same threads, over a process group of their own: when every rank's files are complete, rank 0 writes
   index and manifest, and renames the folder to the checkpoint's name.

Threads are used instead of Megatron's writer processes: those are forked from a process with threads and
open sockets, outlive a killed rank, and see later changes to weights in shared memory. Writing and hashing
release the GIL.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from rpg_megatron.checkpoints.index import StoredPart
from rpg_megatron.checkpoints.megatron import PlannedSave, load_weights, plan_save
from rpg_megatron.checkpoints.megatron_folder import CheckpointMetadata, hash_files, write_manifest
from rpg_megatron.checkpoints.plain_loading import load_object
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
from rpg_megatron.config.errors import gib, shorten
from rpg_megatron.config.files import open_own, open_regular
from rpg_megatron.config.rollout import CheckpointSettings
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.model import Mesh
from rpg_megatron.policy.policy import Policy
from rpg_megatron.system.collectives import broadcast_object, gather_on_first, new_host_group, run_together

_Written = tuple[list[list[StoredPart]], dict[str, dict[str, Any]]]
"""What a rank wrote: for each folder the parts for ``PlannedSave.finish``; the files' hashes by name."""


@dataclass(frozen=True)
class SaveResult:
    """Result of a save; the same on every rank."""

    step: int
    folder: Path
    seconds: float
    """From the start of the save until it was complete or had failed."""
    problem: str | None
    """Why the save failed; None: the checkpoint is complete."""

    @property
    def warning(self) -> str:
        """Message for the user about a failed save."""
        free = _free_space(self.folder.parents[1])
        return (
            f"step {self.step}: no checkpoint, {self.folder} cannot be written ({self.problem}); {free}"
            "training continues"
        )


@dataclass
class _PendingSave:
    """A save in progress."""

    step: int
    folder: Path
    started: float
    planned: dict[str, PlannedSave]
    """Subfolder of the checkpoint -> what this rank writes into it."""
    files: dict[str, bytes]
    """Rank 0: the other files, by name."""


class Saver:
    """Saves this rank's part of the checkpoints, one at a time."""

    def __init__(
        self,
        run_dir: Path,
        policy: Policy,
        anchor: HeldAnchor | None,
        settings: CheckpointSettings,
        prune: Callable[[], None] | None = None,
    ) -> None:
        """Collective, like ``start``; the other methods are not.

        prune: removes old checkpoints after each save, called on the saving thread of rank 0; may raise
        OSError. None: removes those that ``keep`` and ``milestone`` do not keep.
        """
        self._prune = prune or (lambda: remove_old(run_dir, settings.keep, settings.milestone))
        self._run_dir, self._policy, self._anchor, self._settings = run_dir, policy, anchor, settings
        self._first = policy.mesh.rank == 0
        # A group of its own: messages of the saving thread must not mix with those of the main thread.
        self._group = new_host_group()
        self._thread: threading.Thread | None = None
        self._results: deque[SaveResult] = deque()

    def start(self, step: int, run_state: Callable[[], dict[str, Any]]) -> None:
        """Save the current state as that of ``step``; waits for the previous save first.

        run_state: called on rank 0 only; further values for ``state.json``, JSON-serialisable. The state may
        change once this returns. A failure to write raises nothing: ``pop_results`` reports it, and earlier
        checkpoints are kept.
        """
        self.wait()
        started = time.monotonic()
        folder = step_folder(self._run_dir, step)
        part = part_folder(folder)
        further = run_together(lambda: run_state() if self._first else {})
        generators = [
            {name: torch.from_numpy(state) for name, state in rank.items()}
            for rank in gather_on_first(_random_state(), dict[str, np.ndarray])
        ]
        files: dict[str, bytes] = {}

        def prepare() -> None:
            if not self._first:
                return
            self._clean()  # left by a run that was killed
            folder.parent.mkdir(exist_ok=True)
            for name in self._folders():
                (part / name).mkdir(parents=True)
            anchor = self._anchor and self._anchor.state()
            state = {"format": FORMAT, "step": step, "anchor": anchor, **further}
            buffer = io.BytesIO()
            torch.save(generators, buffer)
            files[STATE] = (json.dumps(state) + "\n").encode()
            files[RNG] = buffer.getvalue()
            with open_regular(self._run_dir / CONFIG) as file:
                files[CONFIG] = file.read()

        try:
            run_together(prepare)
        except (OSError, UserError) as e:
            self._clean()
            self._add_result(step, folder, started, str(e))
            return
        save = _PendingSave(step, folder, started, self._plan(part, step), files)
        # A daemon thread: a rank that exits with an error must not wait for a hanging disk.
        self._thread = threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True)
        self._thread.start()
        if not self._settings.asynchronous:
            self.wait()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until no save is in progress, at most ``timeout`` seconds; returns whether none is."""
        if self._thread:
            self._thread.join(timeout)
            if not self._thread.is_alive():
                self._thread = None
        return self._thread is None

    def pop_results(self) -> list[SaveResult]:
        """Results of the saves that ended since the last call."""
        return [self._results.popleft() for _ in range(len(self._results))]

    def _folders(self) -> list[str]:
        return [MODEL, *([ANCHOR] if self._anchor else [])]

    def _plan(self, part: Path, step: int) -> dict[str, PlannedSave]:
        stage, policy = self._settings.asynchronous, self._policy
        try:
            planned = {MODEL: policy.plan_save(part / MODEL, step, stage=stage)}
            if self._anchor:
                with self._anchor.swapped_in():  # the policy's weights are back before anything is written
                    planned[ANCHOR] = plan_save(part / ANCHOR, policy.chunks, iteration=step, stage=True)
        except OSError as e:  # on this rank only: the other ranks would wait for it forever
            raise UserError(
                f"step {step}: {part} was removed during a save ({e}); rerun the same command to resume"
            ) from None
        return planned

    def _run(self, save: _PendingSave) -> None:
        """On the thread: write, gather all ranks' results, finish."""
        try:
            gathered = gather_on_first(self._write(save), _Written | str, self._group)
            problems = [f"rank {r}: {result}" for r, result in enumerate(gathered) if isinstance(result, str)]
            problem = "; ".join(problems) or None
            if self._first:
                if not problems:
                    problem = self._finish(save, gathered)
                if problem:
                    self._clean()
            problem = broadcast_object(problem, str | None, self._group)
        except Exception as e:  # another rank died, and ends the run
            problem = _reason(e)
        self._add_result(save.step, save.folder, save.started, problem)

    def _write(self, save: _PendingSave) -> _Written | str:
        """What this rank wrote, or the error message."""
        try:
            written = [planned.write() for planned in save.planned.values()]
            names = [f"{folder}/{name}" for folder, planned in save.planned.items() for name in planned.files]
            return written, hash_files(part_folder(save.folder), names)
        except Exception as e:
            return _reason(e)

    def _finish(self, save: _PendingSave, gathered: list[_Written]) -> str | None:
        """Complete the checkpoint (rank 0, after all ranks wrote); returns an error message or None."""
        part, policy = part_folder(save.folder), self._policy
        try:
            for i, planned in enumerate(save.planned.values()):
                planned.finish([written[i] for written, _ in gathered])
            for name, content in save.files.items():
                with open_own(part / name, "wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            metadata = CheckpointMetadata(
                megatron_core=importlib.metadata.version("megatron-core"),
                dtype=policy.settings.precision.dtype,
                tensor=policy.mesh.tensor,
                pipeline=policy.mesh.pipeline,
            )
            write_manifest(part, metadata, known={n: h for _, hashes in gathered for n, h in hashes.items()})
            publish(part, save.folder, save.step)
        except Exception as e:
            return _reason(e)
        with suppress(OSError):  # removal is tried again after the next save
            self._prune()
        return None

    def _clean(self) -> None:
        """Remove the files of a failed save; where that fails, the next save tries again."""
        if self._first:
            with suppress(OSError):
                remove_parts(self._run_dir)

    def _add_result(self, step: int, folder: Path, started: float, problem: str | None) -> None:
        self._results.append(SaveResult(step, folder, time.monotonic() - started, problem))


def load_run(
    folder: Path, policy: Policy, anchor: HeldAnchor | None, *, trusted: bool = False
) -> dict[str, Any]:
    """Load a checkpoint of any parallel layout; returns the contents of its ``state.json``. Collective.

    trusted: see ``load_weights``. Random generators are restored only if the number of ranks is the same.
    """
    state = read_state(folder)
    if anchor and not state.get("anchor"):
        raise UserError(
            f"{folder / STATE}: has no state of the anchor (anchor.type); choose another checkpoint"
        )
    load_model(folder, policy, anchor, trusted=trusted)
    if anchor:
        anchor.restore(state["anchor"])
    try:
        _restore_generators(load_object(folder, RNG), policy.mesh)
    except (LookupError, RuntimeError, TypeError) as e:  # for a file that others have written
        raise UserError(
            f"{folder / RNG}: not readable ({type(e).__name__}: {shorten(str(e))}); choose another checkpoint"
        ) from None
    return state


def _restore_generators(generators: Any, mesh: Mesh) -> None:
    if len(generators) == mesh.world:
        states = generators[mesh.rank]
        torch.set_rng_state(states["cpu"])
        if "cuda" in states and torch.cuda.is_available():
            torch.cuda.set_rng_state(states["cuda"])


def load_model(folder: Path, policy: Policy, anchor: HeldAnchor | None, *, trusted: bool = False) -> None:
    """Load weights, optimizer state and anchor of any parallel layout. Collective.

    trusted: see ``load_weights``.
    """
    if anchor:
        with anchor.swapped_in():  # the loaded weights become the anchor's when the block ends
            load_weights(folder / ANCHOR, policy.chunks, policy.vocab, trusted=trusted)
    policy.load(folder / MODEL, trusted=trusted)


def _random_state() -> dict[str, NDArray[np.uint8]]:
    """This rank's random generators. Unused today; a model with dropout would need them."""
    state = {"cpu": torch.get_rng_state().numpy()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state().numpy()
    return state


def _reason(error: BaseException) -> str:
    """The message of the underlying OSError, which torch wraps in errors of its own."""
    first: BaseException | None = error
    while first is not None and not isinstance(first, OSError):
        first = first.__cause__ or first.__context__
    return str(first or error) or repr(error)


def _free_space(folder: Path) -> str:
    try:
        return f"{gib(shutil.disk_usage(folder).free)} are free there; "
    except OSError:
        return ""
