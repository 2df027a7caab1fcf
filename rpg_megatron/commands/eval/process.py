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
from pathlib import Path
from typing import Any

from rpg_megatron.config import Settings, UserError, load_settings, read_model_shape
from rpg_megatron.config.cluster import TOKEN_VARIABLE
from rpg_megatron.config.evaluation import HeldOutSet
from rpg_megatron.config.files import atomic_write_text
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.data.prompts import (
    Prompt,
    codec_of,
    fit_prompts,
    load_tokenizer,
    save_chat_template,
    save_codec,
    without_torch,
)
from rpg_megatron.data.vocabulary import check_stops
from rpg_megatron.engine.client import EngineError
from rpg_megatron.engine.restarts import note_answer
from rpg_megatron.evaluation.metrics import describe_set, write_results
from rpg_megatron.evaluation.results import EvalResult
from rpg_megatron.evaluation.results_file import append_result, read_results, results_file
from rpg_megatron.launcher.run_dir import CONFIG, SUMMARY
from rpg_megatron.rewards.failures import guard_failures
from rpg_megatron.rollout.dispatcher import Dispatcher
from rpg_megatron.rollout.engine_pool import EnginePool
from rpg_megatron.rollout.gateway import CHAT
from rpg_megatron.rollout.heldout import HeldOut
from rpg_megatron.rollout.seeds import stop_tokens
from rpg_megatron.rollout.worker import CODEC, Worker, engine_clients
from rpg_megatron.system.events import EVENTS, EventSender
from rpg_megatron.system.tasks import run_all

PHASE = "evaluation"


def load_set(
    part: HeldOutSet, tokenizer: Any, vocab: int, *, rows: bool
) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of a set, and the number of rows dropped or cut, by reason.

    vocab: rows of the model's embedding. rows: whether to keep the rows, for ``Prompt.context``.
    Raises UserError as ``data.problems`` and ``data.prompts`` do.
    """
    problems, left_out = read_problems_with_counts(part.data, rows=rows)
    prompts, too_long = fit_prompts(problems, part.data, tokenizer, vocab=vocab, refused=left_out)
    counts = dict(left_out.counts)
    if too_long:
        counts["too long" if part.data.too_long == "drop" else "cut"] = too_long
    return prompts, counts


async def _evaluate(settings: Settings, checkpoint: Path, folder: Path, work: Path, token: str) -> None:
    evaluation = settings.evaluation
    assert evaluation is not None
    with without_torch():
        tokenizer = load_tokenizer(settings.model.path)
    vocab = read_model_shape(settings.model.path).vocab_size
    loaded = {
        part.name: load_set(part, tokenizer, vocab, rows=settings.needs_rows) for part in evaluation.heldout
    }
    prompts = {name: prompts_of_set for name, (prompts_of_set, _) in loaded.items()}
    done = {  # without those for which the reward failed: it may have been corrected
        part.name: [
            result
            for result in read_results(results_file(folder, part.name), prompts[part.name], part.samples)
            if not result.failed
        ]
        for part in evaluation.heldout
    }
    finished = {(name, result.prompt_id) for name, results in done.items() for result in results}
    total = sum(map(len, prompts.values()))
    events = EventSender(work / EVENTS)
    engines = engine_clients(settings, work, token)
    stops = stop_tokens(settings.model.path, tokenizer, settings.rollout.stop_token_ids, chats=settings.chats)
    check_stops(stops, vocab)
    save_codec(tokenizer, work / CODEC)
    if settings.data is not None:
        save_chat_template(tokenizer, settings.data, work / CHAT)
    worker = Worker(settings, codec_of(tokenizer), engines, work, stops)

    def keep(result: EvalResult) -> None:
        append_result(results_file(folder, result.set), result)
        done[result.set].append(result)
        finished.add((result.set, result.prompt_id))
        events.phase(PHASE, len(finished), total)

    try:
        # The launcher restarts no engine of an evaluation.
        pool = EnginePool(settings.engine.model_copy(update={"restarts": 0}), engines, work)
        dispatcher = Dispatcher(pool, [worker], settings.engine.max_sequences)
        heldout = HeldOut(settings, dispatcher, prompts)
        if len(finished) < total:
            await run_all([engine.wait_ready(settings.engine.start_timeout) for engine in engines])
            for engine in engines:
                note_answer(work, engine.index, incarnation=0)
            events.phase(PHASE, len(finished), total)
            pool.require_version(None)  # engines keep the weights they have loaded
            await heldout.evaluate(keep, skip=frozenset(finished))
            _guard_rewards(settings, heldout, done, events)
    finally:
        worker.close()
        for engine in engines:
            await engine.close()
        events.close()
    counts = {name: left_out for name, (_, left_out) in loaded.items()}
    _write_summary(folder, settings, checkpoint, prompts, done, counts)


def _guard_rewards(
    settings: Settings, heldout: HeldOut, done: dict[str, list[EvalResult]], events: EventSender
) -> None:
    """Warn of failures of the reward. Raises UserError if there are too many in a set."""
    samples = {name: sum(len(r.correct) for r in results) for name, results in done.items()}
    counts = [count._replace(graded=samples[name]) for name, count in heldout.failures.items()]
    warnings, message = guard_failures(counts, settings.guards, "evaluation")
    for text in warnings:
        events.send({"kind": "status", "text": f"warning: {text}"})
    if message is not None:
        raise UserError(message)


def _write_summary(
    folder: Path,
    settings: Settings,
    checkpoint: Path,
    prompts: dict[str, list[Prompt]],
    done: dict[str, list[EvalResult]],
    left_out: dict[str, dict[str, int]],
) -> None:
    """Sort the results into the order of the data, and write the summary."""
    evaluation = settings.evaluation
    assert evaluation is not None
    sets = {}
    for part in evaluation.heldout:
        name = part.name
        by_id = {result.prompt_id: result for result in done[name]}
        results = [by_id[prompt.id] for prompt in prompts[name]]
        write_results(results_file(folder, name), results)
        sets[name] = {
            **describe_set(results, settings.seed),
            "left_out": left_out[name],
            "temperature": part.temperature,
            "top_p": part.top_p,
            "max_response_tokens": part.response_tokens(settings.rollout.max_response_tokens),
        }
    summary = {
        "model": str(checkpoint),
        "top_k": evaluation.top_k,
        "seed": settings.seed,
        "sets": sets,
    }
    atomic_write_text(folder / SUMMARY, json.dumps(summary, indent=2) + "\n")


def main() -> int:
    """Run the process; returns its exit code: 2 after a UserError, whose message is the log's last line."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    folder, work, model = map(Path, sys.argv[1:])
    try:
        settings = load_settings(folder / CONFIG)
        checkpoint = settings.model.path
        settings = settings.model_copy(update={"model": settings.model.model_copy(update={"path": model})})
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
