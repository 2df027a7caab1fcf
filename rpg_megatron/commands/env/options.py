"""The ``env`` commands. As in ``cli.py``, each imports its dependencies when called."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rpg_megatron.system.terminal import exit_on_interrupt

env = typer.Typer(
    name="env",
    help="Check environments.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@env.callback()
def _group() -> None:
    pass  # else Typer would leave the name of the only command out


@env.command()
def check(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Tasks in Harbor's format, or one of them.")
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="JSON with an image for each task or docker_image. [default: FOLDER/images.json]",
        ),
    ] = None,
    cache: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for unpacked images.")] = None,
    at_once: Annotated[
        int | None, typer.Option(min=1, help="Tasks at once. [default: one for each core]")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.1, help="Limit of a solution, and of tests.")] = None,
    keep: Annotated[
        list[str] | None, typer.Option(metavar="PATH", help="See keep in docs/environments.md; repeat it.")
    ] = None,
    network: Annotated[
        bool,
        typer.Option(
            "--network",
            help="Run a solution that fails again with the machine's network; tests never have one.",
        ),
    ] = False,
) -> None:
    """Run the reference solution and an empty one of each task, and list those that do not give 1 and 0.

    The exit code is 1 if there are some.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.env.command import check_tasks
        from rpg_megatron.environments.harbor import ImageSettings

    given = {
        "cache": str(cache or ""),
        "keep": tuple(keep or ()),
        **({"at_once": at_once} if at_once else {}),
    }
    with exit_on_interrupt():
        bad = check_tasks(folder, images, ImageSettings(**given), seconds=seconds, network=network)
    if bad:
        raise typer.Exit(1)
