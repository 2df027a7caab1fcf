"""One trainer rank: ``python -m rpg_megatron.training.rank RUN_DIR WORK_DIR BRIDGE_DIR [JOB [CHECKPOINT]]``.

The launcher starts it. JOB is ``train`` (if it is missing), ``audit`` or ``replay``. Environment: RANK,
WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT as torch wants them; RPG_ENGINE_TOKEN on rank 0. Exits with 0
when the job is done, 2 with ``error: ...`` as its last line on a problem the user can mend, 75 when it was
asked to stop by SIGTERM or SIGUSR1 and has saved.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from rpg_megatron.config import UserError, load_settings
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.rollout.sampler_client import EVENTS
from rpg_megatron.system.collectives import barrier
from rpg_megatron.system.events import EventSender
from rpg_megatron.training.preemption import REQUEUE

if TYPE_CHECKING:
    from rpg_megatron.training.run import RankRun

_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""What a disk says that takes no more."""


def main() -> None:
    """Join the process group, build this rank's part of the run, train."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C reaches the launcher, which decides
    # What Megatron says of optional packages and of its own deprecations helps nobody who reads a rank's log.
    warnings.filterwarnings("ignore", module=r"megatron\.")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    run_dir, work, bridge = (Path(a) for a in sys.argv[1:4])
    job = sys.argv[4] if len(sys.argv) > 4 else "train"
    checkpoint = Path(sys.argv[5]) if len(sys.argv) > 5 else None
    token = os.environ.get("RPG_ENGINE_TOKEN", "")
    run: RankRun | None = None
    try:
        settings = load_settings(run_dir / "config.yaml")
        device = start_device(settings.device)
        start_process_group(device)
        # Megatron may be imported only when the device is prepared.
        from rpg_megatron.commands.audit.rank import audit
        from rpg_megatron.commands.replay.rank import replay
        from rpg_megatron.policy.model import start_mesh
        from rpg_megatron.training.loop import train
        from rpg_megatron.training.run import RankRun
        from rpg_megatron.training.trainer import Trainer

        mesh = start_mesh(settings.parallel)
        done = True
        if job == "replay":
            replay(Trainer(settings, mesh, device), run_dir, EventSender(work / EVENTS))
            barrier()
        else:
            run = RankRun(settings, run_dir, work, bridge, token, mesh, device, checkpoint)
            # Megatron collects garbage in every save, and what has been made up to here is none.
            gc.collect()
            gc.freeze()
            if job == "audit":
                audit(run, run_dir, work, bridge, token)
            else:
                done = train(run)
            barrier()
            run.close()
        dist.destroy_process_group()
        if not done:
            sys.exit(REQUEUE)
    except (UserError, OSError) as e:
        if isinstance(e, OSError) and e.errno not in _DISK:
            raise
        told = str(e)
        if run is not None:
            run.finish_saving(timeout=300)
        if isinstance(e, OSError):
            told = f"{run_dir} cannot be written ({e}); make room, then the same command goes on"
            if run is not None:
                run.warn(told)  # to the terminal: the log lies on the same disk, as a rule
        with suppress(OSError):
            print(f"error: {told}", file=sys.stderr, flush=True)
        # The other ranks wait in a collective that will never come; the launcher ends them.
        os._exit(2)


if __name__ == "__main__":
    main()
