"""The training loop: RPG-REINFORCE (arXiv 2505.17508, algorithm 2) over Megatron ranks and vLLM engines.

Every rank runs this same code. What a line does on which rank is the business of ``run.py``.
"""

from __future__ import annotations

from rpg_megatron.training.run import Run


def train(run: Run) -> None:
    """Train for the configured steps, evaluate, export."""
    done = run.resume()  # steps that a checkpoint has behind it; 0 for a new run
    run.sync_engines(version=done)
    if not done:
        run.record(0, run.evaluate(step=0))

    for step in range(done + 1, run.steps + 1):
        with run.time("step"):
            with run.time("collect"):
                batch = run.collect(step)  # x ~ pi_old, rewards, advantages; each rank gets its share
            with run.time("logprobs"):
                run.score(batch)  # log pi_old and the anchor's, by the trainer itself
            run.journal(step, batch)
            mismatch = run.compare(batch)  # engine against trainer, on the tokens of the present weights

            with run.time("update"):
                updates = run.update(step, batch)  # one optimizer update a mini-batch
            with run.time("sync"):
                sync = run.sync_engines(version=step)

        row = run.summarise(step, batch, updates) | mismatch | sync
        if run.evaluates(step):
            row |= run.evaluate(step)
        run.record(step, row)
        run.save(step)

    run.export()
