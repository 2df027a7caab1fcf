"""The process of one trainer rank.

``python -m rpg_megatron.training.rank RUN_DIR WORK_DIR BRIDGE_DIR [CHECKPOINT]``, started by the launcher.
Environment: RANK, WORLD_SIZE, LOCAL_RANK as for torchrun, or RPG_RANK_LOGS for a process that forks all ranks
(``system/forked_ranks.py``); RPG_RENDEZVOUS, or MASTER_ADDR and MASTER_PORT (``policy/device.py``);
RPG_ENGINE_TOKEN on rank 0. Exit codes: 0 when training is done; 2 for a user error, with ``error: ...`` as
the last line; 75 after SIGTERM or SIGUSR1, when the state is saved.

``audit`` and ``replay`` have rank modules of their own, which use ``run_rank`` too.
"""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.config.cluster import ENGINES_START, RANK_LOGS_VARIABLE
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.system.collectives import barrier
from rpg_megatron.system.forked_ranks import STATUS, fork_ranks
from rpg_megatron.system.parent_death import set_process_name
from rpg_megatron.training.preemption import REQUEUE
from rpg_megatron.training.trackers.client import exit_past_trackers

if TYPE_CHECKING:
    from rpg_megatron.policy.model import Mesh
    from rpg_megatron.training.run import RankRun

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Errors of a full or read-only disk."""


@dataclass
class RankProcess:
    """Settings, folders, mesh and device of a rank whose process group is initialised."""

    settings: Settings
    run_dir: Path
    work: Path
    bridge: Path
    token: str
    mesh: Mesh
    device: torch.device
    run: RankRun | None = field(default=None, init=False)

    def start_run[R: RankRun](self, kind: type[R], checkpoint: Path | None = None) -> R:
        """Build this rank's part of a run: model, optimizer, connection to the engines. Collective.

        Waits while colocated engines start, which need the whole GPU. The launcher ends it if they fail.
        """
        if self.settings.engine.colocated:
            while self.mesh.rank == 0 and (self.work / ENGINES_START).exists():
                time.sleep(0.1)
            barrier()
        self.run = run = kind(
            self.settings,
            self.run_dir,
            self.work,
            self.bridge,
            self.token,
            self.mesh,
            self.device,
            checkpoint,
        )
        # Megatron collects garbage in every save. Objects created so far live as long as the process.
        gc.collect()
        gc.freeze()
        return run


def run_rank(job: Callable[[RankProcess], bool | None]) -> None:
    """Join the process group, run the job, and exit with a code of the module's docstring.

    job: must not import Megatron before it is called, because the device is set up first. Returns False if a
    signal stopped it and its state is saved.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher handles Ctrl-C
    # Megatron's warnings about optional packages and its own deprecations do not help users.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    run_dir, work, bridge = (Path(a) for a in sys.argv[1:4])
    rank: RankProcess | None = None
    try:
        settings = load_settings(run_dir / "config.yaml")
        device = start_device(settings.device)
        if (logs := os.environ.get(RANK_LOGS_VARIABLE)) is not None:
            _fork_ranks(Path(logs), work)
        set_process_name(f"rank_{os.environ['RANK']}")
        start_process_group(device)
        from rpg_megatron.policy.model import start_mesh

        token = os.environ.get("RPG_ENGINE_TOKEN", "")
        rank = RankProcess(settings, run_dir, work, bridge, token, start_mesh(settings.parallel), device)
        done = job(rank)
        barrier()
        if rank.run is not None:
            rank.run.close()
        dist.destroy_process_group()
        if done is False:
            sys.exit(REQUEUE)
    except (UserError, OSError) as e:
        if isinstance(e, OSError) and e.errno not in _DISK_FULL:
            raise
        message = str(e)
        run = rank.run if rank else None
        if run is not None:
            run.finish_own_saving(timeout=300)
        if isinstance(e, OSError):
            message = (
                f"{run_dir} cannot be written ({e}); free disk space, then rerun the same command to resume"
            )
            if run is not None:
                run.events.warn(message)  # to the terminal: the log is usually on the same disk
        with suppress(OSError):
            print(f"error: {message}", file=sys.stderr, flush=True)
        # The other ranks wait in a collective that this rank does not join; the launcher ends them.
        os._exit(2)
    finally:
        exit_past_trackers()


def _fork_ranks(logs: Path, work: Path) -> None:
    """Import what ranks need, then become each of them. Only on a CPU."""
    importlib.import_module("rpg_megatron.training.loop")
    rank = str(fork_ranks(logs, int(os.environ["WORLD_SIZE"]), work / STATUS))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank}


def _train(rank: RankProcess) -> bool:
    from rpg_megatron.training import loop, sft
    from rpg_megatron.training.run import RankRun

    checkpoint = Path(sys.argv[4]) if len(sys.argv) > 4 else None
    if rank.settings.sft is not None:
        return sft.train(rank.start_run(RankRun, checkpoint))
    return loop.train(rank.start_run(RankRun, checkpoint))


if __name__ == "__main__":
    run_rank(_train)
