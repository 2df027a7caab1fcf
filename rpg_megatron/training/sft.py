"""Supervised fine-tuning over Megatron-Core ranks: the loop of ``rpg-megatron sft``.

Each step is one update on recorded conversations: the loss is the mean of -log pi_theta over the trained
tokens of the step, of all ranks and micro-batches together. Engines get the weights only to be evaluated.
"""

from __future__ import annotations

from rpg_megatron.training.loop import until_stopped
from rpg_megatron.training.run import RankRun


class FineTuningRun(RankRun):
    """``RankRun`` with a held-out loss."""

    def held_out_due(self, step: int) -> bool:
        """Whether to measure the held-out loss after this step. Not collective."""
        sft = self.settings.sft
        return sft is not None and sft.heldout is not None and (step % sft.every == 0 or step == self.steps)

    def measure_held_out(self, step: int) -> None:
        """Compute the loss on the held-out conversations. May stop while it waits."""
        self.events.phase("held-out loss")
        with self.time("held_out"):
            batch = self._fetch(self._weight_sync.call_with_resync(lambda sampler: sampler.held_out()))
            loss, tokens = self._trainer.scorer.mean_loss(batch)
        if self._row is not None:
            self._row |= {"sft/heldout_loss": loss, "sft/heldout_tokens": float(tokens)}
            self._summary.setdefault("loss_before", loss)
            self._summary["loss_after"] = loss


def train(run: FineTuningRun) -> bool:
    """Train for the configured epochs, then export the weights; returns as ``loop.train`` does."""
    return until_stopped(run, run_steps)


def run_steps(run: FineTuningRun) -> None:
    """Run the remaining steps. Raises Stopped, on all ranks at the same call, after a stop signal."""
    done = run.resume()
    if run.has_unlogged_row:
        measure_and_log(run, done)
    for step in range(done + 1, run.steps + 1):
        with run.profile(step), run.time("step"):
            with run.time("collect"):
                batch = run.collect(step)
            with run.time("update"):
                run.update(step, batch)
        measure_and_log(run, step)
        run.save(step)
    run.export()


def measure_and_log(run: FineTuningRun, step: int) -> None:
    """Measure the held-out loss and evaluate, if due, then write the step's row of metrics."""
    if run.held_out_due(step):
        run.measure_held_out(step)
    if run.evaluation_due(step):
        with run.time("sync"):
            run.sync_engines(version=step)
        run.evaluate(step)
        run.offload_engines()  # colocated only
    run.log_metrics(step)
