"""The commands. Each imports what it needs when called: ``--help`` and a bad config answer at once."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import rpg_megatron
from rpg_megatron.config.errors import UserError

if TYPE_CHECKING:
    from rpg_megatron.launch.supervision import StopSignals

app = typer.Typer(
    name="rpg-megatron",
    help="RL post-training of LLMs with KL-regularised policy gradients: Megatron-Core, vLLM.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with the settings of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to replace, such as optimizer.lr=1e-5."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"rpg-megatron {rpg_megatron.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train a policy; each run gets a numbered folder of its own."""
    from rpg_megatron.launch.supervision import Interrupted, StopSignals

    with StopSignals() as signals:
        try:
            _train(config, overrides, signals)
        except Interrupted as e:
            print(f"stopped: {e}", file=sys.stderr)
            raise typer.Exit(e.exit_code) from None


def _train(file: Path, overrides: list[str] | None, signals: StopSignals) -> None:
    from rpg_megatron.config import load_settings
    from rpg_megatron.launch import launcher

    try:
        launcher.train(load_settings(file, overrides), signals)
    except launcher.RunFailed as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None


@app.command()
def config(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the settings of a run, defaults included."""
    from rpg_megatron.config import load_settings
    from rpg_megatron.launch.run_directory import resolved_yaml

    typer.echo(resolved_yaml(load_settings(config, overrides)), nl=False)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line.

    What the user can mend is one message and exit code 2; a bug of ours keeps its traceback.
    """
    try:
        app(args=arguments, prog_name="rpg-megatron")
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
