"""A step with ``rollout.ahead`` on ranks: probes are scored with it, compared, and change nothing in it.

Why: a batch that was sampled ahead may have no token of the present weights, and the guard on mismatch would
be silent. Proved, with real Megatron in fp32 and a sampler that is a stand-in: every probe is fetched once,
before the sampler forgets it, and scored in a row within the budget, of which all replicas have the same
number; the guard names the engine whose probes are off, and a step without any probe is an error on all
ranks; log-probs, metrics and weights of the step are the same bits as without probes, and so is the step
trained again from its rollouts, whose responses several versions sampled. The correction's statistics by lag
are those of ``objectives``, and together those of the update. Tokens that the policy did not sample are in
none of these numbers. For DP2 and PP2. Not covered: engines
(tests/integration).
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu

from rpg_megatron.commands.replay.compare_steps import SavedRollouts, compare, measure_gaps
from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.batch_index import index_of
from rpg_megatron.data.rollout_files import iter_rollouts, rollouts_file
from rpg_megatron.data.trajectory import NOT_SAMPLED, Trajectory
from rpg_megatron.objectives import rollout_correction
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
from tests.support.layouts import TEMPERATURE, make_case, make_layout_model, make_masked_batch
from tests.support.ranks import ranks

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


@ranks(2)
def measure_all(folder: Path, cases: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Of each case, what each rank says."""
    return {name: measure(case, folder, torch.device("cpu")) for name, case in cases.items()}


def measure(case: dict[str, Any], folder: Path, device: torch.device) -> list[dict[str, Any]]:
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
    return everyone


LAYOUTS = {"DP2": {"data": 2}, "PP2": {"pipeline": 2}}
SETTINGS: dict[str, Any] = {
    "training": {"minibatches": 2, "tokens_per_microbatch": 100, "logprob_chunk": 17},
    "rollout": {"prompts_per_step": 4, "temperature": TEMPERATURE, "ahead": 2},
    "correction": {"type": "truncate", "high": 1.5},
    "engine": {"replicas": 3},
    "anchor": {"type": "fixed"},
}
ENGINES = [0, 0, 1, 1, 2]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("probes")
    make_layout_model(folder / "model", tied=False)
    batch = make_masked_batch()
    draw = np.random.default_rng(0)
    for i, t in enumerate(batch):
        t.reward, t.group, t.sample = math.sin(i), i // 3, i % 3
        versions = np.sort(draw.integers(3, 6, len(t.response)))  # segments
        t.versions = np.where(t.mask, versions, NOT_SAMPLED).astype(np.int32)
    lengths = [1, 9, 4, 2, 7]
    of = batch[3]
    probes = [
        replace(
            of, group=engine, sample=i, response=of.response[:n], behaviour=of.behaviour[:n], mask=of.mask[:n]
        )
        for i, (engine, n) in enumerate(zip(ENGINES, lengths, strict=True))
    ]
    for t in probes:
        t.versions = np.full_like(t.response, 5)
    (folder / "batch.pkl").write_bytes(pickle.dumps((batch, probes)))
    cases = {
        name: make_case(folder / "model", layout, 0, SETTINGS) | {"name": name}
        for name, layout in LAYOUTS.items()
    }
    for name in cases:
        (folder / name).mkdir()
    return measure_all(folder, cases)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_probes_change_nothing_in_the_step(results: dict, layout: str) -> None:
    for rank in results[layout]:
        assert rank["same"]
        assert rank["replayed"]
        metrics = {k: v for k, v in rank["metrics"].items() if k in rank["wanted"]}
        assert metrics == rank["wanted"]
        more = {key.split("/")[0] for key in rank["metrics"].keys() - rank["wanted"].keys()}
        assert more == {"async", "mismatch", "correction"}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_probe_is_scored_in_a_row_of_a_replica(results: dict, layout: str) -> None:
    ranks = results[layout]
    replicas = ranks if layout == "DP2" else ranks[:1]
    assert all(rank["rows"] == replicas[0]["rows"] for rank in ranks) or layout == "DP2"
    assert len({len(rank["rows"]) for rank in ranks}) == 1
    scored = [tuple(probe) for rank in replicas for row in rank["rows"] for probe in row]
    assert sorted(scored) == sorted(zip(ENGINES, range(5), strict=True))
    assert max(len(row) for rank in ranks for row in rank["rows"]) <= 2  # of 100 tokens; each has 41 to 49
    assert all(rank["gap"] < 1e-5 for rank in ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_guard_names_the_engine(results: dict, layout: str) -> None:
    first, second = (rank["said"] for rank in results[layout])
    wrong_probe, alone, lacking, off, fine = first
    assert "step 6: engine and trainer disagree" in wrong_probe
    assert "of prompt 3, sample 4 (probe of engine 2): engine" in wrong_probe
    assert second[0] == ""  # rank 0 ends the run
    assert "(probe of engine 2)" in alone  # without a token of the batch
    assert lacking == second[2]
    assert "step 6: no engine answered a probe with weights of version 5" in lacking
    assert off == fine == second[3] == second[4] == ""
    assert results[layout][0]["metrics"]["async/probe_tokens"] == 23
    for rank in results[layout]:  # too few to compare the engines
        assert len(rank["warned"]) == 1
        assert rank["warned"][0].startswith("step 6: the engines' log-probs were not compared")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_correction_by_lag(results: dict, layout: str) -> None:
    sampled = [np.array(t)[:, np.array(t[2]) >= 0] for rank in results[layout] for t in rank["mine"]]
    old, behaviour, versions = np.concatenate(sampled, axis=1)
    expected = rollout_correction(
        torch.tensor(old), torch.tensor(behaviour), torch.zeros(len(old)), kind="truncate", high=1.5
    ).metrics
    row = results[layout][1]["metrics"]
    for key, column in (("ratio_mean", "correction_ratio"), ("hit_frac", "correction_hit")):
        parts = [expected[column].numpy()[versions == 5 - lag] for lag in range(3)]
        for lag, part in enumerate(parts):
            assert row[f"correction/lag_{lag}/{key}"] == pytest.approx(part.mean(), abs=1e-5)
        together = sum(row[f"correction/lag_{lag}/{key}"] * len(part) for lag, part in enumerate(parts))
        assert together / len(old) == pytest.approx(row[f"correction/{key}"], abs=1e-6)
    log_r = np.concatenate([np.subtract(t[0], t[1]) for t in sampled])
    whole = np.exp([np.subtract(t[0], t[1]).sum() for t in sampled])
    for key, w in (("token", np.exp(log_r)), ("sequence", whole)):
        assert row[f"off_policy/ess_{key}"] == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()), abs=1e-5)
    assert row["off_policy/kl_k1"] == pytest.approx(-log_r.mean(), abs=1e-5)
    assert row["off_policy/kl_k3"] == pytest.approx((np.exp(log_r) - 1 - log_r).mean(), abs=1e-5)
    hit = [bool((np.exp(np.subtract(t[0], t[1])) > 1.5).any()) for t in sampled]
    assert row["correction/sequences_hit_frac"] == pytest.approx(np.mean(hit), abs=1e-9)
    assert row["correction/lag_0/hit_frac"] == 0 < row["correction/lag_1/hit_frac"]
    assert "correction/lag_3/ratio_mean" not in row
