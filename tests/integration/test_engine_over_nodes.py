"""An engine on two nodes serves the trainer's weights, and the death of either part is one failure of it.

Why: an engine whose workers on another node kept old weights, or were started anew alone, would hang or
sample nonsense. Two launchers on one machine are two nodes: each has folders of its own and one of the
engine's two workers. They join by TCP and compute by gloo, not in shared memory, whose name vLLM draws on
each node. Real ranks and engine in float32, weights sent as messages, five steps, and a worker killed on each
node; also adapters, and routes, which come from the first node alone. Proved: the log-probs of all steps are
the trainer's to 1e-4, before and after the restarts. Not covered: GPUs (so no NCCL), two machines, several
workers on a node.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import Command, read_proc_file
from tests.support.node_runs import Nodes
from tests.support.runs import QUICKSTART, QUICKSTART_MOE

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 5
MORE = [
    f"training.steps={STEPS}",
    "parallel={tensor: 1, data: 2}",
    "engine={replicas: 1, tensor: 2, max_sequences: 32, kv_cache_gib: 0.25, cpu_threads: 1}",
    "bridge.transport=process_group",
    "evaluation=null",
    "export.enabled=false",
    "checkpoint.every=null",
]


def worker_of(launcher: Command) -> int:
    """The engine's worker on this node, by its title."""
    (worker,) = [pid for pid in launcher.processes() if b"VLLM::Worker" in read_proc_file(pid, "cmdline")]
    return worker


def test_a_worker_killed_on_each_node(tmp_path: Path) -> None:
    run = Nodes(tmp_path, "two", 2, *MORE)
    first, second = run.launchers
    first.wait_for_output("engine 0 is up", 900)
    for step, (launcher, name) in enumerate([(second, "node 1"), (first, "node 0")], 1):
        first.wait_for_output(f"step {step}/", 900)
        os.kill(worker_of(launcher), signal.SIGKILL)
        first.wait_for_output(f"; it failed on {name}", 120)
        end = time.monotonic() + 900
        while first.out.read_text().count("engine 0 is up") <= step:
            assert time.monotonic() < end, first.out.read_text()
            time.sleep(0.2)
    run.end()
    out = first.out.read_text()
    assert re.search(
        r"warning: engine 0 .*; it failed on node 1 \(.*; restart 1 of 3; log: .*engine_0_part_1.log", out
    )
    assert re.search(r"warning: engine 0 .*; it failed on node 0; restart 2 of 3; log: .*engine_0.log", out)
    rows = run.rows()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert [row["sync/version"] for row in rows[1:]] == list(range(1, STEPS + 1))
    assert sum(row["engine/restarts"] for row in rows) == 2
    assert max(row["mismatch/logp_max"] for row in rows[1:]) <= 1e-4
    for name in ("engine_0", "engine_0_part_1"):
        assert "CPU SHM communicator disabled for group tp" in run.log(name)
        assert run.log(name).count("; restart ") == 2


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (QUICKSTART, ["lora={rank: 8, alpha: 16}"]),  # the workers of both nodes have slots of adapters
        (QUICKSTART_MOE, ["training.router_replay=rollout", "parallel={data: 2, expert: 2}"]),
    ],
    ids=["adapters", "routes"],
)
def test_adapters_and_replayed_routes(tmp_path: Path, config: Path, more: list[str]) -> None:
    run = Nodes(tmp_path, "two", 2, *MORE, *more, "training.steps=2", config=config).end()
    rows = run.rows()
    assert [row["sync/version"] for row in rows[1:]] == [1, 2]
    assert [row["engine/restarts"] for row in rows[1:]] == [0, 0]
    assert max(row["mismatch/logp_max"] for row in rows[1:]) <= 1e-4
    assert rows[1].get("routes/changed", 0) == 0
    assert ("routes/changed" in rows[1]) == (config == QUICKSTART_MOE)
