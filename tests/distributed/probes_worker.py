"""One rank of test_probes: steps with and without ``rollout.ahead`` on one batch, in each layout."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.commands.replay.compare_steps import SavedRollouts, compare, measure_gaps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.rollout_files import iter_rollouts, rollouts_file
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.policy.model import Mesh, start_mesh
from rpg_megatron.rollout.sampler_client import RolloutBatch
from rpg_megatron.system.collectives import gather_objects
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.batch_scatter import iter_trajectories
from rpg_megatron.training.rollout_saver import RolloutSaver
from rpg_megatron.training.run import RankRun
from rpg_megatron.training.step_warnings import StepWarnings
from rpg_megatron.training.trainer import Trainer
from tests.support.batches import ListSource, by_row
from tests.support.ranks import measure_cases

STEP = 6
PROBES = 1000
"""Tickets of probes start here."""
WARNED: list[str] = []


class Workers(ListSource):
    """Batch and probes in one place, until the sampler is told to release them."""

    def __init__(self, trajectories: Sequence[Trajectory], probes: Sequence[Trajectory]):
        super().__init__([replace(t) for t in trajectories])
        self.held |= by_row([replace(t) for t in probes], PROBES)


class StandIn:
    """Stands in for the sampler and its client."""

    def __init__(self, mesh: Mesh, answer: RolloutBatch, source: Workers | None):
        self._mesh, self._answer, self._source = mesh, answer, source

    def call_with_resync(self, call: Callable[[Any], Any]) -> Any:
        result = call(self) if self._mesh.rank == 0 else None
        dist.barrier()
        return result

    def rollout(self, step: int, version: int) -> RolloutBatch:
        assert version == step - 1
        return self._answer

    def release(self) -> None:
        assert self._source is not None
        self._source.held.clear()


def make_run(trainer: Trainer, batch: Sequence[Trajectory], probes: Sequence[Trajectory] | None) -> RankRun:
    """A rank's run as far as a step needs it. probes: None without ``rollout.ahead``."""
    index = None
    if probes:
        index = index_of(probes)
        index.ticket += PROBES
    mesh = trainer.mesh
    source = Workers(batch, probes or ()) if mesh.leads else None
    run = object.__new__(RankRun)
    run.trainer, run.settings, run.mesh, run._version = trainer, trainer.settings, mesh, STEP - 1
    run._source = source  # type: ignore[assignment]
    answer = RolloutBatch(index_of(batch), probes=index)
    run.weight_sync = StandIn(mesh, answer, source)  # type: ignore[assignment]
    run._stop = SimpleNamespace(explains_failure=lambda: False)  # type: ignore[assignment]
    run._rollouts = SimpleNamespace(finish=list)  # type: ignore[assignment]
    run._metrics = SimpleNamespace(write=lambda row: None)  # type: ignore[assignment]
    run.events = SimpleNamespace(  # type: ignore[assignment]
        write_or_warn=lambda write: None, phase=lambda name: None, warn=WARNED.append
    )
    run._warnings = StepWarnings(trainer.settings, run.events.warn)
    return run


def score(trainer: Trainer, trajectories: Sequence[Trajectory]) -> None:
    """Set ``behaviour`` to the log-probs of an engine with the trainer's weights; each sequence alone."""
    rows = [trainer.policy.pack([t]) for t in trajectories]
    for row, out in zip(rows, trainer.policy.logprobs(rows), strict=True):
        for t, logp in row.split(out[0]):
            t.behaviour = logp.numpy().copy()


def check(trainer: Trainer, batch: Sequence[Trajectory], probes: Sequence[Trajectory]) -> tuple[str, Batch]:
    """What the guard says on this rank, and the batch."""
    run = make_run(trainer, batch, probes)
    step = run.collect(STEP)
    assert run.mesh.rank or not cast(Workers, run._source).held, "the sampler keeps the step's trajectories"
    run.compute_log_probs(step)
    try:
        run.check_mismatch(step)
    except UserError as e:
        return str(e), step
    return "", step


def with_guard(trainer: Trainer, mode: str) -> None:
    guards = trainer.settings.guards.model_copy(update={"mismatch": mode})
    trainer.settings = trainer.settings.model_copy(update={"guards": guards})


def replayed(trainer: Trainer, step: Batch, folder: Path) -> bool:
    """Whether the step, trained again from its rollouts with the same weights, gives the same bits."""
    saver = RolloutSaver(folder, trainer.mesh)
    saver.start(STEP, step.mine, routes=False)
    assert saver.finish() == []
    file = rollouts_file(folder, STEP)
    source = SavedRollouts(file) if trainer.mesh.leads else None
    again = trainer.prepare_batch(index_of(iter_rollouts(file)) if trainer.mesh.rank == 0 else None, source)
    trainer.scorer.compute_log_probs(again)
    trainer.update(STEP, again, lambda done, total: None)
    gaps = measure_gaps(source.saved if source else [], again.mine)
    return bool(compare(gaps, step.metrics, again.metrics, 0.0)["exact"])


def measure(case: dict[str, Any], folder: Path, device: torch.device) -> dict[str, Any]:
    settings = Settings.model_validate(case["settings"])
    mesh = start_mesh(settings.parallel)
    trainer = Trainer(settings, mesh, device)
    sections = case["settings"]
    without = sections | {"rollout": sections["rollout"] | {"ahead": 0}}
    plain, third = Trainer(Settings.model_validate(without), mesh, device), Trainer(settings, mesh, device)
    batch, probes = pickle.loads((folder / "batch.pkl").read_bytes())
    score(trainer, [*batch, *probes])
    draw = np.random.default_rng(0)
    for t in batch:  # older weights sampled some tokens
        lag = STEP - 1 - t.versions
        t.behaviour += (lag * draw.normal(0, 0.5, len(lag))).astype(np.float32)
        t.behaviour[~t.mask] = 0

    wrong = [replace(t, behaviour=t.behaviour + (t.group == 2) * np.float32(0.01)) for t in probes]
    wrong_probe, _ = check(trainer, batch, wrong)
    older = [replace(t, versions=np.full_like(t.versions, STEP - 2)) for t in batch]
    alone, _ = check(trainer, older, wrong[-1:])
    lacking, _ = check(trainer, batch, [])
    with_guard(trainer, "off")
    off, _ = check(trainer, batch, [])
    with_guard(trainer, "stop")
    WARNED.clear()
    fine, step = check(trainer, batch, probes)
    assert step.probes is not None
    probed = step.probes.minibatches
    straight = make_run(plain, batch, None)
    plain_step = straight.collect(STEP)
    straight.compute_log_probs(plain_step)
    pairs = zip(iter_trajectories(step.minibatches), iter_trajectories(plain_step.minibatches), strict=True)
    same = all(a.old.tobytes() == b.old.tobytes() for a, b in pairs)
    for run_trainer, run_step in ((trainer, step), (plain, plain_step)):
        run_trainer.update(STEP, run_step, lambda done, total: None)
    weights = zip(trainer.policy.named_parameters(), plain.policy.named_parameters(), strict=True)
    same &= all(torch.equal(a, b) for (_, a), (_, b) in weights)
    everyone = gather_objects(
        {
            "said": [wrong_probe, alone, lacking, off, fine],
            "warned": list(WARNED),
            "same": same,
            "replayed": replayed(third, step, folder / case["name"]),
            "metrics": step.metrics,
            "wanted": plain_step.metrics,
            "rows": [[(t.group, t.sample) for t in row] for row in probed[0]],
            "gap": max(
                (
                    float(np.abs(t.old - t.behaviour).max())
                    for t in iter_trajectories(step.probes.minibatches)
                ),
                default=0.0,
            ),
            "mine": [(t.old.tolist(), t.behaviour.tolist(), t.versions.tolist()) for t in step.mine],
        }
    )
    mpu.destroy_model_parallel()
    return {"ranks": everyone}


if __name__ == "__main__":
    measure_cases(measure)
