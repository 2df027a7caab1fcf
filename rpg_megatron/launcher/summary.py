"""The summary that is printed at the end of a run."""

from __future__ import annotations

import os
import shlex
import sys
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.run_folder import list_steps
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.files import read_json
from rpg_megatron.data.problems import read_problems_with_counts
from rpg_megatron.launcher.progress import clock
from rpg_megatron.launcher.run_dir import CONFIG, LOGS, REPORT, SUMMARY
from rpg_megatron.system.metrics_file import METRICS


def summarise(run: Path) -> str:
    """The results of a finished run, from the trainer's ``summary.json``, and a next command to try."""
    facts: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        facts = read_json(run / SUMMARY)
    rows: list[tuple[str, str]] = []
    before, after = facts.get("accuracy_before") or {}, facts.get("accuracy_after") or {}
    for name in [name for name in before if name in after]:
        title = "held-out accuracy" if len(before) == 1 else f"accuracy, {name}"
        change = 100 * (after[name] - before[name])
        text = f"{before[name]:.1%} before, {after[name]:.1%} after ({change:+.1f} points)"
        rows.append((title, text))
    if (loss := facts.get("loss_after")) is not None:
        rows.append(("held-out loss", f"{facts['loss_before']:.4f} before, {loss:.4f} after"))
    if (steps := facts.get("steps")) is not None:
        seconds = facts.get("seconds")
        rows.append(("steps", f"{steps}" + (f" in {clock(seconds)}" if seconds is not None else "")))
    if (speed := facts.get("tokens_per_second")) is not None:
        rows.append(("tokens/s", f"{speed:,.0f}"))
    if best := facts.get("best"):
        rows.append(("best", f"step {best['step']}: {best['metric']} {best['value']:.4g}"))
    if facts.get("unsaved"):
        newest = next((display_path(folder) for folder in list_steps(run).values()), "the beginning")
        rows.append(("last checkpoint", f"NOT WRITTEN: {facts['unsaved']}"))
        rows.append(("", f"fix this and rerun the same command: it resumes from {newest}"))
    rows.append(("run", display_path(run)))
    rows.append(("metrics", display_path(Path(facts.get("metrics") or run / METRICS))))
    if (run / REPORT).exists():
        rows.append(("report", display_path(run / REPORT)))
    rows.append(("settings, logs", f"{display_path(run / CONFIG)}, {display_path(run / LOGS)}"))
    if export := facts.get("export"):
        rows.append(("checkpoint", display_path(Path(export))))
    if best and best.get("export"):
        rows.append(("best checkpoint", display_path(Path(best["export"]))))
    width = max(len(name) for name, _ in rows)
    lines = ["", *(f"{name:<{width}}  {value}" for name, value in rows)]
    return "\n".join(lines + _next_command(run, Path(export)) if export else lines)


def display_path(path: Path) -> str:
    """A path for messages: relative if it is below the working directory, else absolute."""
    path = Path(os.path.abspath(path))
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _next_command(run: Path, export: Path) -> list[str]:
    prompt = _literal("1 + 1 =")
    with suppress(UserError, OSError):
        settings = load_settings(run / CONFIG)
        if settings.rollout.episode is not None:
            command = f"  rpg-megatron sample {shlex.quote(display_path(run))}"
            return ["", "next: look at its conversations", command]
        prompt = _sample_prompt(settings) or prompt
    # Do not resolve sys.executable: in a virtual environment it is a link that must be kept.
    python, model = shlex.quote(display_path(Path(sys.executable))), _literal(display_path(export))
    generate = f"pipeline('text-generation', {model})({prompt})[0]['generated_text']"
    command = f'  {python} -c "from transformers import pipeline; print({generate})"'
    return ["", "next: it is a standard Hugging Face checkpoint; generate a sample", command]


def _literal(text: str) -> str:
    """A Python string literal that is safe between double quotes in a shell."""
    special = {code: f"\\x{code:02x}" for code in (*range(32), *map(ord, "\\'\"$`!"))} | {ord("\n"): "\\n"}
    return f"'{text.translate(special)}'"


def _sample_prompt(settings: Settings) -> str | None:
    """A problem of the held-out data, or else of the training data, in the prompt template, as Python source.

    Of a conversation, the messages before the assistant's first; None if there are none. Raises UserError.
    """
    sft = settings.sft.heldout or settings.sft.data if settings.sft is not None else None
    data = settings.evaluation.heldout[0].data if settings.evaluation else sft or settings.data
    if data is sft and sft is not None and sft.rollouts is not None:
        return None
    problems, *_ = read_problems_with_counts(data.model_copy(update={"limit": 1}), first=1)
    prompt = problems[0].prompt
    if isinstance(prompt, str):
        text = _literal(data.template.replace("{prompt}", prompt))
        return f"[{{'role': 'user', 'content': {text}}}]" if data.chat and data is not sft else text
    asked = takewhile(lambda message: message.role != "assistant", prompt)
    turns = [f"{{'role': {_literal(m.role)}, 'content': {_literal(m.text)}}}" for m in asked]
    return f"[{', '.join(turns)}]" if turns else None
