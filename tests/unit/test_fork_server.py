"""What workers of a fork server can still do when its parent has gone.

Why: a worker that must remove what it has made is otherwise killed with its server, and leaves it. Not
covered: code that users import (test_reward_pool), verifiers (tests/integration/test_verifiers.py).
"""

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.system.fork_server import Serve, send_line
from rpg_megatron.system.forked_workers import ForkServer, Loader
from tests.support.launcher import living, wait_for


def load_slow_cleaner(folder: str, grace: float) -> tuple[Serve, dict[str, Any]]:
    """A worker that takes a second to remove what it has made, once its connection is closed."""

    def serve(connection: socket.socket) -> None:
        Path(folder, "made").touch()
        send_line(connection, os.getpid())
        while connection.recv(100):
            pass
        time.sleep(1)
        Path(folder, "made").unlink()

    return serve, {"deadline": 1.0, "grace": grace}


@pytest.mark.parametrize("grace", [0.0, 30.0])
def test_a_worker_has_the_grace_of_its_description(tmp_path: Path, grace: float) -> None:
    path = "tests.unit.test_fork_server:load_slow_cleaner"
    server = ForkServer(Loader(path, {"folder": str(tmp_path), "grace": grace}, path))
    worker = server.fork()
    assert server._process is not None
    process, control = server._process
    worker.connection.close()
    control.close()  # as if this process had been killed
    assert process.wait(60) == 0
    wait_for(lambda: not living([worker.pid]), 30)
    server.remove(worker)
    assert (tmp_path / "made").exists() == (grace == 0)
