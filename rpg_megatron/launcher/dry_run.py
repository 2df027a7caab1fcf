"""What ``train`` would do, as text: the run that it starts or resumes, settings, processes by node."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

from rpg_megatron.config import Settings
from rpg_megatron.engine.command import engine_command, span_arguments
from rpg_megatron.engine.process import engine_socket
from rpg_megatron.launcher.nodes import assign_node
from rpg_megatron.launcher.rank_env import NodeSpec, rank_starts, sampler_command
from rpg_megatron.launcher.resume import OpenRun, open_run
from rpg_megatron.launcher.run_dir import resolved_yaml
from rpg_megatron.launcher.scratch_dirs import Workspace
from rpg_megatron.launcher.summary import display_path

_SPACE = Workspace(Path("WORK"), Path("BRIDGE"))
"""Stands for the private folders that a start creates on each node."""


def describe_start(settings: Settings, nodes: int, *, fresh: bool = False, source: Path | None = None) -> str:
    """The resolved settings as YAML and, as its comments, the run and its processes. Changes nothing.

    fresh, source: see ``open_run``. Raises UserError as that.
    """
    run = open_run(settings, fresh=fresh, source=source, dry=True)
    run.close()
    lines = [*(run.notes or [f"run {display_path(run.folder)}"]), ""]
    for node in range(nodes):
        lines.append(f"node {node}: the launcher, and with its private folders WORK and BRIDGE")
        lines += [f"  {line}" for line in _processes(settings, run, node, nodes)]
    return resolved_yaml(settings) + "\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _processes(settings: Settings, run: OpenRun, node: int, nodes: int) -> Iterator[str]:
    """A line for each process of a node."""
    assignment = assign_node(settings, node, nodes)
    for index in assignment.engines:
        # Engines of the first node listen on a socket, others at an address that is chosen at the start.
        listen = ("ADDRESS", 0) if node else None
        command = engine_command(settings, index, engine_socket(_SPACE.work, index), listen=listen)
        if assignment.parts > 1:
            command += span_arguments(assignment.parts, assignment.part, ("ADDRESS", 0))
        gpus = assignment.gpus(settings, index)[: assignment.workers(settings)]
        on = f" (GPUs {', '.join(map(str, gpus))})" if settings.device == "cuda" else ""
        yield f"{assignment.log_name(index)}{on}: {shlex.join(command)}"
    if node == 0:
        workers = settings.rollout.workers
        yield f"sampler: {shlex.join(sampler_command(run.folder, _SPACE))}"
        yield f"  sampler workers: {workers if workers > 1 else 'one, in its process'}"
        yield f"  reward workers: {settings.reward.workers}"
    checkpoint = str(run.checkpoint) if run.checkpoint else None
    spec = NodeSpec(settings, run.folder, "", assignment)
    for name, command, _ in rank_starts(spec, _SPACE, checkpoint, "", 0):
        yield f"{name}: {shlex.join(command)}"
