"""One trainer rank of a run: the methods that the training loop calls.

Methods are collective unless they say otherwise: every rank calls them in the same order. Rank 0 alone has
the connection to the sampler and writes files.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch

from rpg_megatron.checkpoints.run_folder import list_steps, read_state
from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.rollout_files import prune_rollouts
from rpg_megatron.evaluation.metrics import score_sets, write_results
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rewards.failures import FailureCount, guard_failures
from rpg_megatron.rollout.sampler_client import SOCKET, RolloutBatch, SamplerClient
from rpg_megatron.system.collectives import any_rank, barrier, broadcast_object
from rpg_megatron.system.events import EVENTS
from rpg_megatron.system.timeline import TIMELINE, Timeline
from rpg_megatron.training.batch import Batch
from rpg_megatron.training.batch_scatter import open_source
from rpg_megatron.training.best_checkpoints import BestCheckpoints
from rpg_megatron.training.checkpoint_saver import Saver
from rpg_megatron.training.checkpoint_schedule import CheckpointSchedule
from rpg_megatron.training.efficiency import Efficiency
from rpg_megatron.training.metrics import open_metrics
from rpg_megatron.training.mismatch import KNOWN_SIZES, check_known_adapters, check_mismatch
from rpg_megatron.training.preemption import Stopped, StopRequest
from rpg_megatron.training.profiling import Profiler
from rpg_megatron.training.reporter import Reporter
from rpg_megatron.training.rollout_saver import RolloutSaver, keeps_routes
from rpg_megatron.training.step_warnings import StepWarnings
from rpg_megatron.training.summary import add_accuracy, write_summary
from rpg_megatron.training.trainer import TooManySkippedUpdates, Trainer
from rpg_megatron.training.weight_sync import open_weight_sync

_ENGINES_END_SECONDS = 60.0
"""Time limit for colocated engines to free their memory when a run is stopped, in seconds."""


class RankRun:
    """Trainer, weight sync, checkpoints and metrics of one rank.

    A method whose docstring says "may stop" raises Stopped, on every rank, after a stop signal.
    """

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        work: Path,
        bridge: Path,
        token: str,
        mesh: Mesh,
        device: torch.device,
        checkpoint: Path | None = None,
    ):
        """checkpoint: folder of a complete checkpoint to resume from."""
        self.settings, self.steps, self.mesh, self._device = settings, settings.training.steps, mesh, device
        self._run_dir, self._checkpoint = run_dir, checkpoint
        self._version = 0
        self._engines_up = settings.engine.colocated  # colocated engines started before the ranks
        self._times: dict[str, float] = defaultdict(float)
        self.summary: dict[str, Any] = {}
        self._rollouts = RolloutSaver(run_dir, mesh)
        self._started = time.monotonic()
        self._stop = StopRequest()
        self.events = Reporter(work / EVENTS, mesh.rank)
        self._warnings = StepWarnings(settings, self.events.warn)
        self._current = 0  # current step, for the timeline
        self._timeline = Timeline(run_dir / TIMELINE if mesh.rank == 0 else None, self.events.warn_unwritten)
        self._timeline.write({"start": round(time.time(), 3)})
        self._profiler = Profiler(settings.profile, run_dir, mesh.rank, device)
        self.trainer = Trainer(settings, mesh, device)
        self.policy = self.trainer.policy
        self._efficiency = Efficiency(settings, self.trainer.shape, device)
        self._best = BestCheckpoints(settings, run_dir)
        self._schedule, self._step_seconds = CheckpointSchedule(settings.checkpoint, self.steps), 0.0
        self._saver = Saver(run_dir, self.policy, self.trainer.anchor, settings.checkpoint, self._prune)
        sampler: SamplerClient | None = None
        if mesh.rank == 0:
            done = read_state(checkpoint)["step"] if checkpoint else None
            self._metrics = open_metrics(settings, run_dir, done, self.events.warn)
            sampler = SamplerClient(
                work / SOCKET, token, timeout=settings.engine.start_timeout, while_waiting=self._stop.check
            )
        self._source = open_source(sampler, token, mesh, self._stop)
        self.weight_sync = open_weight_sync(settings, bridge, self.trainer, sampler, self._stop)
        if settings.engine.colocated and checkpoint is None:  # else a checkpoint is loaded first
            self.policy.offloader.offload()
        # Contents of a checkpoint saved now: the last step whose updates are done, its row of metrics if not
        # yet written, and the sampler's state after it.
        self._step, self._saved_step, self._save_problem = 0, 0, ""
        self.row: dict[str, Any] | None = {}
        self._sampler_state: dict[str, Any] = {}

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the duration of a block to ``time/<phase>`` of the step, in seconds. Not collective."""
        start = time.monotonic()
        try:
            with self._profiler.phase(phase), self._timeline.phase(phase, self._current):
                yield
        finally:
            self._times[f"time/{phase}"] += time.monotonic() - start

    def profile(self, step: int) -> AbstractContextManager[None]:
        """Start a step; profile the block if ``profile.steps`` includes it. Not collective."""
        self._current = step
        return self._profiler.step(step, self.events.warn)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Load the checkpoint, if there is one; returns the number of completed steps."""
        if self._checkpoint is None:
            return 0
        self.events.phase("checkpoint")
        # With --from, it is in the folder of a run that others may have made.
        in_run_dir = self._checkpoint.resolve().is_relative_to(self._run_dir.resolve())
        state = self.trainer.load(self._checkpoint, trusted=in_run_dir)
        self._step, self.row = state["step"], state.get("row")
        self._saved_step = self._current = self._step
        self._sampler_state, self.summary = state["sampler"], state["summary"]
        self._started -= state["seconds"]
        self.weight_sync.restore(self._sampler_state)
        return self._step

    @property
    def has_unlogged_row(self) -> bool:
        """Whether the last step's row of metrics is still to be written; the same on all ranks."""
        return self.row is not None

    def save(self, step: int) -> None:
        """Start a checkpoint if one is due after this step; it is written while training continues."""
        due = self._schedule.due_by_step(step)
        if not due:
            best = self.settings.checkpoint.keep_best is not None and self.evaluation_due(step)
            due = broadcast_object(
                self._schedule.due_by_time(self._step_seconds) or (best and self._best.includes(step)), bool
            )
        if due:
            self._save()

    def save_before_exit(self) -> None:
        """After Stopped: write a checkpoint of the last step whose updates are done, unless there is one.

        Raises UserError if it cannot be written.
        """
        self.finish_saving()
        if self._saved_step != self._step:
            self.policy.offloader.reload(patience=_ENGINES_END_SECONDS)
            self._save()
            self.finish_saving()
        if self._saved_step != self._step:
            raise UserError(
                f"stopped, but step {self._step} could not be saved (see the warning above); rerun the same "
                "command to resume from the newest checkpoint"
            )

    def finish_saving(self) -> None:
        """Wait until all leaders have written their rollouts and the current save has ended."""
        self._finish_rollouts()
        self._saver.wait()
        self._report_saves()

    def finish_own_saving(self, timeout: float) -> None:
        """Like ``finish_saving`` for what this rank writes, before it ends with an error. Not collective."""
        if failure := self._rollouts.finish_own():
            self.events.warn_unwritten(failure)
        self._saver.wait(timeout)
        self._report_saves()
        if self.mesh.rank == 0:
            self._metrics.close_trackers()

    def _save(self) -> None:
        def run_state() -> dict[str, Any]:  # called on rank 0 only
            return {
                "skipped_updates": self.trainer.skipped_updates,
                "sampler": self._sampler_state,
                "metrics_bytes": self._metrics.sync_to_disk(),
                "row": None if self.row is None else self.row | self._times,
                "summary": self.summary,
                "seconds": time.monotonic() - self._started,
            }

        self._schedule.saved()
        self._finish_rollouts()
        self.events.phase("checkpoint")
        with self.time("checkpoint"), self.weight_sync.state_on_gpu(self.policy.offloader):
            self._saver.start(self._step, run_state)

    def _prune(self) -> None:
        """Remove old checkpoints and rollouts; called on the saving thread of rank 0. Raises OSError."""
        self._best.prune()
        prune_rollouts(self._run_dir, self.settings.rollouts, max(list_steps(self._run_dir), default=0))

    def _report_saves(self) -> dict[str, float]:
        """Metrics of the saves that ended since the last call; warns of those that failed. Not collective."""
        results = self._saver.pop_results()
        for result in results:
            if result.problem:
                self._save_problem = result.problem
                self.events.warn(result.warning)
            else:
                self._saved_step = result.step
        row = {"checkpoint/failed": float(sum(bool(result.problem) for result in results))}
        complete = [result for result in results if not result.problem]
        return row | ({"checkpoint/seconds": complete[-1].seconds} if complete else {})

    # -- a step ----------------------------------------------------------------------------------------------

    def check_adapters(self, version: int) -> None:
        """With ``lora``: compare engines and trainer on probes, with known adapters. May stop.

        The next sync replaces them. Larger ones are tried if the first cannot be told from rounding. Raises
        UserError as ``check_mismatch`` does.
        """
        adapters = self.policy.adapters
        if adapters is None or self.settings.guards.mismatch == "off":
            return
        message: str | None = None
        for size in KNOWN_SIZES:
            with adapters.probe(size):
                self.sync_engines(version, trial=True)
                probed = self.weight_sync.call_with_resync(lambda sampler: sampler.probe(version))
                with self._fetching():
                    probes = self.trainer.fetch_probes(probed.probes if probed else None, self._source)
                self.offload_engines()
                known = self.trainer.scorer.score_probes(probes)
            own = self.trainer.scorer.score_probes(probes)
            engines = self.settings.engine.replicas
            message = check_known_adapters(probes.mine, known, own, version, engines)
            if message is None:
                return
        self._report_mismatch(message or "", {"step": version + 1})

    def sync_engines(self, version: int, *, trial: bool = False) -> None:
        """Publish the weights as ``version``; every engine loads and verifies them. May stop.

        trial: no rollouts are sampled with them.
        """
        self.weight_sync.check_stop()
        self._version = version
        if self.settings.engine.colocated:
            with self.time("handover"):
                self.policy.offloader.offload()
        self.events.phase(
            "sync" if self._engines_up else "waiting for engines", 0, self.settings.engine.replicas
        )
        start = time.monotonic()
        self.policy.served.refresh()
        reports = self.weight_sync.sync(version, trial=trial)
        self._engines_up = True
        if self.row is not None:
            self.row |= {
                "sync/seconds": time.monotonic() - start,
                "sync/bytes": float(sum(sum(r.bytes_per_worker) for r in reports)),
                "sync/version": float(version),
            }

    def collect(self, step: int) -> Batch:
        """Sample and grade the step's responses; each rank gets its part of the batch. May stop."""
        rollouts = self.weight_sync.call_with_resync(lambda sampler: sampler.rollout(step, self._version))
        if rollouts and self.settings.sft is None:
            self.events.write_or_warn(lambda: self._rollouts.prepare(step))
        return self.fetch(rollouts)

    def fetch(self, rollouts: RolloutBatch | None) -> Batch:
        """This rank's part of what the sampler has. rollouts: on rank 0. May stop."""
        with self._fetching():
            batch = self.trainer.prepare_batch(rollouts.index if rollouts else None, self._source)
            if self.settings.rollout.probed:
                index = rollouts.probes if rollouts else None
                batch.probes = self.trainer.fetch_probes(index, self._source)
        if rollouts:
            batch.metrics, batch.sampler, batch.failures = rollouts.metrics, rollouts.state, rollouts.failures
        return batch

    @contextmanager
    def _fetching(self) -> Iterator[None]:
        """Within the block the leaders fetch. Raises Stopped if a stop signal explains an error."""
        try:
            yield
        except (RuntimeError, UserError, OSError):
            # All ranks raise if a leader cannot fetch: the sampler may have exited on the same stop signal.
            if any_rank(self._stop.explains_failure()):
                raise Stopped from None
            raise
        self.weight_sync.call_with_resync(lambda sampler: sampler.release())  # all leaders have fetched

    def offload_engines(self) -> None:
        """Put colocated engines to sleep and reload the optimizer state; no effect with separate GPUs.

        May stop while it waits. The next sync wakes the engines.
        """
        if self.settings.engine.colocated:
            with self.time("handover"):
                # Adapters alone are published again, so that the engines must keep the model's weights.
                self.weight_sync.sleep(2 if self.trainer.published.adapters is None else 1)
                self.policy.offloader.reload()

    def compute_log_probs(self, batch: Batch) -> None:
        """Set ``old`` and ``anchor`` of this rank's trajectories."""
        self.events.phase("logprobs")
        self.trainer.scorer.compute_log_probs(batch)

    def start_update(self, batch: Batch) -> None:
        """Compute the gradients of the first update, unless ``training.old`` is pass; no weight changes."""
        self.events.phase("update", 0, self.settings.training.minibatches * self.settings.training.ppo_epochs)
        self.trainer.start_update(batch)

    def save_rollouts(self, step: int, batch: Batch) -> None:
        """Start writing the step's rollouts, on each leader its own; metrics and checkpoint wait for them."""
        self._finish_rollouts()
        routes = keeps_routes(step, self.settings.rollout.journal_routes)
        self._rollouts.start(step, batch.mine, routes=routes)
        if self.mesh.rank == 0:
            self._metrics.add_responses(batch.mine)

    def _finish_rollouts(self) -> None:
        for failure in self._rollouts.finish():
            self.events.warn_unwritten(failure)

    def check_mismatch(self, batch: Batch) -> None:
        """Compare the engine's log-probs with the trainer's on tokens sampled with the current weights.

        Raises UserError if they differ too much and ``guards.mismatch`` is ``stop`` (on rank 0), or if there
        are no probes to compare.
        """
        row, message = check_mismatch(
            batch.mine if batch.compared is None else batch.compared,
            self._version,
            self.settings.guards,
            self.settings.precision.dtype,
            probes=None if batch.probes is None else batch.probes.mine,
            engines=self.settings.engine.replicas,
            excess=self.settings.rollout.log_prob_excess,
        )
        batch.metrics |= row
        self._warnings.check_probes(self._version + 1, batch.metrics)
        if message is not None:
            self._report_mismatch(message, {"step": self._version + 1, **batch.metrics})

    def _report_mismatch(self, message: str, row: dict[str, Any]) -> None:
        if self.settings.guards.mismatch != "stop":
            self.events.warn(message)
            return
        self._stop_run(message, row)

    def check_rewards(self, step: int, batch: Batch) -> None:
        """Warn if the reward failed on responses of the step, or if they teach nothing.

        Raises UserError (rank 0) if it failed on too many of them and ``guards.reward_failures`` is ``stop``.
        """
        self._guard_rewards([batch.failures], f"step {step}", {"step": step, **batch.metrics})
        self._warnings.check_batch(step, batch.metrics)

    def _guard_rewards(self, counts: Sequence[FailureCount], when: str, row: dict[str, Any]) -> None:
        """counts: on rank 0. row: metrics to write if the run stops."""
        warnings, message = guard_failures(counts, self.settings.guards, when)
        for text in warnings:
            self.events.warn(text)
        if broadcast_object(message is not None, bool):
            self._stop_run(message or "", row)

    def _stop_run(self, message: str, row: dict[str, Any]) -> None:
        """On rank 0, write a row of metrics, for diagnosis, and raise UserError."""
        self._finish_rollouts()
        if self.mesh.rank == 0:
            self._metrics.write(row)
            raise UserError(message)

    def update(self, step: int, batch: Batch) -> None:
        """One optimizer update for each mini-batch, then a refresh of the anchor if due.

        May stop before the first update.
        """
        self.weight_sync.check_stop()
        self._stop.listen()  # before the first update there is nothing to save: a signal ends the process
        try:
            self.trainer.update(step, batch, lambda done, total: self.events.phase("update", done, total))
        except TooManySkippedUpdates:
            self._finish_rollouts()  # the message refers to them
            raise
        self._warnings.check_update(step, batch.metrics)
        self._step, self.row = step, dict(batch.metrics)
        if batch.index is not None:
            self.row |= self._efficiency.batch_metrics(batch.index, batch.shared)
        self._sampler_state = batch.sampler

    def evaluation_due(self, step: int) -> bool:
        """Whether to evaluate after this step. Not collective."""
        evaluation = self.settings.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step == self.steps)

    def evaluate(self, step: int) -> None:
        """Evaluate the weights that the engines serve on the held-out sets. May stop while it waits.

        Raises UserError as ``check_rewards`` does.
        """
        evaluation = self.settings.evaluation
        with self.time("evaluation"):
            evaluated = self.weight_sync.call_with_resync(lambda sampler: sampler.evaluate())
        if evaluated is not None and evaluation is not None and self.row is not None:
            file = self._run_dir / "evaluation" / f"step_{step:06d}.jsonl"
            self.events.write_or_warn(lambda: write_results(file, evaluated.results))
            row = score_sets(evaluated.results)
            add_accuracy(self.summary, evaluation, row)
            failed = {f"eval/{count.set}/failed_frac": count.share for count in evaluated.failures}
            self.row |= row | failed
        counts = evaluated.failures if evaluated is not None else []
        self._guard_rewards(counts, f"evaluation of step {step}", {"step": step, **(self.row or {})})

    def log_metrics(self, step: int) -> None:
        """Write the step's row of metrics and display it. May stop before that."""
        counts = self.weight_sync.call_with_resync(lambda sampler: sampler.counts())
        self._finish_rollouts()
        self._step_seconds = self._times.get("time/step", 0.0)
        row, self.row = (self.row or {}) | self._times | (counts or {}) | self._report_saves(), None
        self._times.clear()
        row |= self._efficiency.metrics(row)
        if self.mesh.rank:
            return
        if step:
            self.summary.setdefault("rates", []).append(row["throughput/tokens_per_second"])
        self._best.add({"step": step, **row})
        self._metrics.write({"step": step, **row})
        self.events.send({"kind": "step"})  # the launcher reads the row

    # -- the end ---------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write the Hugging Face checkpoints of the last and the best step, and the launcher's summary."""
        exported: Path | None = None
        if self.settings.export.enabled:
            self.events.phase("export")
            exported = self.trainer.export(self._run_dir, self.steps)
        self._saver.wait()
        barrier()  # do not report a save that failed because another rank died
        saves = self._report_saves()
        best = self._export_best()
        if self.mesh.rank:
            return
        if saves["checkpoint/failed"]:  # the last step's row has already been written
            self._metrics.write({"step": self.steps, **saves})
        if best is not None:
            self.summary["best"] = best
        if self.settings.checkpoint.every is not None and self._saved_step != self._step:
            self.summary["unsaved"] = self._save_problem
        seconds = time.monotonic() - self._started
        write_summary(self._run_dir, self.summary, self.steps, exported, seconds)

    def _export_best(self) -> dict[str, Any] | None:
        """Export the best checkpoint unless it is the last one; returns its entry in the summary."""
        keep_best = self.settings.checkpoint.keep_best
        if keep_best is None:
            return None
        best: dict[str, Any] | None = broadcast_object(self._best.summary(), dict[str, Any] | None)
        # Without a checkpoint of the last step, the weights in memory are its only copy.
        if best is None or self._saved_step != self._step:
            return best
        if self.settings.export.enabled and best["step"] != self.steps:
            with self.weight_sync.state_on_gpu(self.policy.offloader):
                best["export"] = str(self.trainer.export(self._run_dir, best["step"], saved=True))
        return best

    def write_checkpoint(self, out: Path) -> None:
        """Write the weights as a Hugging Face checkpoint, in the policy's dtype."""
        self.trainer.write_checkpoint(out)

    def close(self) -> None:
        """Finish saving, then free shared memory and close connections."""
        self.finish_saving()
        self.weight_sync.close()
        if self._source is not None:
            self._source.close()
        self._efficiency.close()
        if self.mesh.rank == 0:
            self._metrics.close()
        self.events.close()
