"""RPG-REINFORCE training loop (arXiv 2505.17508, Algorithm 2) over Megatron-Core ranks and vLLM engines.

Notation: pi_theta is the trained policy, pi_old the policy that sampled the step's responses, A the advantage
of a response (by default its reward minus the mean of its group), beta the KL coefficient and C the KL
component of the configured divergence. For each response token, w = pi_theta / pi_old.

1. Sample a group of responses for each prompt with pi_old on the engines, grade them, compute A.
2. Compute log pi_old with the trainer, and the anchor's log-probs. The anchor is the reference model of the
   KL term: pi_old itself, unless ``anchor.type`` says otherwise. With one update a step, the forward pass of
   that update gives log pi_old (``training.old``); its gradients wait for the checks of the batch.
3. For each mini-batch: weight = w A + C (for URKL, C = -beta w log w), without gradient. The clip sets it to
   0 where it is positive and w >= 1 + high, or negative and w <= 1 - low or w >= c. The loss is the mean over
   response tokens of -weight * log pi_theta; one optimizer update.
4. Copy the new weights to the engines: pi_old <- pi_theta.

With ``rollout.ahead`` the engines continue sampling during 2 to 4, so the weights that sampled a token
(``Trajectory.versions``) may be up to that many updates older than those that compute log pi_old in 2. The
loss is still relative to pi_old; ``correction`` multiplies it by pi_old over the probability with which the
token was sampled, within bounds. At token level, this corrects each token given its prefix, but not the
distribution of prefixes; the bounds add a bias.

The loss of 3 is ``objectives/rpg.py``; ``loss.py`` selects it, or another objective, from the settings.
Every rank runs this file. ``run.py`` implements its calls and decides what each rank does in them.
"""

from __future__ import annotations

from collections.abc import Callable

from rpg_megatron.training.preemption import Stopped
from rpg_megatron.training.run import RankRun


def train(run: RankRun) -> bool:
    """Train for the configured steps, then export the weights.

    Returns False if a signal stopped the run: a checkpoint is saved, and the same command resumes it.
    """
    return until_stopped(run, run_steps)


def until_stopped(run: RankRun, steps: Callable[[RankRun], None]) -> bool:
    """Run the steps; returns as ``train`` does."""
    try:
        steps(run)
    except Stopped:
        run.save_before_exit()
        return False
    return True


def run_steps(run: RankRun) -> None:
    """Run the remaining steps. Raises Stopped, on all ranks at the same call, after a stop signal."""
    done = run.resume()  # steps completed by the checkpoint; 0 for a new run
    run.check_adapters(version=done)  # lora: engines must apply them, which B = 0 would not show
    run.sync_engines(version=done)  # weight version n: the weights after step n
    if run.has_unlogged_row:  # step 0 of a new run, or a step that a stop signal interrupted
        evaluate_and_log(run, done)

    for step in range(done + 1, run.steps + 1):
        with run.profile(step), run.time("step"):
            # 1. Responses from pi_old, rewards, advantages. Each rank gets its part of the batch.
            with run.time("collect"):
                batch = run.collect(step)

            # 2. log pi_old and the anchor's log-probs, both computed by the trainer.
            run.offload_engines()  # colocated only: free the GPUs for the trainer
            with run.time("logprobs"):
                run.compute_log_probs(batch)
            with run.time("update"):
                run.start_update(batch)  # training.old update: its forward pass gives log pi_old
            run.save_rollouts(step, batch)
            run.check_rewards(step, batch)  # a reward that fails on many responses trains nothing
            run.check_mismatch(batch)  # same weights, same tokens: engine and trainer must agree

            # 3. One optimizer update for each mini-batch. w is 1 in the first and changes with each update.
            with run.time("update"):
                run.update(step, batch)

            # 4. pi_old <- pi_theta.
            with run.time("sync"):
                run.sync_engines(version=step)  # calls WeightSync.sync in weight_sync.py

        evaluate_and_log(run, step)
        run.save(step)  # a checkpoint, if one is due

    run.export()


def evaluate_and_log(run: RankRun, step: int) -> None:
    """Evaluate on the held-out sets if due, then write the step's row of metrics."""
    if run.evaluation_due(step):
        run.evaluate(step)
    run.log_metrics(step)
