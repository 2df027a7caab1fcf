"""The ``convert`` commands. As in ``cli.py``, each imports its dependencies when called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpg_megatron.config.errors import UserError
from rpg_megatron.system.terminal import exit_on_interrupt

if TYPE_CHECKING:
    from rpg_megatron.commands.convert.staging import Source
    from rpg_megatron.launcher.stopping import StopSignals

convert = typer.Typer(
    name="convert",
    help="Convert checkpoints between Hugging Face and Megatron-Core. Training starts from either "
    "(model.path), in any layout; vLLM and others need the former.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


OutFolder = Annotated[Path, typer.Option(metavar="DIR", help="Folder to create.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare logits with transformers, all in memory.")]


@convert.command()
def hf_to_megatron(
    hf: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face checkpoint.")],
    out: OutFolder,
    verify: Verify = False,
) -> None:
    """Write a Hugging Face checkpoint as a Megatron-Core distributed checkpoint.

    Megatron-Core loads it in any layout, and training starts from it: model.path=DIR.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.convert import command as tool

    source = tool.open_hf(hf)
    _convert(source, out, partial(tool.convert_to_megatron, source, verify=verify))


@convert.command()
def megatron_to_hf(
    megatron: Annotated[Path, typer.Option(metavar="DIR", help="Megatron-Core checkpoint, or a run('s).")],
    out: OutFolder,
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="HF config and tokenizer, or a LoRA run's model, if not found."),
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest file size, GiB.")] = 5.0,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write a LoRA run's adapter, for PEFT.")] = False,
    verify: Verify = False,
) -> None:
    """Write a Megatron-Core distributed checkpoint as a Hugging Face checkpoint, for vLLM and others.

    The adapters of a LoRA run are merged with its model.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.convert import command as tool
        from rpg_megatron.launcher.run_dir import newest_run

    if adapter and verify:
        raise UserError("--verify compares whole models; leave out --adapter")
    source = tool.open_megatron(newest_run(megatron), config, adapter=adapter)
    limit = int(max_shard_gib * 1024**3)
    _convert(source, out, partial(tool.convert_to_hf, source, verify=verify, max_shard_bytes=limit))


@convert.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Checkpoint of either kind, or a run.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the tensors of a checkpoint, and check that it is complete."""
    with exit_on_interrupt():
        from rpg_megatron.commands.convert.inspect import inspect_checkpoint
        from rpg_megatron.launcher.run_dir import newest_run

    inspection = inspect_checkpoint(newest_run(checkpoint))
    typer.echo(inspection.json() if as_json else inspection.table())
    if inspection.problems:
        raise typer.Exit(2)


def _convert(source: Source, out: Path, work: Callable[[Path, StopSignals], str]) -> None:
    with exit_on_interrupt():
        from rpg_megatron.commands.exit_codes import exit_codes
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.stopping import Interrupted, StopSignals

    exit_unless_first_node("convert")
    print(source, file=sys.stderr)
    with StopSignals() as signals, exit_codes():
        try:
            typer.echo(work(out, signals))
        except Interrupted as e:
            e.note = "nothing was written"
            raise
