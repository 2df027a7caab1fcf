"""Run a function or a worker module in processes joined over gloo, or a module alone; return its result."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import multiprocessing.process
import os
import pickle
import random
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.multiprocessing

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago.

    Below the ephemeral ports: another socket could get one of those before the ranks have started.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def run_ranks(
    worker: str, world: int, folder: Path, *args: str, timeout: float = 240, fresh: bool = False
) -> Any:
    """Run the module ``worker`` with arguments FOLDER ARGS as ``world`` ranks; return FOLDER/result.json.

    Ranks are forked from a process that has imported Megatron, which saves most of their start. fresh: each
    is an interpreter of its own, for workers that measure memory or need a GPU.
    """
    result = folder / "result.json"
    result.unlink(missing_ok=True)
    codes, output = run_to_end(worker, world, folder, [str(folder), *args], timeout=timeout, fresh=fresh)
    assert codes == [0] * world, output
    return json.loads(result.read_text())


def run_to_end(
    worker: str,
    world: int,
    folder: Path,
    arguments: list[str],
    *,
    environment: Mapping[str, str] | None = None,
    timeout: float = 240,
    fresh: bool = False,
) -> tuple[list[int | None], str]:
    """Run a module as ``world`` ranks, as ``run_ranks`` does; their exit codes (None: none in time) and the
    ends of their logs, which go to ``folder``.
    """
    logs = [folder / f"rank_{r}.log" for r in range(world)]
    ranks: list[Any] = []
    start = _start_fresh if fresh else _start_forked
    for log, rank_environment in zip(logs, _environments(world), strict=True):
        ranks.append(start(worker, arguments, rank_environment | dict(environment or {}), log))
    end = time.monotonic() + timeout
    try:
        codes = [_wait(rank, end) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            _wait(rank, end + 60)
    output = "\n".join(f"--- rank {r}\n{log.read_text()[-3000:]}" for r, log in enumerate(logs))
    return codes, output


def ranks[T](world: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """The function runs on ``world`` forked ranks joined over gloo, and returns what it returns on rank 0.

    It must be on the top level of its module. Its first argument is a folder, in which the logs are. A call
    may have another number of ranks as ``world=`` and a time limit as ``timeout=``.
    """

    def decorate(function: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(function)
        def run(folder: Path, *arguments: Any, world: int = world, timeout: float = 240) -> T:
            (folder / "arguments.pkl").write_bytes(pickle.dumps(arguments))
            words = [function.__module__, function.__name__, str(folder)]
            codes, output = run_to_end(__name__, world, folder, words, timeout=timeout)
            assert codes == [0] * world, output
            return pickle.loads((folder / "result.pkl").read_bytes())

        return run

    return decorate


def _run_function(module: str, name: str, folder: Path) -> None:
    """What a rank of ``ranks`` does."""
    from rpg_megatron.policy.device import start_device, start_process_group  # slow; on ranks only

    start_process_group(start_device("cpu"))
    function = getattr(importlib.import_module(module), name).__wrapped__
    result = function(folder, *pickle.loads((folder / "arguments.pkl").read_bytes()))
    if torch.distributed.get_rank() == 0:
        (folder / "result.pkl").write_bytes(pickle.dumps(result))
    torch.distributed.destroy_process_group()


def run_alone(worker: str, folder: Path, *arguments: str, timeout: float = 400) -> Any:
    """Run the module ``worker`` in a process of its own, without other ranks; return FOLDER/result.json."""
    log = folder / f"{worker}.log"
    command = [sys.executable, "-m", worker, str(folder), *arguments]
    with log.open("w") as out:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=timeout,
            env={**os.environ, "PYTHONPATH": _python_path()},
        )
    assert done.returncode == 0, log.read_text()[-5000:]
    return json.loads((folder / "result.json").read_text())


def measure_cases(measure: Callable[[dict[str, Any], Path, torch.device], Any]) -> None:
    """Main function of a worker with arguments FOLDER [DEVICE]: measures each case of FOLDER/cases.json, on
    all ranks; rank 0 writes the results, by name, to FOLDER/result.json.
    """
    from rpg_megatron.policy.device import start_device, start_process_group  # slow; in workers only

    folder = Path(sys.argv[1])
    device = start_device(sys.argv[2] if len(sys.argv) > 2 else "cpu")
    start_process_group(device)
    cases = json.loads((folder / "cases.json").read_text())
    results = {name: measure(case, folder, device) for name, case in cases.items()}
    if torch.distributed.get_rank() == 0:
        (folder / "result.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


def start_ranks(worker: str, world: int, folder: Path) -> tuple[list[Any], TextIO]:
    """Start the module ``worker`` with argument FOLDER as ``world`` forked ranks, and return.

    Returns the processes and what rank 0 prints, as it arrives; it ends when the rank does.
    """
    logs = [folder / f"rank_{r}.log" for r in range(world)]
    logs[0].unlink(missing_ok=True)
    os.mkfifo(logs[0])
    started = [
        _start_forked(worker, [str(folder)], environment, log)
        for log, environment in zip(logs, _environments(world), strict=True)
    ]
    return started, logs[0].open()


def _environments(world: int) -> list[dict[str, str]]:
    shared = {
        "WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONPATH": _python_path(),
    }
    return [{**os.environ, **shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(world)]


def _python_path() -> str:
    """PYTHONPATH of a worker: modules of this repository are found from any folder."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _start_fresh(
    worker: str, arguments: list[str], environment: dict[str, str], log: Path
) -> subprocess.Popen[bytes]:
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", worker, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT
        )


def fork_server() -> Any:
    """Context of torch's multiprocessing whose processes are forked from one that has imported Megatron, and
    what test modules with functions under ``ranks`` import.
    """
    context = torch.multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rpg_megatron.training.run", "tests.support.layouts", "pytest"])
    return context


def _start_forked(
    worker: str, arguments: list[str], environment: dict[str, str], log: Path
) -> multiprocessing.process.BaseProcess:
    rank = fork_server().Process(target=_be_rank, args=(worker, arguments, environment, log))
    rank.start()
    return rank


def _be_rank(worker: str, arguments: list[str], environment: dict[str, str], log: Path) -> None:
    """What ``python -m WORKER ARGUMENTS`` does, in a forked process."""
    with log.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [worker, *arguments]
    torch.set_num_threads(1)
    gc.freeze()  # a collection would look through, and copy, all that the parent has imported
    runpy.run_module(worker, run_name="__main__", alter_sys=True)


def _wait(rank: Any, end: float) -> int | None:
    """Exit code of either kind of process; None if it still runs at ``end``."""
    remaining = max(0.0, end - time.monotonic())
    if not isinstance(rank, subprocess.Popen):
        rank.join(remaining)
        return rank.exitcode
    try:
        return rank.wait(remaining)
    except subprocess.TimeoutExpired:
        return None


if __name__ == "__main__":
    _run_function(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
