"""Script and resources of a NeMo-Run job, without importing NeMo-Run.

On a cluster the job works like the scripts in ``slurm/``: one launcher per node gets a signal before the
time limit, saves, and exits with code 75; then the job is requeued or the array continues.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.files import read_text
from rpg_megatron.config.parsing import parse_yaml
from rpg_megatron.launcher.checks import CheckedRun, check_start, has_torch, preparing
from rpg_megatron.launcher.nodes import assign_node

_REQUEUE = read_text(Path(__file__).with_name("requeue.sh"))
"""``slurm/requeue.sh``, which the scripts in ``slurm/`` source. NeMo-Run has options for its first part."""
SETUP = f"""\
# By default srun gives a task one core; one launcher per node uses all cores of the job there.
export SRUN_CPUS_PER_TASK="${{SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}}"
CHAIN=1
{_REQUEUE[_REQUEUE.index("# A task of an array") :].rstrip()}"""
"""Lines of a batch script before its ``srun``."""

SLURM: dict[str, Any] = {
    "job_name_prefix": "rpg.",
    "time": "04:00:00",
    "signal": "USR1@600",
    "exclusive": True,
    "mem": "0",  # all memory of the node; the default of many clusters is a part of it
    # Launchers stop each other; NeMo-Run's defaults would kill them when the first one exits.
    "srun_args": ["--kill-on-bad-exit=0", "--wait=0"],
    "setup_lines": SETUP,
    "additional_parameters": {"requeue": True},
    "poll_estimated_start_time": False,
}
"""Required and default arguments of ``nemo_run.SlurmExecutor``."""

OURS = ("packager", "launcher", "tunnel", "job_details", "experiment_id", "job_dir", "ntasks_per_node")
"""Arguments of executors that users cannot set: one launcher per node starts everything else."""

_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)


def training_script(
    config: Path, overrides: Sequence[str] = (), *, nodes: int = 1, command: str = "rpg-megatron"
) -> str:
    """Shell script that each node of a training job runs here; for ``nemo_run.Script(inline=...)``.

    command: a name on the job's PATH, or a path. Raises UserError if NeMo-Run would change the script.
    """
    words = [str(Path(command).absolute()) if os.sep in command else command, "train", str(config.absolute())]
    if nodes > 1:
        words.append("bridge.transport=process_group")
    script = f"cd {shlex.quote(str(Path.cwd()))} && exec {shlex.join([*words, *overrides])}\n"
    if "/nemo_run" in script:
        raise UserError(
            "NeMo-Run replaces /nemo_run in scripts with its own folder; "
            f"use paths without it: {script.strip()}"
        )
    return script


def check_job(
    config: Path, overrides: Sequence[str], *, nodes: int, command: str, container: bool
) -> Settings:
    """Check a job before it is submitted; returns its settings. Raises UserError if a check fails.

    container: the job runs in one, whose model and command cannot be checked from here.
    """
    spread = ["bridge.transport=process_group"] if nodes > 1 else []
    settings = load_settings(config, [*spread, *overrides])
    if container:
        check_start(CheckedRun(settings, frozenset({"trainer", "engines"}), nodes=nodes))
        return settings
    check_start(preparing(with_local_model(settings), nodes=nodes))
    executable, here = shutil.which(command), Path(sys.executable).absolute().parent
    problem = f"{command} was not found" if executable is None else ""
    if executable is not None and Path(executable).resolve().parent == here and not has_torch():
        problem = f"{executable} belongs to this environment, which has no torch"
    if problem:
        raise UserError(f"{problem}; give the training environment's: --command DIR/bin/rpg-megatron")
    return settings


def gpus_a_node(settings: Settings, nodes: int) -> int:
    """The largest number of GPUs that a node of the job needs; 0 on CPUs."""
    if settings.device == "cpu":
        return 0
    shares = [assign_node(settings, rank, nodes) for rank in range(nodes)]
    apart = not settings.engine.colocated
    return max(len(s.ranks) + len(s.engines) * s.workers(settings) * apart for s in shares)


def read_options(options: Sequence[str], known: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of an executor from KEY=VALUE; values are parsed as YAML unless the type is str.

    known: types of the executor's arguments. Raises UserError for unknown ones, and for secrets in
    ``env_vars``, which other users could read in the job's script.
    """
    names = [name for name in known if name not in OURS]
    read: dict[str, Any] = {}
    for item in options:
        key, equals, text = item.partition("=")
        if not equals:
            raise UserError(f"--option {item}: must be KEY=VALUE")
        if key not in names:
            near = difflib.get_close_matches(key, names, 1, 0.5)
            hint = f"; did you mean {near[0]}?" if near else "."
            raise UserError(
                f"--option {key}: the executor has no such argument{hint} It has {', '.join(names)}"
            )
        try:
            value = text if known[key] in (str, str | None) else parse_yaml(text)
            read[key] = TypeAdapter(known[key]).validate_python(value)
        except (ValidationError, yaml.YAMLError) as e:
            first = e.errors()[0]["msg"] if isinstance(e, ValidationError) else " ".join(str(e).split())
            raise UserError(f"--option {key}: {text!r}: {first}") from None
    if secret := [name for name in read.get("env_vars", {}) if _SECRET.search(name)]:
        raise UserError(
            f"--option env_vars: {secret[0]} would be written to files that others can read, e.g. the job's "
            "script; export it instead (local and Slurm jobs inherit it), or mount a file into the container"
        )
    return read
