"""Supervised fine-tuning over Megatron-Core ranks: the loop of ``rpg-megatron sft``.

Each step is one update on recorded conversations: the loss is the mean of -log pi_theta over the trained
tokens of the step, of all ranks and micro-batches together. Engines get the weights only to be evaluated.
"""

from __future__ import annotations

from rpg_megatron.training.loop import until_stopped
from rpg_megatron.training.run import RankRun


def train(run: RankRun) -> bool:
    """Train for the configured epochs, then export the weights; returns as ``loop.train`` does."""
    return until_stopped(run, run_steps)


def run_steps(run: RankRun) -> None:
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


def measure_and_log(run: RankRun, step: int) -> None:
    """Measure the held-out loss and evaluate, if due, then write the step's row of metrics."""
    sft = run.settings.sft
    if sft is not None and sft.heldout is not None and (step % sft.every == 0 or step == run.steps):
        measure_held_out(run)
    if run.evaluation_due(step):
        with run.time("sync"):
            run.sync_engines(version=step)
        run.evaluate(step)
        run.offload_engines()  # colocated only
    run.log_metrics(step)


def measure_held_out(run: RankRun) -> None:
    """Compute the loss on the held-out conversations, for the row of metrics. May stop while it waits."""
    run.events.phase("held-out loss")
    with run.time("held_out"):
        batch = run.fetch(run.weight_sync.call_with_resync(lambda sampler: sampler.held_out()))
        loss, tokens = run.trainer.scorer.mean_loss(batch)
    if run.row is not None:
        run.row |= {"sft/heldout_loss": loss, "sft/heldout_tokens": float(tokens)}
        run.summary.setdefault("loss_before", loss)
        run.summary["loss_after"] = loss
