"""The training loop: RPG-REINFORCE (arXiv 2505.17508, algorithm 2) over Megatron ranks and vLLM engines.

Every rank runs this same code. What a line does on which rank is the business of ``run.py``.
"""

from __future__ import annotations

from rpg_megatron.training.preemption import Stopped
from rpg_megatron.training.run import RankRun


def train(run: RankRun) -> bool:
    """Train for the configured steps, evaluate, export.

    Returns False if the run was stopped by a scheduler's warning: then it is saved, and can be continued.
    """
    try:
        train_to_the_end(run)
    except Stopped:
        run.save_at_once()
        return False
    return True


def train_to_the_end(run: RankRun) -> None:
    """The algorithm. Raises Stopped, on all ranks at the same place, where the run is asked to stop."""
    done = run.resume()  # steps that a checkpoint has behind it; 0 for a new run
    run.sync_engines(version=done)
    if run.unrecorded:
        evaluate_and_log(run, done)

    for step in range(done + 1, run.steps + 1):
        with run.profile(step), run.time("step"):
            with run.time("collect"):
                batch = run.collect(step)  # x ~ pi_old, rewards, advantages; each rank gets its share
            run.offload_engines()  # engines that share them go to sleep
            with run.time("logprobs"):
                run.compute_log_probs(batch)  # log pi_old and the anchor's, by the trainer itself
            run.save_rollouts(step, batch)
            run.check_mismatch(batch)  # engine against trainer, on the tokens of the present weights

            with run.time("update"):
                run.update(step, batch)  # one optimizer update a mini-batch
            with run.time("sync"):
                run.sync_engines(version=step)

        evaluate_and_log(run, step)
        run.save(step)

    run.export()


def evaluate_and_log(run: RankRun, step: int) -> None:
    """What belongs to a step and changes nothing: the evaluation, if it is due, and the row of metrics."""
    if run.evaluates(step):
        run.evaluate(step)
    run.log_metrics(step)
