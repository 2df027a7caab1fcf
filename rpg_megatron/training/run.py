"""One rank's view of a run: the policy, the line to the sampler (rank 0), and the steps the loop is made of.

Methods are collective unless they say otherwise: every rank calls them in the same order. Rank 0 talks to the
sampler and writes files; what the others need of it is handed to them here.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rpg_megatron.bridge.hf_export import export_hf
from rpg_megatron.bridge.hf_import import load_hf_weights
from rpg_megatron.bridge.layouts import layout_for
from rpg_megatron.bridge.plan import Placement
from rpg_megatron.bridge.publish import open_publisher
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.data.packing import plan_batches
from rpg_megatron.data.trajectory import Trajectory
from rpg_megatron.evaluation.score import score_results, write_results
from rpg_megatron.objectives import group_advantages
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.model import DTYPES, Mesh
from rpg_megatron.policy.optimizer import learning_rate
from rpg_megatron.policy.policy import Policy, Update
from rpg_megatron.policy.runtime import peak_memory_bytes
from rpg_megatron.rollout.channel import EVENTS, SOCKET, SamplerClient
from rpg_megatron.rollout.events import EventSender
from rpg_megatron.training.checkpoints import read_state
from rpg_megatron.training.journal import write_rollouts
from rpg_megatron.training.metrics import MetricsWriter, compare_logprobs, guard_mismatch
from rpg_megatron.training.objective import build_aggregator, build_loss
from rpg_megatron.training.serving import Serving
from rpg_megatron.training.state import Saver, load_run


@dataclass
class Batch:
    """A step's trajectories: this rank's share, cut up for the updates; on rank 0 all of them as well."""

    minibatches: list[list[list[Trajectory]]]
    """[mini-batch][micro-batch] -> trajectories; an empty micro-batch keeps the data ranks in step."""
    all: list[Trajectory]
    """Rank 0: every trajectory, in the order of the prompts. Elsewhere empty."""
    metrics: dict[str, float]
    """Rank 0: the sampler's metrics of the step."""


class Run:
    """Everything a rank holds between the loop's lines."""

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
        self._shape = read_model_shape(settings.model.path)
        self._layout = layout_for(self._shape)
        self._version = 0
        self._times: dict[str, float] = defaultdict(float)
        self._summary: dict[str, Any] = {}
        self._started = time.monotonic()
        self.events = EventSender(work / EVENTS)
        self.policy = Policy(settings, self._shape, mesh, device, self._load)
        self._placement = Placement(
            rank=mesh.rank,
            tensor=mesh.tensor,
            tensor_rank=mesh.tensor_rank,
            pipeline_rank=mesh.pipeline_rank,
            data_rank=mesh.data_rank,
            context_rank=mesh.context_rank,
            vocab_multiple=settings.model.vocab_multiple,
        )
        publisher = open_publisher(
            settings.bridge,
            bridge,
            self._placement,
            dict(self.policy.named_parameters()),
            self._layout,
            DTYPES[settings.precision.dtype],
            adopt=not settings.optimizer.distributed,  # the distributed one keeps views of the parameters
        )
        held = settings.anchor.type != "old"
        self._anchor = (
            HeldAnchor([p for _, p in self.policy.named_parameters()], settings.anchor) if held else None
        )
        self._saver = Saver(run_dir, self.policy, self._anchor, settings.checkpoint)
        self._loss, self._aggregator = build_loss(settings), build_aggregator(settings)
        self._sampler: SamplerClient | None = None
        if mesh.rank == 0:
            self._metrics = MetricsWriter(run_dir, read_state(checkpoint)["step"] if checkpoint else None)
            self._sampler = SamplerClient(work / SOCKET, token, timeout=settings.engine.start_timeout)
        self._serving = Serving(publisher, self._sampler)

    def _load(self, policy: Policy) -> None:
        load_hf_weights(
            self.settings.model.path,
            policy.named_parameters(),
            self._layout,
            tensor=self.mesh.tensor,
            tensor_rank=self.mesh.tensor_rank,
            vocab_multiple=self.settings.model.vocab_multiple,
        )

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Add the seconds of a block to ``time/<phase>`` of the step. Not collective."""
        start = time.monotonic()
        try:
            yield
        finally:
            self._times[f"time/{phase}"] += time.monotonic() - start

    def resume(self) -> int:
        """Take up the checkpoint, if there is one to go on from; says how many steps it has behind it."""
        if self._checkpoint is None:
            return 0
        self._phase("checkpoint")
        state = load_run(self._checkpoint, self.policy, self._anchor)
        if self._sampler:
            self._sampler.restore(state["sampler"])
            self._summary = state["summary"]
            self._started -= state["seconds"]
        return int(state["step"])

    def save(self, step: int) -> None:
        """Begin a checkpoint if one is due after this step; it is written while training goes on."""
        every = self.settings.checkpoint.every
        if every is None or (step % every and step != self.steps):
            return

        def rest() -> dict[str, Any]:
            assert self._sampler is not None  # this is rank 0's part
            return {
                "sampler": self._sampler.state(),
                "metrics_bytes": self._metrics.position,
                "summary": self._summary,
                "seconds": time.monotonic() - self._started,
            }

        self._phase("checkpoint")
        with self.time("checkpoint"):
            self._saver.start(step, rest)

    def finish_saving(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint under way is whole, or for so many seconds. Not collective."""
        self._saver.wait(timeout)
        self._tell_of_saves()

    def _tell_of_saves(self) -> dict[str, float]:
        """Metrics of the saves that have ended since; those that failed are warned of. Rank 0's work."""
        outcomes = self._saver.outcomes()
        for saved in outcomes:
            if saved.problem:
                self.warn(
                    f"step {saved.step}: no checkpoint, {saved.folder} cannot be written ({saved.problem}); "
                    f"{_free(self._run_dir)}training goes on"
                )
        row = {"checkpoint/failed": float(sum(bool(saved.problem) for saved in outcomes))}
        whole = [saved for saved in outcomes if not saved.problem]
        return row | ({"checkpoint/seconds": whole[-1].seconds} if whole else {})

    def sync_engines(self, version: int) -> dict[str, float]:
        """Publish the weights as ``version`` and bring them into every engine, proved by checksums."""
        self._version = version
        if self.mesh.rank == 0:
            self.events.phase("sync", 0, self.settings.engine.replicas)
        start = time.monotonic()
        reports = self._serving.sync(version)
        if self.mesh.rank:
            return {}
        return {
            "sync/seconds": time.monotonic() - start,
            "sync/bytes": float(sum(sum(r.bytes_per_worker) for r in reports)),
            "sync/version": float(version),
        }

    def collect(self, step: int) -> Batch:
        """Sample and score the step's prompts, make advantages, and give each rank its share."""
        shares: list[Any] = [None] * self.mesh.world
        everything: list[Trajectory] = []
        metrics: dict[str, float] = {}
        rollouts = self._serving.attend(lambda sampler: sampler.rollout(step, self._version))
        if rollouts is not None:  # rank 0
            everything, metrics = rollouts.trajectories, rollouts.metrics
            rewards = torch.tensor([t.reward for t in everything], dtype=torch.float64)
            groups = torch.tensor([t.group for t in everything])
            lengths = torch.tensor([len(t.response) for t in everything])
            advantages = group_advantages(rewards, groups, kind=self.settings.advantage.type, lengths=lengths)
            for t, a in zip(everything, advantages.tolist(), strict=True):
                t.advantage = a
            training = self.settings.training
            plan = plan_batches(
                [t.length for t in everything],
                minibatches=training.minibatches,
                data=self.mesh.data,
                budget=training.tokens_per_microbatch,
                context=self.mesh.context,
                attention_length=self._shape.attention_length,
            )
            shares = [
                [[[everything[i] for i in micro] for micro in mini] for mini in plan[data_rank]]
                for data_rank in _data_ranks(self.mesh)
            ]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, shares if self.mesh.rank == 0 else None, src=0)
        return Batch(minibatches=mine[0], all=everything, metrics=metrics)

    def score(self, batch: Batch) -> None:
        """Fill in ``old`` and ``anchor`` of every trajectory, on its ranks and on rank 0."""
        self._phase("logprobs")
        packs = [self.policy.pack(micro) for mini in batch.minibatches for micro in mini]
        old = self.policy.logprobs(packs)
        anchor = old
        if self._anchor:
            with self._anchor.swapped_in():
                anchor = self.policy.logprobs(packs)
        scored: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        entropy = torch.zeros(2, dtype=torch.float64, device=self._device)
        for pack, values, other in zip(packs, old, anchor, strict=True):
            for (t, logp), (_, anchor_logp) in zip(pack.split(values[0]), pack.split(other[0]), strict=True):
                t.old, t.anchor = logp.cpu().numpy().copy(), anchor_logp.cpu().numpy().copy()
                scored[t.group, t.sample] = t.old, t.anchor
            if self.mesh.reports:
                entropy += torch.stack([values[1][pack.mask].double().sum(), pack.mask.sum().double()])
        dist.all_reduce(entropy)
        batch.metrics["policy/entropy"] = (entropy[0] / entropy[1].clamp(min=1)).item()
        gathered: list[Any] = [None] * self.mesh.world
        dist.gather_object(
            scored if self.mesh.reports else {}, gathered if self.mesh.rank == 0 else None, dst=0
        )
        if self.mesh.rank == 0:
            found = {key: value for part in gathered for key, value in part.items()}
            for t in batch.all:
                t.old, t.anchor = found[t.group, t.sample]

    def compare(self, batch: Batch) -> dict[str, float]:
        """Engine against trainer on tokens of the present weights; the guard may stop the run (rank 0)."""
        if self.mesh.rank:
            return {}
        row, step = compare_logprobs(batch.all, self._version), self._version + 1
        settings = self.settings
        try:
            warning = guard_mismatch(
                row, batch.all, settings.guards, settings.precision.dtype, version=self._version, step=step
            )
        except UserError:
            self._metrics.write({"step": step, **batch.metrics, **row})  # what the message speaks of
            raise
        if warning:
            self.warn(warning)
        return row

    def update(self, step: int, batch: Batch) -> list[Update]:
        """One optimizer update for each mini-batch; then the anchor is moved if it is due."""
        lr = learning_rate(self.settings.optimizer, step)
        done: list[Update] = []
        with self.policy.updating():
            for i, minibatch in enumerate(batch.minibatches):
                if self.mesh.rank == 0:
                    self.events.phase("update", i, len(batch.minibatches))
                packs = [self.policy.pack(micro) for micro in minibatch]
                done.append(self.policy.update(packs, self._loss, self._aggregator, lr))
                if not math.isfinite(done[-1].grad_norm):
                    raise UserError(
                        f"step {step}: the gradient norm is {done[-1].grad_norm}; the weights are spoilt. "
                        "Lower optimizer.lr or objective.beta, or look at the step's rewards and log-probs"
                    )
        if self._anchor:
            tokens = sum(u.tokens for u in done)
            self._anchor.after_step(len(done), sum(u.means["kl"] * u.tokens for u in done) / max(tokens, 1))
        return done

    def summarise(self, step: int, batch: Batch, updates: Sequence[Update]) -> dict[str, float]:
        """The step's row of metrics, but for evaluation, mismatch and sync; complete on rank 0."""
        tokens = sum(u.tokens for u in updates)

        def mean(key: str) -> float:
            return sum(u.means[key] * u.tokens for u in updates) / max(tokens, 1)

        peak = torch.tensor([peak_memory_bytes(self._device)], dtype=torch.float64, device=self._device)
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        seconds = self._times["time/step"]
        row = batch.metrics | {
            "policy/loss": sum(u.loss for u in updates) / len(updates),
            "policy/loss_abs": mean("abs_loss"),
            "policy/grad_norm": sum(u.grad_norm for u in updates) / len(updates),
            "policy/grad_norm_first": updates[0].grad_norm,
            "policy/clip_frac_high": mean("clip_high"),
            "policy/clip_frac_low": mean("clip_low"),
            "policy/clip_frac_c": mean("clip_c"),
            "policy/log_ratio_clamped": mean("clamped"),
            "kl/anchor": mean("kl"),
            "kl/old": mean("kl_old"),
            **({} if self._anchor is None else {"kl/anchor_refreshes": float(self._anchor.refreshes)}),
            "ratio/mean": mean("ratio"),
            "ratio/max": max(u.ratio_max for u in updates),
            **(
                {}
                if self.settings.correction is None
                else {
                    "correction/ratio_mean": mean("correction_ratio"),
                    "correction/hit_frac": mean("correction_hit"),
                }
            ),
            "lr": learning_rate(self.settings.optimizer, step),
            "throughput/tokens_per_second": sum(t.length for t in batch.all) / max(seconds, 1e-9),
            "memory/peak_bytes": peak.item(),
            **self._times,
        }
        self._times.clear()
        return row

    def evaluates(self, step: int) -> bool:
        """Whether the held-out set is due after this step. Not collective."""
        evaluation = self.settings.evaluation
        return evaluation is not None and (step % evaluation.every == 0 or step == self.steps)

    def evaluate(self, step: int) -> dict[str, float]:
        """Score the held-out set with the weights the engines serve; the row is rank 0's."""
        evaluation = self.settings.evaluation
        if evaluation is None:
            return {}
        results = self._serving.attend(lambda sampler: sampler.evaluate())
        if results is None:
            return {}
        self._keep(lambda: write_results(self._run_dir / "evaluation" / f"step_{step:06d}.jsonl", results))
        row = score_results(evaluation.name, results)
        accuracy = row[f"eval/{evaluation.name}/avg@{evaluation.samples}"]
        self._summary.setdefault("accuracy_before", accuracy)
        self._summary["accuracy_after"] = accuracy
        return row

    def record(self, step: int, row: dict[str, float]) -> None:
        """Write the step's metrics and show them. Rank 0's work."""
        if self.mesh.rank:
            return
        full = {"step": step, **row, **self._serving.counts(), **self._tell_of_saves()}
        self._metrics.write(full)
        self.events.send({"kind": "step", "row": full, "steps": self.steps})
        if "throughput/tokens_per_second" in row:
            self._summary.setdefault("rates", []).append(row["throughput/tokens_per_second"])

    def journal(self, step: int, batch: Batch) -> None:
        """Keep the step's rollouts. Rank 0's work."""
        if self.mesh.rank == 0:
            file = self._run_dir / "rollouts" / f"step_{step:06d}.jsonl.zst"
            self._keep(lambda: write_rollouts(file, batch.all))

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
            (self._run_dir / "summary.json").write_text(
                json.dumps(self._summary, indent=2) + "\n", encoding="utf-8"
            )

    def write_checkpoint(
        self, out: Path, *, dtype: str | None = None, max_shard_bytes: int = 4 * 1024**3
    ) -> None:
        """Write the weights as a Hugging Face checkpoint; dtype: float32 or bfloat16, None: the policy's."""
        export_hf(
            out,
            self.settings.model.path,
            dict(self.policy.named_parameters()),
            self._layout,
            self._placement,
            dtype=DTYPES[dtype or self.settings.precision.dtype],
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


def _data_ranks(mesh: Mesh) -> list[int]:
    """Data-parallel rank of every rank. Megatron numbers them tensor, context, data, pipeline."""
    return [rank // (mesh.tensor * mesh.context) % mesh.data for rank in range(mesh.world)]
