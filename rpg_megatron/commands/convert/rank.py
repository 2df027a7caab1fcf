"""One process of a conversion: ``python -m rpg_megatron.commands.convert.rank``, started by ``convert.py``.

Standard input: the job, one line of JSON; afterwards it stays open for as long as the parent lives. Standard
output: what goes on, one JSON list a line. Environment: RANK and WORLD_SIZE. Exits with 0 when its part is
done, 2 with ``error: ...`` as the last line of standard error on a problem that the user can mend.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import warnings
from typing import Any

import torch.distributed as dist

from rpg_megatron.commands.convert.processes import Job
from rpg_megatron.config.errors import UserError
from rpg_megatron.policy.device import start_device
from rpg_megatron.system.collectives import barrier


def tell(*what: Any) -> None:
    """Report to the parent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def end_with_parent() -> None:
    """Leave at once when the parent is gone, however it went: its end of our standard input closes."""

    def wait() -> None:
        os.read(0, 1)  # not sys.stdin: its lock would be held when the interpreter ends
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """Do this rank's share of the job."""
    job = Job(**json.loads(sys.stdin.readline()))
    end_with_parent()
    warnings.filterwarnings("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    try:
        start_device("cpu")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{job.work}/rendezvous",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        # Megatron may be imported only when the device is prepared.
        from rpg_megatron.commands.convert.convert import Conversion

        Conversion(job, tell).run()
        barrier()
        dist.destroy_process_group()
    except UserError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        os._exit(2)  # the other ranks may wait in a collective that will never come; the parent ends them


if __name__ == "__main__":
    main()
