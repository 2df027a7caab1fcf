"""``rpg-megatron doctor``."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import partial

from rpg_megatron.checkpoints.hf_hub import with_local_model
from rpg_megatron.commands.console import table_console
from rpg_megatron.commands.doctor import gpu, machine, network, packages, run_inputs
from rpg_megatron.commands.doctor.probe import Probe, Subject, run_probes
from rpg_megatron.commands.doctor.table import failures, print_checks, to_json
from rpg_megatron.config import Settings, UserError, read_model_shape
from rpg_megatron.launcher import bandwidth
from rpg_megatron.launcher.checks import CHECKS
from rpg_megatron.launcher.nodes import own_host

PROBES: list[tuple[str, float, Probe]] = [
    ("python", 10, packages.probe_python),
    ("versions", 30, packages.probe_packages),
    ("torch import", packages.IMPORT_SECONDS + 5, gpu.probe_torch),
    ("optional packages", 10, packages.probe_optional),
    ("driver", 30, gpu.probe_gpus),
    ("memory", 10, machine.probe_memory),
    ("foreign input", 30, machine.probe_foreign_input),
    ("sandboxes", 30, machine.probe_sandboxes),
    ("temporary files", 10, machine.probe_temporary),
    ("clock", 20, machine.probe_clock),
    ("walltime", 20, machine.probe_walltime),
    (network.NAME, bandwidth.SECONDS, network.probe_network),
    *((check.name, check.seconds, partial(run_inputs.probe_check, check)) for check in CHECKS),
    ("run folder", 30, run_inputs.probe_run_folder),
    ("secrets", 10, run_inputs.probe_secrets),
]
"""Name, timeout in seconds, function; in the order of the report."""
_WIDTH = 120
"""Columns of the table in a pipe or file."""


def run_doctor(settings: Settings | None, *, as_json: bool) -> bool:
    """Check this machine or, as a task of ``srun``, this node; returns whether all checks passed.

    Each of several nodes prints its own name, and what is wrong with it.
    """
    shape = None
    if settings is not None:
        with suppress(UserError):  # reported by the probe of the model
            settings = with_local_model(settings)
            shape = read_model_shape(settings.model.path)
    checks = run_probes(PROBES, Subject(settings, shape))
    node = own_host()
    several = "SLURM_STEP_ID" in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
    if as_json:
        print(to_json(checks, node))
    else:
        print_checks(checks, table_console(_WIDTH), node if several else None)
    return not failures(checks)
