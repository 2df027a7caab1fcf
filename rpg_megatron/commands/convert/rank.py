"""One process of a conversion: ``python -m rpg_megatron.commands.convert.rank``, started by ``processes.py``.

Standard input: the job, one line of JSON. Standard output: progress and reports, one JSON object per line.
Environment: RANK, WORLD_SIZE and RPG_RENDEZVOUS. Exits with code 0 when its part is done, with 2 and
``error: ...`` as the last line of standard error after a user error.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from typing import Any

import torch.distributed as dist

from rpg_megatron.commands.convert.processes import Job
from rpg_megatron.config.errors import UserError
from rpg_megatron.policy.device import start_device, start_process_group
from rpg_megatron.system.collectives import barrier


def report(**values: Any) -> None:
    """Report to the parent. Any thread may call it."""
    os.write(1, json.dumps(values).encode() + b"\n")


def main() -> None:
    """Run this rank's part of the job."""
    job = Job(**json.loads(sys.stdin.readline()))
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        start_process_group(start_device("cpu"))
        # Megatron may be imported only after the device is prepared.
        from rpg_megatron.commands.convert.convert import Conversion

        Conversion(job, report).run()
        barrier()
        dist.destroy_process_group()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # other ranks may hang in a collective; the parent ends them
    # Everything is written. Without os._exit, a library's thread that is still running when the interpreter
    # ends can abort the process ("terminate called without an active exception"); this has happened once.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
