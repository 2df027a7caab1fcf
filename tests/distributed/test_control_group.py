"""Ranks exchange plain values that run no code, and a rank alone has no open port.

Why: torch's object collectives unpickle what arrives over gloo, which has no authentication, and gloo opens
ports, which any user of the node can fill with connections. Proved, with Megatron's groups and our own:
values of all kinds arrive as they were sent, bit for bit; a pickle in their place is an error that names the
rank, and is not read; a rank alone listens on no port, another on one for all of its groups. Not covered:
the plan of a save, which Megatron exchanges as pickles, and NCCL.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.ranks import run_to_end


def run(world: int, folder: Path) -> Any:
    environment = {"RPG_RENDEZVOUS": str(folder / "rendezvous")}
    worker = "tests.distributed.control_worker"
    codes, output = run_to_end(worker, world, folder, [str(folder)], environment=environment)
    assert codes[0] == 0, output
    return json.loads((folder / "result.json").read_text())


def test_a_rank_alone_listens_on_no_port(tmp_path: Path) -> None:
    result = run(1, tmp_path)
    assert result["ports"] == [0]
    assert result["same"] == [True]
    assert result["traces"]


def test_ranks_exchange_values_and_read_no_pickles(tmp_path: Path) -> None:
    result = run(2, tmp_path)
    assert result["ports"] == [1, 1], "one port for all groups, as docs/security.md says"
    assert result["same"] == [True, True]
    assert result["said"].startswith("what rank 1 sent to the other ranks cannot be read: ")
    assert not result["touched"]
