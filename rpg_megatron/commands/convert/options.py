"""The ``convert`` commands. Like those of ``cli.py`` each imports what it needs when called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rpg_megatron.config.errors import UserError

if TYPE_CHECKING:
    from rpg_megatron.commands.convert.command import Report, Source

convert = typer.Typer(
    name="convert",
    help="Hugging Face checkpoints to Megatron-Core's and back, in any tensor x pipeline layout. On the CPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
OutFolder = Annotated[Path | None, typer.Option(metavar="DIR", help="Folder to make.")]
Verify = Annotated[bool, typer.Option("--verify", help="Compare logits with transformers (whole model).")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Print the mapping, rank by rank, and write nothing.")
]


@convert.command()
def hf_to_megatron(
    hf: Annotated[Path, typer.Option(metavar="DIR", help="Hugging Face checkpoint.")],
    out: OutFolder = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size.")] = 1,
    pp: Annotated[int, typer.Option(min=1, help="Pipeline stages.")] = 1,
    verify: Verify = False,
    dry_run: DryRun = False,
) -> None:
    """Write a Hugging Face checkpoint as a Megatron-Core distributed checkpoint."""
    from rpg_megatron.commands.convert import command as tool

    source = tool.open_hf(hf, tp, pp)
    _convert(source, out, dry_run, lambda path: tool.convert_to_megatron(source, path, verify=verify))


@convert.command()
def megatron_to_hf(
    megatron: Annotated[Path, typer.Option(metavar="DIR", help="Megatron-Core distributed checkpoint.")],
    out: OutFolder = None,
    tp: Annotated[
        int | None, typer.Option(min=1, help="Tensor-parallel size; as written by default.")
    ] = None,
    pp: Annotated[int | None, typer.Option(min=1, help="Pipeline stages; as written by default.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="HF config and tokenizer, for a checkpoint that has none with it."),
    ] = None,
    max_shard_gib: Annotated[float, typer.Option(min=0.001, help="Largest file, GiB.")] = 5.0,
    verify: Verify = False,
    dry_run: DryRun = False,
) -> None:
    """Write a Megatron-Core distributed checkpoint as a Hugging Face checkpoint."""
    from rpg_megatron.commands.convert import command as tool

    source = tool.open_megatron(megatron, tp, pp, config)
    limit = int(max_shard_gib * 1024**3)
    _convert(
        source,
        out,
        dry_run,
        lambda path: tool.convert_to_hf(source, path, verify=verify, max_shard_bytes=limit),
    )


@convert.command()
def inspect(
    checkpoint: Annotated[Path, typer.Argument(metavar="DIR", help="Hugging Face or Megatron checkpoint.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List what a checkpoint holds, and check that it is whole."""
    from rpg_megatron.commands.convert.inspect import inspect_checkpoint

    found = inspect_checkpoint(checkpoint)
    typer.echo(found.json() if as_json else found.table())
    if found.problems:
        raise typer.Exit(2)


def _convert(source: Source, out: Path | None, dry_run: bool, work: Callable[[Path], Report]) -> None:
    from rpg_megatron.commands.convert.command import mapping
    from rpg_megatron.commands.convert.processes import ConversionFailed
    from rpg_megatron.launcher.nodes import leave_to_first_node

    if dry_run:
        typer.echo("\n".join(mapping(source)))
        return
    if out is None:
        raise UserError("--out is missing: the folder to make")
    leave_to_first_node("convert")
    print(source, file=sys.stderr)
    try:
        report = work(out)
    except ConversionFailed as e:
        print(f"error: {e}", file=sys.stderr)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        print("stopped: Ctrl-C; nothing was written", file=sys.stderr)
        raise typer.Exit(130) from None
    if (v := report.verification) is not None:
        typer.echo(
            f"logits: max |difference| to transformers {v.difference:.2e} over {v.tokens} positions, "
            f"tolerance {v.tolerance:.1e} (float32, largest logit {v.largest:.3g})"
        )
    worst = max(report.memory, key=lambda m: m.peak - m.baseline)
    typer.echo(
        f"{report.out}: written in {report.seconds:.1f} s; memory of a process: at most "
        f"{(worst.peak - worst.baseline) / 1e6:,.1f} MB over its start, "
        f"for {worst.shard / 1e6:,.1f} MB of weights"
    )
