"""What the ranks of a large job do before their first step and between each other (docs/evidence/scale.md).

The ranks are forked here and have no model: CPU seconds and descriptors are those of real ranks, waiting
times are not.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.setup import ROOT, Report, benchmark, main, python_path
from rpg_megatron.policy.device import start_process_group
from rpg_megatron.system import collectives
from rpg_megatron.system.collectives import (
    any_rank,
    barrier,
    control_group,
    gather_objects,
    gather_on_first,
    new_host_group,
    new_host_subgroup,
)
from tests.support.ranks import free_port

NODE = 8
"""Ranks of a node, and of a replica."""
AT_ONCE = 1 << 30
FAR = (512, 5120)
"""Ranks of a fit."""


@benchmark(ranks=(4, 8), calls=2)
def groups(
    report: Report, ranks: tuple[int, ...] = (16, 32, 64, 128, 256), at_once: int = 128, calls: int = 10
) -> None:
    """The process groups of a start, connected at once and lazily, and what an exchange in them costs.

    The groups of a run on CPUs: the default one, the control group, that of checkpoints and those of
    replicas of 8 ranks; on GPUs the first is NCCL's. Descriptors: what a rank opened since it began; a node
    has 8 ranks, rank 0 among them, which the others send to. at_once: the most ranks that are all connected,
    and that exchange something. fit: by the power of N through the last three rows; the node without rank 0.
    """
    few = [n for n in ranks if n <= at_once]
    measured = {}
    for way, mesh, counts in (
        ("connected at once", AT_ONCE, few),
        ("lazy above 32", collectives._LARGEST_MESH, ranks),
    ):
        measured[way] = [(n, _fork(n, mesh, calls if n <= at_once else 0)) for n in counts]
    columns = ("ranks|,", "CPU s of rank 0|.3f", "of all ranks|,.1f", "descriptors|,.0f", "of a node|,.0f")
    for way, results in measured.items():
        table = report.table(*columns, title=f"groups {way}")
        for n, everyone in results:
            spent, files = [r["start"] for r in everyone], [r["descriptors"] for r in everyone]
            table.row(n, spent[0], sum(spent), statistics.median(files), sum(sorted(files)[-NODE:]))
        if len(results) < 4:
            continue
        first = _fit([(n, everyone[0]["start"]) for n, everyone in results])
        total = _fit([(n, sum(rank["start"] for rank in everyone)) for n, everyone in results])
        files = _fit([(n, statistics.median(r["descriptors"] for r in everyone)) for n, everyone in results])
        for n in FAR:
            table.row(f"{n:,} (fit)", first(n), total(n), files(n), NODE * files(n))
    table = report.table(
        "ranks|,", *(f"{name}|.2f" for name in EXCHANGES), title="ms of CPU of a rank, one exchange"
    )
    for n, everyone in measured["lazy above 32"]:
        if n > at_once:
            break
        table.row(n, *(1e3 * statistics.median(r[name] for r in everyone) for name in EXCHANGES))


def _flag_by_all_reduce() -> None:
    flag = torch.zeros(1, dtype=torch.int32)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=control_group())


EXCHANGES: dict[str, Callable[[], object]] = {
    "flag, any_rank": lambda: any_rank(False),
    "flag, all_reduce": _flag_by_all_reduce,
    "flag, gather_objects": lambda: gather_objects(False, bool),
    "100 bytes to rank 0": lambda: gather_on_first("x" * 100, str),
    "barrier": barrier,
}


def _be_rank(calls: int) -> dict[str, Any]:
    """Start as a rank does; CPU seconds and descriptors."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before, start = _descriptors(), time.process_time()
    start_process_group(torch.device("cpu"))
    new_host_group()
    size = min(NODE, world)
    new_host_subgroup([list(range(first, first + size)) for first in range(0, world, size)])
    gather_on_first(rank, int)
    result: dict[str, Any] = {"start": time.process_time() - start, "descriptors": _descriptors() - before}
    for name, exchange in EXCHANGES.items() if calls else ():
        start = time.process_time()
        for _ in range(calls):
            exchange()
        result[name] = (time.process_time() - start) / calls
        barrier()
    return result


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def _fork(world: int, mesh: int, calls: int) -> list[dict[str, Any]]:
    """The results of all ranks, forked from this process."""
    os.environ |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    gc.collect()
    gc.freeze()
    with tempfile.TemporaryDirectory() as name:
        folder, running = Path(name), set[int]()
        try:
            for rank in range(world):
                pid = os.fork()
                if pid == 0:
                    _run_forked(folder, rank, mesh, calls)
                running.add(pid)
            while running:
                pid, status = os.wait()
                running.discard(pid)
                if status:
                    raise SystemExit(f"a rank ended with {os.waitstatus_to_exitcode(status)}")
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            for pid in running:
                os.waitpid(pid, 0)
        return [json.loads((folder / str(rank)).read_text()) for rank in range(world)]


def _run_forked(folder: Path, rank: int, mesh: int, calls: int) -> NoReturn:
    code = 1
    try:
        os.environ["RANK"] = str(rank)
        os.nice(19)  # hundreds of processes leave the machine usable
        torch.set_num_threads(1)
        collectives._LARGEST_MESH = mesh
        result = _be_rank(calls)
        (folder / str(rank)).write_text(json.dumps(result))
        barrier()  # rank 0 has the store that the others connect with
        code = 0
    finally:
        os._exit(code)


def _fit(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """The power of n through the last three points, by least squares of the logarithms."""
    n, y = np.log(np.array(points[-3:], float)).T
    power, factor = np.polyfit(n, y, 1)
    return lambda at: float(np.exp(factor) * at**power)


# -- imports -------------------------------------------------------------------------------------------------

_RANK = "import rpg_megatron.training.rank as rank{device}; import rpg_megatron.training.run"
_ENGINE = "import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.worker.cpu_worker"
STARTS = {
    "rank on a GPU": _RANK.format(device="; import megatron.core"),
    "rank on a CPU": _RANK.format(device="; rank.start_device('cpu')"),
    "sampler": "import rpg_megatron.rollout.sampler",
    "engine": _ENGINE,
}
COUNT = """
import json, sys, time
opened = []
sys.addaudithook(lambda event, arguments: event == "open" and opened.append(arguments[0]))
{start}
libraries = {{line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}}
print(json.dumps([len(sys.modules), len(opened), len(libraries), time.process_time()]), file=sys.stderr)
"""


@benchmark(repeat=1)
def imports(report: Report, repeat: int = 3) -> None:
    """Files that a process opens before it does anything, and CPU seconds of that."""
    table = report.table("process", "modules|,", "files opened by Python|,", "libraries|,", "CPU seconds|.1f")
    for name, start in STARTS.items():
        rows = []
        for _ in range(repeat):
            done = subprocess.run(
                [sys.executable, "-c", COUNT.format(start=start)],
                env=os.environ | python_path() | {"OMP_NUM_THREADS": "1"},
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                check=True,
            )
            rows.append(json.loads(done.stderr.splitlines()[-1]))
        table.row(name, *(statistics.median(column) for column in zip(*rows, strict=True)))


if __name__ == "__main__":
    main(__doc__, groups, imports)
