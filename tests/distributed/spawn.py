"""Run a worker module in several processes joined over gloo, and hand back what rank 0 wrote."""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago.

    Below those that the kernel hands out: one of them may be another socket's before the ranks have started.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(worker: str, world: int, folder: Path, *args: str, timeout: float = 240) -> Any:
    """Run ``tests/distributed/<worker>.py FOLDER ARGS`` as ``world`` ranks; return FOLDER/result.json."""
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])),
    }
    logs = [folder / f"rank_{r}.log" for r in range(world)]
    ranks = []
    for r, log in enumerate(logs):
        env = {**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)}
        command = [sys.executable, str(HERE / f"{worker}.py"), str(folder), *args]
        with log.open("w") as out:
            ranks.append(subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        codes = [p.wait(timeout) for p in ranks]
    finally:
        for p in ranks:
            p.kill()
            p.wait()
    told = "\n".join(f"--- rank {r}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs))
    assert codes == [0] * world, told
    return json.loads(result.read_text())
