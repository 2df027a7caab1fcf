"""One rank's view of a run: its trainer, the line to the sampler (rank 0), and the steps the loop is made of.

Methods are collective unless they say otherwise: every rank calls them in the same order. Rank 0 talks to the
sampler and writes files; what the others need of it is handed to them here.
"""

from __future__ import annotations

import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rpg_megatron.bridge.publisher import open_publisher
from rpg_megatron.checkpoints.hf_export import export_hf
from rpg_megatron.checkpoints.run_folder import read_state
from rpg_megatron.config import Settings, UserError
from rpg_megatron.data.rollout_files import rollouts_file, write_rollouts
from rpg_megatron.evaluation.metrics import score_sets, write_results
from rpg_megatron.policy.device import peak_memory_bytes
from rpg_megatron.policy.model import Mesh
from rpg_megatron.rollout.sampler_client import EVENTS, SOCKET, SamplerClient
from rpg_megatron.system.dtypes import torch_dtype
from rpg_megatron.system.events import EventSender
from rpg_megatron.system.files import atomic_write_text
from rpg_megatron.training.checkpoint_saver import Saver
from rpg_megatron.training.metrics import MetricsWriter, compare_logprobs, guard_mismatch
from rpg_megatron.training.preemption import StopRequest
from rpg_megatron.training.profiling import Profiler
from rpg_megatron.training.trainer import Batch, Trainer
from rpg_megatron.training.weight_sync import Serving

_ENGINES_END_SECONDS = 60.0
"""How long engines may take to give their memory back, when a run is stopped."""


class RankRun:
    """Everything a rank holds between the loop's lines.

    Every method may raise Stopped where it says that the run can stop there: on all ranks alike.
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
        """checkpoint: folder of one that is whole, to go on from."""
        self.settings, self.steps, self.mesh, self._device = settings, settings.training.steps, mesh, device
        self._run_dir, self._checkpoint = run_dir, checkpoint
        self._version = 0
        self._times: dict[str, float] = defaultdict(float)
        self._summary: dict[str, Any] = {}
        self._started = time.monotonic()
        self._stop = StopRequest()
        self.events = EventSender(work / EVENTS)
        self._profiler = Profiler(settings.profile, run_dir, mesh.rank, device)
        self._trainer = Trainer(settings, mesh, device)
        self.policy = self._trainer.policy
        self._placement = mesh.placement(settings.model.vocab_multiple)
        publisher = open_publisher(
            settings.bridge,
            bridge,
            self._placement,
            self.policy.served.tensors,
            self._trainer.layout,
            torch_dtype(settings.precision.dtype),
            adopt=not settings.optimizer.distributed,  # the distributed one keeps views of the parameters
            colocated=settings.engine.colocated,
        )
        self._saver = Saver(run_dir, self.policy, self._trainer.anchor, settings.checkpoint)
        sampler: SamplerClient | None = None
        if mesh.rank == 0:
            self._metrics = MetricsWriter(run_dir, read_state(checkpoint)["step"] if checkpoint else None)
            sampler = SamplerClient(
                work / SOCKET, token, timeout=settings.engine.start_timeout, while_waiting=self._stop.check
            )
        self._serving = Serving(publisher, sampler, self._stop)
        if settings.engine.colocated and checkpoint is None:  # else it is read into the state first
            self.policy.offloader.offload()
        # What a checkpoint would hold now: the last step whose updates are done, its row of metrics while
        # that is not written, and the sampler's state after it.
        self._reached = 0
        self._row: dict[str, Any] | None = {}
        self._sampler_state: dict[str, Any] = {}
        self._saved = 0

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to ``time/<phase>`` of the step. Not collective."""
        start = time.monotonic()
        try:
            with self._profiler.phase(phase):
                yield
        finally:
            self._times[f"time/{phase}"] += time.monotonic() - start

    def profile(self, step: int) -> AbstractContextManager[None]:
        """Record a block if ``profile.steps`` names the step. Not collective."""
        return self._profiler.step(step, self.warn)

    # -- checkpoints -----------------------------------------------------------------------------------------

    def resume(self) -> int:
        """Take up the checkpoint, if there is one to go on from; says how many steps it has behind it."""
        if self._checkpoint is None:
            return 0
        self._phase("checkpoint")
        state = self._trainer.load(self._checkpoint)
        self._reached, self._row = state["step"], state.get("row")
        self._saved = self._reached
        self._sampler_state, self._summary = state["sampler"], state["summary"]
        self._started -= state["seconds"]
        self._serving.restore(self._sampler_state)
        return self._reached

    @property
    def unrecorded(self) -> bool:
        """Whether the row of the last step is not written: in a new run that of step 0, in a continued one
        that of a step which a stop cut short. The same on all ranks; not collective.
        """
        return self._row is not None

    def save(self, step: int) -> None:
        """Begin a checkpoint if one is due after this step; it is written while training goes on."""
        every = self.settings.checkpoint.every
        if every is not None and (step % every == 0 or step == self.steps):
            self._save()

    def save_at_once(self) -> None:
        """After Stopped: write a checkpoint of the last step whose updates are done, unless there is one.

        Raises UserError if it cannot be written.
        """
        self.finish_saving()
        if self._saved != self._reached:
            self._reload_state()
            self._save()
            self.finish_saving()
        if self._saved != self._reached:
            raise UserError(
                f"stopped, but step {self._reached} could not be saved; the warning above says why. The same "
                "command goes on from the newest checkpoint"
            )

    def _reload_state(self) -> None:
        """After Stopped, when no engine is spoken to any more: the launcher ends those on our GPUs."""
        end = time.monotonic() + _ENGINES_END_SECONDS
        while True:
            try:
                return self.policy.offloader.reload()
            except torch.OutOfMemoryError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    def finish_saving(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint under way is whole, or for so many seconds. Not collective."""
        self._saver.wait(timeout)
        self._tell_of_saves()

    def _save(self) -> None:
        def rest() -> dict[str, Any]:  # this is rank 0's part
            return {
                "skipped_updates": self._trainer.skipped_updates,
                "sampler": self._sampler_state,
                "metrics_bytes": self._metrics.position,
                "row": None if self._row is None else self._row | self._times,
                "summary": self._summary,
                "seconds": time.monotonic() - self._started,
            }

        self._phase("checkpoint")
        with self.time("checkpoint"), self._state_at_hand():
            self._saver.start(self._reached, rest)

    @contextmanager
    def _state_at_hand(self) -> Iterator[None]:
        """What is to be saved is on the GPU, and if that is shared, engines that serve sleep meanwhile."""
        away = self.policy.offloader.is_offloaded
        if away:
            self._serving.sleep(1)
            self.policy.offloader.reload()
        yield
        if away:
            self.policy.offloader.offload()
            self._serving.wake()

    def _tell_of_saves(self) -> dict[str, float]:
        """Metrics of the saves that have ended since; those that failed are warned of. Not collective."""
        outcomes = self._saver.outcomes()
        for saved in outcomes:
            if saved.problem:
                self.warn(
                    f"step {saved.step}: no checkpoint, {saved.folder} cannot be written ({saved.problem}); "
                    f"{_free(self._run_dir)}training goes on"
                )
            else:
                self._saved = saved.step
        row = {"checkpoint/failed": float(sum(bool(saved.problem) for saved in outcomes))}
        whole = [saved for saved in outcomes if not saved.problem]
        return row | ({"checkpoint/seconds": whole[-1].seconds} if whole else {})

    # -- a step ----------------------------------------------------------------------------------------------

    def sync_engines(self, version: int) -> None:
        """Publish the weights as ``version`` and bring them into every engine, proved by checksums. The run
        can stop before it and in it.
        """
        self._serving.check_stop()
        self._version = version
        if self.settings.engine.colocated:
            with self.time("handover"):
                self.policy.offloader.offload()
        if self.mesh.rank == 0:
            self.events.phase("sync", 0, self.settings.engine.replicas)
        start = time.monotonic()
        self.policy.served.refresh()
        reports = self._serving.sync(version)
        if self._row is not None:
            self._row |= {
                "sync/seconds": time.monotonic() - start,
                "sync/bytes": float(sum(sum(r.bytes_per_worker) for r in reports)),
                "sync/version": float(version),
            }

    def collect(self, step: int) -> Batch:
        """Sample and score the step's prompts, make advantages, and give each rank its share. The run can
        stop while it waits.
        """
        rollouts = self._serving.call_with_resync(lambda sampler: sampler.rollout(step, self._version))
        state = self._serving.call_with_resync(lambda sampler: sampler.state())
        batch = self._trainer.share_out(rollouts.trajectories if rollouts else [])
        if rollouts and state:
            batch.metrics, batch.sampler = rollouts.metrics, state
        return batch

    def offload_engines(self) -> None:
        """Engines and trainer share GPUs: have the engines leave them, and take the optimizer's state back.

        The run can stop while it waits; it is the next sync that wakes the engines.
        """
        if self.settings.engine.colocated:
            with self.time("handover"):
                self._serving.sleep(2)
                self.policy.offloader.reload()

    def compute_log_probs(self, batch: Batch) -> None:
        """Fill in ``old`` and ``anchor`` of every trajectory, on its ranks and on rank 0."""
        self._phase("logprobs")
        self._trainer.compute_log_probs(batch)

    def save_rollouts(self, step: int, batch: Batch) -> None:
        """Keep the step's rollouts. Rank 0's work."""
        if self.mesh.rank == 0:
            self._keep(lambda: write_rollouts(rollouts_file(self._run_dir, step), batch.all))

    def check_mismatch(self, batch: Batch) -> None:
        """Engine against trainer on tokens of the present weights; the guard may stop the run (rank 0)."""
        if self.mesh.rank:
            return
        row, step = compare_logprobs(batch.all, self._version), self._version + 1
        batch.metrics |= row
        settings = self.settings
        try:
            warning = guard_mismatch(
                row, batch.all, settings.guards, settings.precision.dtype, version=self._version, step=step
            )
        except UserError:
            self._metrics.write({"step": step, **batch.metrics})  # what the message speaks of
            raise
        if warning:
            self.warn(warning)

    def update(self, step: int, batch: Batch) -> None:
        """One optimizer update for each mini-batch; then the anchor is moved if it is due. The run can stop
        before them.
        """
        self._serving.check_stop()
        self._stop.listen()  # what there was before is on disk already

        def tell(done: int, total: int) -> None:
            if self.mesh.rank == 0:
                self.events.phase("update", done, total)

        self._trainer.update(step, batch, tell)
        tokens = float(sum(t.length for t in batch.all))
        self._reached, self._row = step, batch.metrics | {"step/tokens": tokens}
        self._sampler_state = batch.sampler

    def evaluates(self, step: int) -> bool:
        """Whether the held-out sets are due after this step. Not collective."""
        evaluation = self.settings.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step == self.steps)

    def evaluate(self, step: int) -> None:
        """Score the held-out sets with the weights the engines serve. The run can stop while it waits."""
        evaluation = self.settings.evaluation
        results = self._serving.call_with_resync(lambda sampler: sampler.evaluate())
        if evaluation is None or results is None or self._row is None:
            return
        self._keep(lambda: write_results(self._run_dir / "evaluation" / f"step_{step:06d}.jsonl", results))
        row = score_sets(results)
        accuracy = {
            part.name: row[f"eval/{part.name}/avg@{evaluation.samples}"] for part in evaluation.heldout
        }
        self._summary.setdefault("accuracy_before", accuracy)
        self._summary["accuracy_after"] = accuracy
        self._row |= row

    def log_metrics(self, step: int) -> None:
        """Write the step's row of metrics and show it. The run can stop before that."""
        counts = self._serving.call_with_resync(lambda sampler: sampler.counts())
        peak = torch.tensor([peak_memory_bytes(self._device)], dtype=torch.float64, device=self._device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        row, self._row = (self._row or {}) | self._times | (counts or {}) | self._tell_of_saves(), None
        self._times.clear()
        if self.mesh.rank:
            return
        if step:
            rate = row["step/tokens"] / max(row["time/step"], 1e-9)
            row |= {"throughput/tokens_per_second": rate, "memory/peak_bytes": peak.item()}
            self._summary.setdefault("rates", []).append(rate)
        self._metrics.write({"step": step, **row})
        self.events.send({"kind": "step", "row": {"step": step, **row}, "steps": self.steps})

    # -- the end ---------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Write the final Hugging Face checkpoint and the summary that the launcher prints."""
        settings = self.settings.export
        out = self._run_dir / "hf" / f"step_{self.steps:06d}"
        if settings.enabled:
            self._phase("export")
            out.parent.mkdir(exist_ok=True)
            self.write_checkpoint(
                out, dtype=settings.dtype, max_shard_bytes=int(settings.max_shard_gib * 1024**3)
            )
        self.finish_saving()
        if self.mesh.rank == 0:
            rates = self._summary.pop("rates")
            self._summary |= {
                "steps": self.steps,
                "tokens_per_second": sum(rates) / len(rates),
                "export": str(out) if settings.enabled else None,
                "metrics": str(self._run_dir / "metrics.jsonl"),
                "seconds": time.monotonic() - self._started,
            }
            text = json.dumps(self._summary, indent=2) + "\n"
            atomic_write_text(self._run_dir / "summary.json", text)

    def write_checkpoint(
        self, out: Path, *, dtype: str | None = None, max_shard_bytes: int = 4 * 1024**3
    ) -> None:
        """Write the weights as a Hugging Face checkpoint; dtype: float32 or bfloat16, None: the policy's."""
        export_hf(
            out,
            self.settings.model.path,
            self.policy.served.tensors,
            self._trainer.layout,
            self._placement,
            dtype=torch_dtype(dtype or self.settings.precision.dtype),
            max_shard_bytes=max_shard_bytes,
            replace=True,  # a run that was killed right after its export goes on, and does it again
        )

    def close(self) -> None:
        """Let go of shared memory and connections, when all is saved."""
        self.finish_saving()
        self._serving.close()
        if self.mesh.rank == 0:
            self._metrics.close()
        self.events.close()

    def _keep(self, write: Callable[[], None]) -> None:
        """Write something that the run can do without."""
        try:
            write()
        except OSError as e:
            self.warn(f"not written: {e}; training goes on")

    def warn(self, text: str) -> None:
        """Tell the user; rank 0 speaks for all."""
        if self.mesh.rank == 0:
            self.events.send({"kind": "status", "text": f"warning: {text}"})
            with suppress(OSError):  # the log lies on the disk that may be full
                print(f"warning: {text}", flush=True)

    def _phase(self, name: str) -> None:
        if self.mesh.rank == 0:
            self.events.phase(name, 0, 1)


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free / 1024**3:.1f} GiB are free there; "
    except OSError:
        return ""
