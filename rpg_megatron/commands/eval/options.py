"""The options of ``rpg-megatron eval``."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rpg_megatron.commands.exit_codes import exit_codes
from rpg_megatron.config.errors import UserError
from rpg_megatron.system.terminal import exit_on_interrupt

Suite = Annotated[
    list[str] | None,
    typer.Option("--suite", metavar="NAME[=FILE],...", help="Known benchmarks, such as aime24,aime25,amc23."),
]
Data = Annotated[
    list[str] | None,
    typer.Option("--data", metavar="[NAME=]FILE", help="Your own problem set; may be repeated."),
]


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint (Hugging Face, Megatron, of a run), hub id, or a run: its newest export.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings to override, in data, reward, guards, engine or precision, or rollout.episode.",
        ),
    ] = None,
    suite: Suite = None,
    data: Data = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with local copies of the suites, NAME.jsonl.")
    ] = None,
    samples: Annotated[
        list[str] | None,
        typer.Option(
            "-n",
            "--samples",
            metavar="[SET=]N",
            help="Responses per problem, of all sets or of one; may be repeated. [default: the run's, or 1]",
        ),
    ] = None,
    temperature: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]X", help="Sampling temperature, likewise; 0 is greedy. [default: the run's, or 1]"
        ),
    ] = None,
    top_p: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]X", help="Nucleus sampling threshold, likewise. [default: the run's, or 1]"
        ),
    ] = None,
    max_response_tokens: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SET=]N",
            help="Maximum response length, likewise. [default: the run's, or 4096, or what fits]",
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed for sampling and bootstrap. [default: the run's, or 0]")
    ] = None,
    engines: Annotated[int, typer.Option(min=1, help="Number of vLLM servers.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Tensor-parallel size of each engine.")] = 1,
    device: Annotated[
        str | None, typer.Option(metavar="cpu|cuda", help="[default: cuda if there is a GPU]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for the results. [default: a folder in evals/]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Evaluate a model: avg@k, pass@k, maj@k with intervals, lengths. Rerun the same command to resume.

    Without --suite and --data, a run is evaluated on its own held-out sets, as during training.
    Exit code 75: stopped by a scheduler's signal; requeue the job.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.eval.command import run_evaluation
        from rpg_megatron.commands.eval.output_dir import open_output_dir
        from rpg_megatron.commands.eval.settings import EvalRequest, check_request, make_request, model_label
        from rpg_megatron.launcher.nodes import leave_to_first_node
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.supervisor import StopSignals

    leave_to_first_node("eval")
    everywhere, per_set = split_sampling(
        samples=samples, temperature=temperature, top_p=top_p, max_response_tokens=max_response_tokens
    )
    request = EvalRequest(
        model=newest_run(model),
        suites=",".join(suite or ()),
        files=tuple(data or ()),
        folder=data_dir,
        **everywhere,
        own=per_set,
        seed=seed,
        engines=engines,
        tensor=tensor,
        device=device,
        overrides=tuple(overrides or ()),
    )
    with StopSignals(resumable=True) as signals, exit_codes():
        settings, model_source = make_request(request)
        check_request(settings, model_source)
        signals.raising = False  # from here on, resources must be cleaned up
        folder = open_output_dir(out, settings, model_label(model_source))
        try:
            if not folder.finished:
                run_evaluation(settings, model_source, signals, folder)
            summary = folder.summary()
        finally:
            folder.close()
    _print(summary, folder.path, as_json)


_RANGES: dict[str, tuple[type, float, float, str]] = {
    "samples": (int, 1, math.inf, "a whole number of at least 1"),
    "temperature": (float, 0, 2, "a number from 0 to 2"),
    "top_p": (float, 0.01, 1, "a number from 0.01 to 1"),
    "max_response_tokens": (int, 1, math.inf, "a whole number of at least 1"),
}


def split_sampling(**options: list[str] | None) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Values for all sets, and name of a set -> its own ones, of options that are lists of [SET=]VALUE.

    Raises UserError.
    """
    everywhere: dict[str, Any] = {}
    per_set: dict[str, dict[str, Any]] = {}
    for key, texts in options.items():
        kind, low, high, description = _RANGES[key]
        option = f"--{key.replace('_', '-')}"
        for text in texts or ():
            name, _, number = text.rpartition("=")
            try:
                value = kind(number)
            except ValueError:
                value = math.nan
            if not low <= value <= high:
                raise UserError(f"{option}: {text!r} is not {description}, or SET= and such a number")
            place = per_set.setdefault(name, {}) if name else everywhere
            if key in place:
                raise UserError(f"{option} is given twice for {name or 'all sets'}; remove one of them")
            place[key] = value
    return everywhere, per_set


def _print(summary: dict[str, object], folder: Path, as_json: bool) -> None:
    import json

    from rpg_megatron.commands.eval.table import show_summary
    from rpg_megatron.launcher.summary import display_path

    typer.echo(json.dumps(summary | {"folder": str(folder)}, indent=2) if as_json else show_summary(summary))
    print(f"responses and verdicts: {display_path(folder)}", file=sys.stderr)
