"""The evaluator process of ``rpg-megatron eval``: samples and grades, and saves each problem immediately.

``python -m rpg_megatron.commands.eval.process FOLDER WORK_DIR MODEL``: settings from FOLDER/config.yaml,
results to FOLDER, the engines' sockets in WORK_DIR, their token in the environment, MODEL in the format of
Hugging Face. It ignores signals, which the launcher handles. If it is killed, all graded problems are on
disk.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.config.evaluation import HeldOutSet
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompts import Prompt, codec_of, fit_prompts
from rpg_megatron.engine.client import EngineError
from rpg_megatron.engine.restarts import note_answer
from rpg_megatron.evaluation.metrics import describe_set, write_results
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.evaluation.results_file import append_result, read_results, results_file
from rpg_megatron.launcher.run_dir import CONFIG, SUMMARY
from rpg_megatron.rewards.failures import guard_failures
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.heldout import HeldOut
from rpg_megatron.rollout.worker import Worker, engine_clients
from rpg_megatron.rollout.worker_files import prepare_workers
from rpg_megatron.system.events import EVENTS, EventSender
from rpg_megatron.system.tasks import run_all


@dataclass
class _HeldOut:
    """A set while it is evaluated."""

    part: HeldOutSet
    prompts: list[Prompt]
    left_out: dict[str, int]
    """Number of rows dropped or cut, by reason."""
    done: list[EvalResult]
    """Without those for which the reward failed: it may have been corrected."""


def _open_set(part: HeldOutSet, settings: Settings, folder: Path, tokenizer: Any, vocab: int) -> _HeldOut:
    """The prompts of a set, and its results so far. vocab: rows of the model's embedding.

    Raises UserError as ``data.problems`` and ``data.prompts`` do.
    """
    problems, left_out = read_problems_with_counts(part.data, rows=settings.needs_rows)
    prompts, too_long = fit_prompts(problems, part.data, tokenizer, vocab=vocab, refused=left_out)
    counts = dict(left_out.counts)
    if too_long:
        counts["too long" if part.data.too_long == "drop" else "cut"] = too_long
    results = read_results(results_file(folder, part.name), prompts, part.samples)
    return _HeldOut(part, prompts, counts, [result for result in results if not result.failed])


async def _evaluate(settings: Settings, checkpoint: Path, folder: Path, work: Path, token: str) -> None:
    evaluation = settings.evaluation
    assert evaluation is not None
    tokenizer, stops = prepare_workers(settings, work)
    vocab = read_model_shape(settings.model.path).vocab_size
    sets = {p.name: _open_set(p, settings, folder, tokenizer, vocab) for p in evaluation.heldout}
    prompts = {name: each.prompts for name, each in sets.items()}
    finished = {(name, result.prompt_id) for name, each in sets.items() for result in each.done}
    total = sum(map(len, prompts.values()))
    events = EventSender(work / EVENTS)
    engines = engine_clients(settings, work, token)
    worker = Worker(settings, codec_of(tokenizer), engines, work, stops)

    def keep(result: EvalResult) -> None:
        append_result(results_file(folder, result.set), result)
        sets[result.set].done.append(result)
        finished.add((result.set, result.prompt_id))
        events.phase("evaluation", len(finished), total)

    try:
        # The launcher restarts no engine of an evaluation.
        pool = EnginePool(settings.engine.model_copy(update={"restarts": 0}), engines, work)
        heldout = HeldOut(settings, Dispatcher(pool, [worker], settings.engine.most_sequences), prompts)
        if len(finished) < total:
            await run_all([engine.wait_ready(settings.engine.start_timeout) for engine in engines])
            for engine in engines:
                note_answer(work, engine.index, incarnation=0)
            events.phase("evaluation", len(finished), total)
            pool.require_version(None)  # engines keep the weights they have loaded
            await heldout.evaluate(keep, skip=frozenset(finished))
            samples = {name: sum(len(result.correct) for result in each.done) for name, each in sets.items()}
            counts = [count._replace(graded=samples[name]) for name, count in heldout.failures.items()]
            warnings, message = guard_failures(counts, settings.guards, "evaluation")
            for text in warnings:
                events.send({"kind": "status", "text": f"warning: {text}"})
            if message is not None:  # the reward failed too often
                raise UserError(message)
    finally:
        worker.close()
        for engine in engines:
            await engine.close()
        events.close()
    summary = {
        "model": str(checkpoint),
        "top_k": evaluation.top_k,
        "seed": settings.seed,
        "sets": {name: _finish_set(each, settings, folder) for name, each in sets.items()},
    }
    atomic_write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _finish_set(each: _HeldOut, settings: Settings, folder: Path) -> dict[str, Any]:
    """Sort the results of a set into the order of the data; returns its summary."""
    part, by_id = each.part, {result.prompt_id: result for result in each.done}
    results = [by_id[prompt.id] for prompt in each.prompts]
    write_results(results_file(folder, part.name), results)
    return {
        **describe_set(results, settings.seed),
        "left_out": each.left_out,
        "temperature": part.temperature,
        "top_p": part.top_p,
        "max_response_tokens": part.response_tokens(settings.rollout.max_response_tokens),
    }


def main() -> int:
    """Run the process; returns its exit code: 2 after a UserError, whose message is the log's last line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    folder, work, model = map(Path, sys.argv[1:])
    try:
        settings = load_settings(folder / CONFIG)
        checkpoint = settings.model.path
        settings = settings.changed(model={"path": model})
        asyncio.run(_evaluate(settings, checkpoint, folder, work, os.environ[TOKEN_VARIABLE]))
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        return 2
    except OSError as e:
        print(f"error: {e.filename or folder}: {e.strerror or e}; fix this and start again", file=sys.stderr)
        return 2
    except EngineError as e:
        print(e, file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
