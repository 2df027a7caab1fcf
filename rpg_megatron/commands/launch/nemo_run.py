"""``rpg-megatron launch``: a run as a NeMo-Run experiment with one task. Only this module uses NeMo-Run."""

from __future__ import annotations

import shlex
import shutil
import signal
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rpg_megatron.commands.launch import job_script
from rpg_megatron.commands.launch.job_script import SLURM
from rpg_megatron.config import UserError
from rpg_megatron.config.files import read_text, remove
from rpg_megatron.launcher.stopping import Interrupted, RunFailed
from rpg_megatron.system.child import tail_of

if TYPE_CHECKING:
    from nemo_run import Executor, Experiment

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def launch(
    kind: str, config: Path, overrides: Sequence[str], options: Sequence[str], command: str, *, dry_run: bool
) -> None:
    """Submit a training run to Slurm, or run it to its end locally or in Docker.

    kind: slurm, local or docker. options: arguments of NeMo-Run's executor, as KEY=VALUE. command: what the
    job runs. dry_run: print the job's script, and keep the files that it names. Raises UserError before
    submission if the settings do not fit the number of nodes, RunFailed if a run locally or in Docker fails,
    Interrupted after a signal before the start.
    """
    try:
        import nemo_run as run
    except ImportError as e:
        raise UserError(
            f"NeMo-Run cannot be imported ({e}); install it in a separate environment without torch: "
            "python3.12 -m venv DIR && DIR/bin/pip install --no-deps -r requirements/launch.txt && "
            "DIR/bin/pip install --no-deps -e ."
        ) from None
    classes = {"slurm": run.SlurmExecutor, "local": run.LocalExecutor, "docker": run.DockerExecutor}
    if kind not in classes:
        raise UserError(
            f"--executor {kind}: is none of {', '.join(classes)}; use NeMo-Run's other executors from "
            "Python: examples/nemo_run_recipe.py"
        )
    types = typing.get_type_hints(classes[kind])
    known = {field.name: types[field.name] for field in fields(classes[kind]) if field.init}
    arguments = job_script.read_options(options, known)
    nodes = arguments.get("nodes", 1)
    if kind == "local" and nodes != 1:
        raise UserError("--option nodes: the local executor has one node; use slurm for several")
    container = arguments.get("container_image") is not None
    settings = job_script.check_job(config, overrides, nodes=nodes, command=command, container=container)
    script = job_script.training_script(config, overrides, nodes=nodes, command=command)
    arguments = _completed(kind, arguments, job_script.gpus_a_node(settings, nodes), run)
    executor = classes[kind](packager=run.Packager(), **arguments)
    if kind == "slurm" and not dry_run and shutil.which("sbatch") is None:
        raise UserError(
            "sbatch is not installed here; run this on a login node of the cluster, or use an SSH tunnel "
            "as in examples/nemo_run_recipe.py"
        )
    quiet = {"clean_mode": True, "log_level": "WARN", "enable_goodbye_message": False}
    made = run.Experiment(settings.name, executor, skip_status_at_exit=True, **quiet)
    with _forwarded_signals(kind), made as experiment:
        experiment.add(run.Script(inline=script), name=settings.name, tail_logs=kind != "slurm")
        if dry_run:
            experiment.dryrun(log=False, delete_exp_dir=False)
            _show(experiment, kind, script)
            return
        _start(experiment, detach=kind == "slurm")
    (job,) = experiment.jobs
    if kind == "slurm":
        print(f"job {job.handle.rpartition('/')[2]}, its logs: {job.executor.job_dir}")
    elif job.state.name != "SUCCEEDED":
        # NeMo-Run may show nothing of a short run.
        log = next(Path(job.executor.job_dir).rglob("combined.log"), Path(job.executor.job_dir, "log"))
        raise RunFailed(f"the run failed; the end of {log}:\n{tail_of(log)}")


@contextmanager
def _forwarded_signals(kind: str) -> Iterator[None]:
    """Forward signals to the launcher of a local run, which NeMo-Run would leave running."""

    def forward(number: int, _: object) -> None:
        children = psutil.Process().children()
        for child in children:
            child.send_signal(number)
        if not children:
            raise Interrupted(number)

    before = {number: signal.signal(number, forward) for number in _SIGNALS if kind == "local"}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _completed(kind: str, arguments: dict[str, Any], gpus: int, run: Any) -> dict[str, Any]:
    """The executor's arguments, with defaults for those not given. Raises UserError."""
    home = str(run.config.get_nemorun_home())  # of its scripts and logs
    if shlex.quote(home) != home:
        raise UserError(
            f"NEMORUN_HOME: NeMo-Run cannot use {home!r}; set a folder without blanks, on a shared disk"
        )
    here = [f"{Path.cwd()}:{Path.cwd()}"]
    if kind == "docker":
        if "container_image" not in arguments:
            raise UserError("--executor docker needs an image: -o container_image=NAME")
        # Weights are transferred through shared memory; Docker's default is 64 MB.
        return {"shm_size": "32g", "volumes": here, "num_gpus": -1 if gpus else None} | arguments
    if kind == "local":
        return arguments
    defaults = SLURM | {"account": None, "tunnel": run.LocalTunnel(job_dir=f"{home}/experiments")}
    if gpus and not {"gres", "gpus_per_node", "gpus_per_task"} & arguments.keys():
        defaults["gpus_per_node"] = gpus
    if "container_image" in arguments:
        defaults["container_mounts"] = here
    defaults |= arguments
    # These are added to ours.
    defaults["srun_args"] = [*SLURM["srun_args"], *(arguments.get("srun_args") or [])]
    defaults["setup_lines"] = "\n".join(filter(None, [arguments.get("setup_lines"), SLURM["setup_lines"]]))
    own = arguments.get("additional_parameters") or {}
    defaults["additional_parameters"] = SLURM["additional_parameters"] | own
    return defaults


def _start(experiment: Experiment, *, detach: bool) -> None:
    """Submit or start the job. Raises UserError if that fails, and removes its files."""
    from docker.errors import DockerException
    from invoke.exceptions import UnexpectedExit

    try:
        experiment.run(detach=detach)
        return
    except UnexpectedExit as e:
        problem = f"{e.result.command}: {e.result.stderr.strip()}"
    except DockerException as e:
        problem = f"Docker: {e}; check that its daemon is running and that you may use it (docker info)"
    remove(Path(experiment.jobs[0].executor.experiment_dir), ignore_errors=True)
    raise UserError(problem)


def _show(experiment: Experiment, kind: str, script: str) -> None:
    """Print a job's script; the files it refers to are kept."""
    executor: Executor = experiment.jobs[0].executor
    folder = Path(executor.experiment_dir)
    if kind == "slurm":
        print(read_text(folder / f"{executor.job_name}_sbatch.sh").rstrip())
        lines = "".join(f"#     {line}\n" for line in script.splitlines())
        print(f"\n# Each node runs {executor.job_dir}/scripts/{executor.job_name}.sh:\n{lines}", end="")
        return
    if kind == "docker":
        facts = ("container_image", "num_gpus", "shm_size", "volumes", "network", "ipc_mode")
        print("".join(f"# {name}: {getattr(executor, name)}\n" for name in facts), end="")
    print(script, end="")
    remove(folder)
