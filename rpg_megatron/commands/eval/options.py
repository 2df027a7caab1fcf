"""The options of ``rpg-megatron eval``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rpg_megatron.commands.exit_codes import exit_codes
from rpg_megatron.config.errors import UserError
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
        from rpg_megatron.commands.eval.output_dir import open_output_dir
        from rpg_megatron.commands.eval.settings import EvalRequest, check_request, make_request, model_label
        from rpg_megatron.commands.eval.table import show_summary
        from rpg_megatron.launcher.nodes import leave_to_first_node
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.summary import display_path
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
        sampling=everywhere,
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
            if folder.summary() is None:
                run_evaluation(settings, model_source, signals, folder)
            summary = folder.summary() or {}
        finally:
            folder.close()
    report = json.dumps(summary | {"folder": str(folder.path)}, indent=2)
    typer.echo(report if as_json else show_summary(summary))
    print(f"responses and verdicts: {display_path(folder.path)}", file=sys.stderr)


def split_sampling(**options: list[str] | None) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Values for all sets, and name of a set -> its own ones, of options that are lists of [SET=]VALUE.

    They are checked with the other settings. Raises UserError if there are two for the same set.
    """
    everywhere: dict[str, str] = {}
    per_set: dict[str, dict[str, str]] = {}
    for key, texts in options.items():
        for text in texts or ():
            name, _, value = text.rpartition("=")
            place = per_set.setdefault(name, {}) if name else everywhere
            if key in place:
                option = f"--{key.replace('_', '-')}"
                raise UserError(f"{option} is given twice for {name or 'all sets'}; remove one of them")
            place[key] = value
    return everywhere, per_set
