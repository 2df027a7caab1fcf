"""The options of ``rpg-megatron eval``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rpg_megatron.commands.exit_codes import exit_codes
from rpg_megatron.system.terminal import exit_on_interrupt

Texts = list[str] | None


def _per_set(value: str, text: str, default: str, *names: str) -> Any:
    """An option that may be given for all sets and for each. value: its kind."""
    return typer.Option(*names, metavar=f"[SET=]{value}", help=f"{text} [default: the run's, or {default}]")


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A checkpoint (Hugging Face, Megatron, of a run), hub id, or a run: its newest export.",
        ),
    ],
    overrides: Annotated[
        Texts,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings to override, in data, reward, guards, engine or precision, or rollout.episode.",
        ),
    ] = None,
    suite: Annotated[
        Texts, typer.Option(metavar="NAME[=FILE],...", help="Known benchmarks, such as aime24,aime25,amc23.")
    ] = None,
    data: Annotated[
        Texts, typer.Option(metavar="[NAME=]FILE", help="Your own problem set; may be repeated.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder with local copies of the suites, NAME.jsonl.")
    ] = None,
    samples: Annotated[
        Texts,
        _per_set(
            "N", "Responses per problem, of all sets or of one; may be repeated.", "1", "-n", "--samples"
        ),
    ] = None,
    temperature: Annotated[Texts, _per_set("X", "Sampling temperature, likewise; 0 is greedy.", "1")] = None,
    top_p: Annotated[Texts, _per_set("X", "Nucleus sampling threshold, likewise.", "1")] = None,
    max_response_tokens: Annotated[
        Texts, _per_set("N", "Maximum response length, likewise.", "4096, or what fits")
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
        import json

        from rpg_megatron.commands.eval.command import run_evaluation
        from rpg_megatron.commands.eval.settings import EvalRequest, check_overrides
        from rpg_megatron.commands.eval.table import show_summary
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.stopping import StopSignals
        from rpg_megatron.launcher.summary import display_path

    exit_unless_first_node("eval")
    sampling = {"samples": samples, "temperature": temperature, "top_p": top_p}
    sampling["max_response_tokens"] = max_response_tokens
    given = {"seed": seed, "device": device, "engine.replicas": engines, "engine.tensor": tensor}
    options = [f"{key}={value}" for key, value in given.items() if value not in (None, "")]
    request = EvalRequest(
        model=newest_run(model),
        suites=",".join(suite or ()),
        files=tuple(data or ()),
        folder=data_dir,
        sampling={key: texts for key, texts in sampling.items() if texts},
        overrides=[*options, *(overrides or ())],
    )
    with StopSignals(resumable=True) as signals, exit_codes():
        check_overrides(overrides or ())
        folder = run_evaluation(request, out, signals)
        summary = folder.summary() or {}
    report = json.dumps(summary | {"folder": str(folder.path)}, indent=2)
    typer.echo(report if as_json else show_summary(summary))
    print(f"responses and verdicts: {display_path(folder.path)}", file=sys.stderr)
