"""The whole state of a run, to a checkpoint and back, so that it goes on as if it had never stopped."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from rpg_megatron.bridge.collective import gather_objects, run_together
from rpg_megatron.config import UserError
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.checkpoint import load_weights, save_weights
from rpg_megatron.policy.checkpoint_folder import Facts, write_manifest
from rpg_megatron.policy.policy import Policy
from rpg_megatron.training.checkpoints import (
    ANCHOR,
    CONFIG,
    FORMAT,
    MODEL,
    RNG,
    STATE,
    part_folder,
    publish,
    read_state,
    step_folder,
)


def save_run(
    run_dir: Path,
    step: int,
    policy: Policy,
    anchor: HeldAnchor | None,
    rest: Callable[[], dict[str, Any]],
) -> Path:
    """Write the checkpoint of a step. Collective; the weights stay as they are meanwhile.

    rest: called on rank 0 alone; what else ``load_run`` shall hand back, for JSON.
    Raises UserError on every rank if it cannot be written; what there was before stays.
    """
    folder = step_folder(run_dir, step)
    part = part_folder(folder)
    first = policy.mesh.rank == 0

    def prepare() -> None:
        if first:
            for old in folder.parent.glob(".*.part"):  # of a run that was killed
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            for name in (MODEL, *((ANCHOR,) if anchor else ())):
                (part / name).mkdir(parents=True)

    def finish() -> None:
        if not first:
            return
        state = {"format": FORMAT, "step": step, "anchor": anchor and anchor.state(), **rest()}
        (part / STATE).write_text(json.dumps(state) + "\n", encoding="utf-8")
        buffer = io.BytesIO()  # torch.save to a full disk raises anything but OSError
        torch.save(generators, buffer)
        (part / RNG).write_bytes(buffer.getvalue())
        shutil.copyfile(run_dir / CONFIG, part / CONFIG)
        for file in part.rglob("*"):
            if file.is_file():
                with file.open("rb") as f:
                    os.fsync(f.fileno())
        settings = policy.settings
        write_manifest(
            part,
            Facts(
                megatron_core=importlib.metadata.version("megatron-core"),
                dtype=settings.precision.dtype,
                tensor=policy.mesh.tensor,
                pipeline=policy.mesh.pipeline,
            ),
        )
        publish(part, folder, step)

    try:
        run_together(prepare)
        save_model(part, policy, anchor, step)
        generators = gather_objects(_generators())
        run_together(finish)
    except (OSError, UserError, CheckpointException) as e:  # the last is no Exception, and comes to all ranks
        print(f"writing {folder}: {e}", file=sys.stderr, flush=True)
        reason = (
            "Megatron could not write its files; see the rank's log"
            if isinstance(e, CheckpointException)
            else str(e)
        )
        free = shutil.disk_usage(run_dir).free / 1024**3
        if first:
            shutil.rmtree(part, ignore_errors=True)
        raise UserError(
            f"step {step}: the checkpoint cannot be written to {folder} ({reason}); {free:.1f} GiB are free "
            "there: make room, or set checkpoint.every=null to go without"
        ) from None
    return folder


def load_run(folder: Path, policy: Policy, anchor: HeldAnchor | None) -> dict[str, Any]:
    """Take up a checkpoint, written in whatever layout; returns ``step`` and what ``rest`` gave. Collective.

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


def save_model(folder: Path, policy: Policy, anchor: HeldAnchor | None, step: int) -> None:
    """The part that every rank has a share in; the folders exist. Readable in any layout."""
    policy.save(folder / MODEL, step)
    if anchor:
        with anchor.swapped_in():
            save_weights(folder / ANCHOR, policy.chunks, iteration=step)
    dist.barrier()


def load_model(folder: Path, policy: Policy, anchor: HeldAnchor | None) -> None:
    """Take up what ``save_model`` wrote."""
    if anchor:
        with anchor.swapped_in():  # what is read stays behind as the anchor's
            load_weights(folder / ANCHOR, policy.chunks, policy.vocab)
    policy.load(folder / MODEL)


def _generators() -> dict[str, torch.Tensor]:
    """This rank's random state. Nothing draws from it today; a model with dropout would."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.get_rng_state()
    return found
