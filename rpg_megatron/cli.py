"""The command line. Commands import their dependencies when called: ``--help`` and errors are fast."""

from __future__ import annotations

import errno
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rpg_megatron.system.terminal import exit_on_interrupt, print_error, protect_streams

with exit_on_interrupt():
    import typer
    import typer.core

    import rpg_megatron
    from rpg_megatron.commands.convert.options import convert
    from rpg_megatron.commands.env.options import env
    from rpg_megatron.commands.eval.options import evaluate
    from rpg_megatron.commands.exit_codes import exit_codes
    from rpg_megatron.commands.plan.options import plan
    from rpg_megatron.commands.usage import improve
    from rpg_megatron.config.errors import UserError, shorten

if TYPE_CHECKING:
    from collections.abc import Iterator


_ALIASES = {"tp": "tensor", "pp": "pipeline", "dryrun": "dry-run"}
"""Undocumented spellings of options, for all commands."""


class _Commands(typer.core.TyperGroup):
    """Prints a message on Ctrl-C for commands that print none themselves; Typer would exit silently."""

    def make_context(self, *args: Any, **settings: Any) -> Any:
        """Parse the command line."""
        with _message_on_interrupt():
            return super().make_context(*args, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        with _message_on_interrupt():
            try:
                return super().invoke(ctx)
            except Exception as e:
                improve(e)
                raise


@contextmanager
def _message_on_interrupt(note: str = "") -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: Ctrl-C{note}", file=sys.stderr)
        raise typer.Exit(130) from None


app = typer.Typer(
    name="rpg-megatron",
    cls=_Commands,
    help="RL post-training of LLMs with KL-regularised policy gradients: Megatron-Core, vLLM.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: _ALIASES.get(name, name)},
    rich_markup_mode=None,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file with the settings of the run.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to override, such as optimizer.lr=1e-5."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _print_version(requested: bool) -> None:
    if requested:
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
def train(
    ctx: typer.Context,
    config: ConfigFile,
    overrides: Overrides = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Start a new run even if an unfinished one exists.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--from",
            metavar="DIR|NAME",
            help="Start a new run from a checkpoint or a run's newest; weights alone are model.path.",
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Number of nodes; not needed under srun.")] = None,
    node_rank: Annotated[
        int | None, typer.Option(min=0, help="Index of this node; node 0 leads the run.")
    ] = None,
    job: Annotated[
        str | None, typer.Option(help="With --nodes: a name that distinguishes this job from others.")
    ] = None,
    task: Annotated[
        int | None,
        typer.Option(min=0, help="Task of a job array: the seed or, of a study, the run's number."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Run all checks, print settings and processes; start nothing."),
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", "--continue", "--resume-from-checkpoint", hidden=True)
    ] = False,
) -> None:
    """Train a policy; with section sft, by fine-tuning. Resumes the newest unfinished run of this name.

    The first Ctrl-C saves and exits, the second exits at once.

    On several nodes, start it once per node: with srun, or with --nodes and --node-rank.
    """
    if resume:
        raise UserError(
            "--resume: leave it out; the same command resumes the newest unfinished run of its name (--from: "
            "a new run that starts from a checkpoint)"
        )
    if fresh and source:
        raise UserError("--fresh and --from exclude each other; give one of them")
    with exit_on_interrupt():
        from rpg_megatron.checkpoints.hf_hub import with_local_model
        from rpg_megatron.commands.study import settings_of_task
        from rpg_megatron.commands.train import dry_run as show_run
        from rpg_megatron.commands.train import train as lead_run
        from rpg_megatron.config import load_settings
        from rpg_megatron.config.study import is_study
        from rpg_megatron.launcher.node_agent import run_node
        from rpg_megatron.launcher.nodes import find_nodes
        from rpg_megatron.launcher.resume import take_weights
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.stopping import StopSignals

    source = source and newest_run(source)
    with StopSignals(resumable=True) as signals, exit_codes():
        job_nodes = find_nodes(node_rank, nodes, job)
        if task is None:
            if is_study(config):
                raise UserError(f"{config}: is a study; use rpg-megatron study, or --task N for one run")
            settings = load_settings(config, overrides)
        elif (found := settings_of_task(config, overrides or (), task)) is not None:
            settings = found
        else:
            return
        settings, source = take_weights(settings, source)
        settings = with_local_model(settings)
        if settings.sft is None and ctx.info_name == "sft":
            raise UserError(f"{config}: has no section sft (docs/warm-start.md); use train for RL")
        if dry_run:
            show_run(settings, job_nodes, fresh=fresh, source=source)
        elif job_nodes.rank == 0:
            lead_run(settings, signals, fresh=fresh, source=source, nodes=job_nodes)
        else:
            run_node(settings, job_nodes, signals)


app.command("sft", help="Train on recorded conversations (section sft). Options and resume as for train.")(
    train
)
app.command("eval")(evaluate)
app.command()(plan)


@app.command()
def study(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML file of the study.")],
    overrides: Overrides = None,
    option: Annotated[
        list[str] | None,
        typer.Option("-o", "--option", metavar="OPTION", help="Option of sbatch: -o --partition=gpu, ..."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Job script. [default: slurm/train_single_node.sbatch]"),
    ] = None,
    local: Annotated[
        bool, typer.Option("--local", help="Train here, one run after the other, also where there is Slurm.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and what would be submitted.")
    ] = False,
) -> None:
    """Train one config with several settings and seeds: as a job array or, without Slurm, one by one.

    The same command goes on with the runs that are not finished.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.study import run_study
        from rpg_megatron.launcher.nodes import exit_unless_first_node

    exit_unless_first_node("study")
    run_study(file, overrides or [], script=script, options=option or [], local=local, dry_run=dry_run)


@app.command()
def launch(
    config: ConfigFile,
    overrides: Overrides = None,
    executor: Annotated[
        str, typer.Option(metavar="slurm|local|docker", help="Which executor of NeMo-Run starts the job.")
    ] = "slurm",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "-o", "--option", metavar="KEY=VALUE", help="Argument of the executor: nodes=4, account=me, ..."
        ),
    ] = None,
    command: Annotated[
        str,
        typer.Option(envvar="RPG_MEGATRON", help="Command that the job runs, if it is not on its PATH."),
    ] = "rpg-megatron",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the job's script; start nothing.")
    ] = False,
) -> None:
    """Train in a job that NeMo-Run submits or starts. Requires NeMo-Run, but not torch.

    Exit code 0: submitted or, with the local and docker executors, finished; 1: the run failed.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.launch import nemo_run
        from rpg_megatron.launcher.nodes import exit_unless_first_node

    exit_unless_first_node("launch")
    with exit_codes():
        nemo_run.launch(executor, config, overrides or [], option or [], command, dry_run=dry_run)


@app.command()
def audit(
    target: Annotated[Path, typer.Argument(metavar="RUN|CONFIG", help="A run, or YAML file with settings.")],
    overrides: Overrides = None,
    engine_model: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Let engines load this Hugging Face checkpoint; no sync."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the report here, as JSON.")
    ] = None,
    json: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Find where trainer and engine diverge, layer by layer.

    Exit code 0: they agree; 1: they diverge; 3: a process died before the result was known.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.audit.command import audit
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.stopping import StopSignals

    exit_unless_first_node("audit")
    with StopSignals() as signals, exit_codes(failed=3):
        clean = audit(newest_run(target), overrides, signals, engine_model, out or json)
    if not clean:
        raise typer.Exit(1)


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or the name of the newest.")],
    step: Annotated[int, typer.Option(min=1, help="Step to replay.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Replay a step of a run from its saved rollouts, without an engine, and compare the results.

    Exit code 0: log-probs, loss and gradient norm match the run; 1: they differ; 3: a process died before
    the result was known.
    """
    with exit_on_interrupt():
        import json

        from rpg_megatron.commands.replay import command as replay_command
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.run_dir import newest_run
        from rpg_megatron.launcher.stopping import StopSignals

    exit_unless_first_node("replay")
    with StopSignals() as signals, exit_codes(failed=3):
        report = replay_command.replay(newest_run(run), step, overrides, signals)
    typer.echo(json.dumps(report, indent=2) if as_json else replay_command.show(report))
    if not report["match"]:
        raise typer.Exit(1)


@app.command()
def config(
    config: ConfigFile,
    overrides: Overrides = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print the meaning of each key above it.")
    ] = False,
) -> None:
    """Print the settings of a run, defaults included."""
    with exit_on_interrupt():
        from rpg_megatron.config import load_settings
        from rpg_megatron.launcher.run_dir import resolved_yaml

    typer.echo(resolved_yaml(load_settings(config, overrides), explained=explain), nl=False)


@app.command()
def init(
    folder: Annotated[Path, typer.Argument(metavar="[DIR]", help="Where to write.")] = Path(),
    task: Annotated[str, typer.Option(metavar="math|custom|tools|sft", help="What to train for.")] = "math",
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER|HUB_ID", help="Model to train. [default: a tiny model, for a test]"),
    ] = None,
    source: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Convert a config of verl, NeMo-RL or TRL.")
    ] = None,
) -> None:
    """Write a commented config, problems and a reward function, which run on a CPU as they are."""
    with exit_on_interrupt():
        from rpg_megatron.commands.init.command import start

    typer.echo("\n".join(start(folder, task, model, source)))


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG]", help="YAML file with the settings of a run.")
    ] = None,
    overrides: Overrides = None,
    json: AsJson = False,
) -> None:
    """Check this machine, and with CONFIG that run; under srun, every node of the job step.

    Exit code 0: all checks passed; 1: a check failed, and its line says how to fix it.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.doctor.command import run_doctor
        from rpg_megatron.config import load_settings

    if not run_doctor(load_settings(config, overrides) if config else None, as_json=json):
        raise typer.Exit(1)


@app.command()
def grade(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help='Lines of {"response": ..., "answer": ...}; with --reward also data, or rollouts of a run.',
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="With --reward: settings in reward and data."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="Your own reward function, instead of a style."),
    ] = None,
    style: Annotated[
        str, typer.Option(metavar="STYLE", help="How the answer is marked: auto, answer_line, boxed, gsm8k.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the verdicts here. [default: standard output]")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that verify LaTeX.")] = 2,
    deadline: Annotated[
        float, typer.Option(min=0.1, help="Seconds per answer; then it counts as wrong.")
    ] = 5.0,
    skip_malformed: Annotated[
        bool, typer.Option("--skip-malformed", help="Skip and count malformed lines.")
    ] = False,
) -> None:
    """Grade responses against reference answers: one verdict per line, and a summary.

    With --reward, run a reward function: on responses, on the rollouts of a run's step, or on a data set,
    with its reference answers as responses.
    """
    with exit_on_interrupt():
        from rpg_megatron.commands.grade import grade_file, reward_settings
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.rewards.extraction import STYLES

    exit_unless_first_node("grade")
    known = next((s for s in STYLES if s == style), None)
    if known is None:
        raise UserError(f"--style: {style!r} is not known; use one of {', '.join(STYLES)}")
    if overrides and not reward:
        raise UserError(f"{overrides[0]!r} has no effect without --reward MODULE:NAME")
    custom = reward_settings(file, reward, overrides or []) if reward else None
    with _message_on_interrupt("; nothing was written" if out else ""):
        summary = grade_file(
            file,
            style=known,
            out=out,
            workers=workers,
            deadline=deadline,
            skip_malformed=skip_malformed,
            custom=custom,
        )
    print(f"{file}: {summary}", file=sys.stderr)


@app.command()
def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or the name of the newest.")],
    step: Annotated[int | None, typer.Option(min=1, help="Step. [default: the newest one saved]")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Only prompts that contain this text.")
    ] = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="Maximum number of responses.")] = 20,
    live: Annotated[
        bool, typer.Option("--live", help="New responses of a checkpoint, sampled by a vLLM engine.")
    ] = False,
) -> None:
    """Print responses of a run with their rewards, from its saved rollouts or live from a checkpoint."""
    with exit_on_interrupt():
        from rpg_megatron.commands.sample import print_samples
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.run_dir import newest_run

    exit_unless_first_node("sample")
    run = newest_run(run)
    if not live:
        return print_samples(run, step, prompt, count)
    with exit_on_interrupt():
        from rpg_megatron.commands.sample_live import print_live_samples
    with exit_codes():
        print_live_samples(run, step, prompt, count)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...", help="Runs, finished or not, a folder of several, or a study's file."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="[default: report.html in the first RUN, or STUDY.html]"),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Write it again at each step, until the runs have ended.")
    ] = False,
) -> None:
    """Write an HTML report of runs: charts, health checks, responses, settings."""
    with exit_on_interrupt():
        from rpg_megatron.commands.report.render import watch_report, write_report
        from rpg_megatron.commands.study import folders_of
        from rpg_megatron.config.study import is_study
        from rpg_megatron.launcher.nodes import exit_unless_first_node
        from rpg_megatron.launcher.run_dir import newest_run

    exit_unless_first_node("report")
    if out is None and is_study(runs[0]):
        out = runs[0].with_suffix(".html")
    named = [folders_of(run) if is_study(run) else [newest_run(run)] for run in runs]
    runs = [folder for folders in named for folder in folders]
    if watch:
        watch_report(runs, out, typer.echo)
    else:
        typer.echo(write_report(runs, out))


app.add_typer(convert)
app.add_typer(env)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. User errors print one message, with exit code 2; others keep their traceback."""
    protect_streams()
    try:
        app(args=arguments, prog_name="rpg-megatron")
    except UserError as e:
        print_error(f"error: {e}")
        sys.exit(2)
    except KeyboardInterrupt:  # before the command itself
        sys.exit(130)
    except OSError as e:
        if e.errno == errno.ENAMETOOLONG:
            print_error(f"error: {shorten(str(e.filename))}: {e.strerror}; give a shorter path")
            sys.exit(2)
        if e.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        print(f"error: {e.filename or 'standard output'}: {e.strerror}; free space there", file=sys.stderr)
        sys.stdout = None  # its buffer could not be flushed either
        sys.exit(2)


if __name__ == "__main__":
    main()
