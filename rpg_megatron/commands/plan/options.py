"""The options of ``rpg-megatron plan``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpg_megatron.system.terminal import exit_on_interrupt


def plan(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with the settings of the run.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings to override, such as parallel.tensor=2."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="[Nx]GPU|BYTES",
            help="GPU model or memory: h100-80, h200-141, 48GiB, ...; with N of them in a node: 4xh100-80.",
        ),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Rank all layouts with the same number of trainer ranks.")
    ] = False,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set an assumption of the time estimates; may be repeated."),
    ] = None,
    solve: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=PHASE:SECONDS",
            help="Set an assumption so that a phase takes this time: response_mean=rollout:240.",
        ),
    ] = None,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="Folder of a run: its lengths and times replace assumptions."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Estimate sizes, batch, memory and time of a run, and whether it fits. Needs neither a GPU nor torch.

    Exit code 0: it fits; 1: it does not fit, and settings that would fit are printed; 2: train would refuse
    these settings.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.plan.command import run_plan
        from rpg_megatron.commands.plan.plan import find_target
        from rpg_megatron.config import load_settings

    settings = load_settings(config, overrides)
    fits = run_plan(
        settings,
        find_target(settings, gpu),
        sweep=sweep,
        as_json=json,
        assumptions=assume or (),
        solve=solve,
        from_run=from_run,
    )
    if not fits:
        raise typer.Exit(1)
