"""``rpg-megatron sample --live``: new responses of a run's checkpoint, sampled by an engine and graded."""

from __future__ import annotations

import json
import tempfile
import textwrap
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.checkpoint_path import EXPORTS, kind_of
from rpg_megatron.checkpoints.run_folder import CHECKPOINTS
from rpg_megatron.commands.eval.command import run_evaluation
from rpg_megatron.commands.eval.settings import EvalRequest
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.files import atomic_write_text, read_text
from rpg_megatron.data.problems import read_problems
from rpg_megatron.evaluation.results_file import results_file
from rpg_megatron.launcher.run_dir import CONFIG, load_run_settings
from rpg_megatron.launcher.stopping import Interrupted, StopSignals
from rpg_megatron.system.terminal import one_line, printable

_NAME = "live"
_SEARCHED = 1000
"""Problems in which a prompt is looked for, of a source that is asked during the run."""


def print_live_samples(run: Path, step: int | None, prompt: str | None, count: int) -> None:
    """Sample ``count`` responses and print them with their verdicts; starts and ends an engine.

    step: of a checkpoint or an export; None: the newest. prompt: text of problems of the run's training set
    or, if none contains it, a problem of its own, whose responses are not graded. Raises UserError, RunFailed
    or Interrupted.
    """
    if kind_of(run, "RUN") != "run":
        raise UserError(f"RUN: {run} is not the folder of a run; choose its checkpoint with --step")
    trained = load_run_settings(run / CONFIG)
    rows = _choose_rows(trained, prompt, count)
    graded = rows is not None
    ungraded = [] if graded else ["guards.reward_failures=off"]
    rows = rows or [{"prompt": prompt, "answer": "-"}]
    with tempfile.TemporaryDirectory(prefix="rpg-sample-") as work, StopSignals() as signals:
        problems = Path(work) / f"{_NAME}.jsonl"
        atomic_write_text(problems, "".join(json.dumps(row) + "\n" for row in rows))
        request = EvalRequest(
            model=_checkpoint(run, step),
            files=(f"{_NAME}={problems}",),
            sampling={"samples": [str(count // len(rows))]},
            overrides=[f"engine.tensor={trained.engine.tensor}", *ungraded],
        )
        try:
            folder = run_evaluation(request, Path(work) / "out", signals)
        except Interrupted as e:
            e.note = ""  # nothing is kept
            raise
        for line in read_text(results_file(folder.path, _NAME)).splitlines():
            _print_problem(json.loads(line), graded)


def _choose_rows(settings: Settings, prompt: str | None, count: int) -> list[dict[str, Any]] | None:
    """The first problems whose text contains ``prompt``, at most ``count``; None if there are none."""
    rows: list[dict[str, Any]] = []
    first = count if prompt is None else _SEARCHED
    for problem in read_problems(settings.prompts("sample"), rows=True, first=first):
        if len(rows) == count:
            break
        if prompt is None or prompt in problem.text:
            text = problem.prompt
            chat = text if isinstance(text, str) else [message._asdict() for message in text]
            rows.append((problem.row or {}) | {"prompt": chat, "answer": problem.answer})
    return rows or None


def _checkpoint(run: Path, step: int | None) -> Path:
    if step is None:
        return run
    steps = {f.name: f for kind in (CHECKPOINTS, EXPORTS) for f in (run / kind).glob("step_*")}
    if (folder := steps.get(f"step_{step:06d}")) is None:
        there = ", ".join(sorted(steps)) or "none"
        raise UserError(f"{run}: has no checkpoint of step {step}; there are: {there}")
    return folder


def _print_problem(row: dict[str, Any], graded: bool) -> None:
    print(f"prompt {row['prompt_id']}, " + (f"answer {one_line(row['answer'])}" if graded else "no answer"))
    print(textwrap.indent(printable(row["prompt"].rstrip("\n")), "  "))
    columns = (row[key] for key in ("responses", "correct", "extracted", "lengths", "finishes"))
    for number, (text, correct, extracted, tokens, finish) in enumerate(zip(*columns, strict=True)):
        words = ["correct" if correct else "wrong"] if graded else []
        words += [f"{tokens} tokens" + (", truncated" if finish == "length" else "")]
        words += [f"extracted {one_line(extracted)}"] if extracted is not None else []
        print(f"-- response {number}: {', '.join(words)}")
        print(textwrap.indent(printable(text), "  "))
