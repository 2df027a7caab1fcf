"""Colocated engines on two nodes give, bit for bit, what they give on one.

Why: an engine that missed the request to sleep, or that has the weights of another step, samples
on without an error. Two launchers on one machine are two nodes: each has folders, a trainer rank and an
engine of its own; the second engine is reached over TCP, and no node reads the other's memory. Proved with
real ranks and engines in fp32, two steps with a checkpoint after each, against a run on one node with the
same layout: rollouts, metrics and final weights are the same bits; all engines sleep and wake as often.
Weights travel in shared memory within each node, where each holds all of them, and by messages: from ranks of
both nodes, where each holds half, and from the node's own rank, where that holds all. An engine of the second
node that hangs is restarted there, and the run is the same. Not covered: GPUs (so no CUDA IPC, no NCCL), two
machines.
"""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.commands import read_proc_file
from tests.support.node_runs import Nodes
from tests.support.runs import assert_same, find_core

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

STEPS = 2
MORE = [
    f"training.steps={STEPS}",
    "evaluation.every=1",
    "engine={colocated: true, replicas: 2, max_sequences: 32, kv_cache_gib: 0.25}",
    "checkpoint={every: 1, keep: 1}",
]
CUT, WHOLE = ["parallel.tensor=2"], ["parallel.tensor=1", "parallel.data=2"]


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("one")

    @functools.cache
    def run(*layout: str) -> Nodes:
        return Nodes(folder, re.sub(r"\W", "-", layout[-1]), 1, *MORE, *layout).end()

    return run


@pytest.mark.parametrize(
    ("layout", "transport"), [(WHOLE, "shared_memory"), (CUT, "process_group"), (WHOLE, "process_group")]
)
def test_two_nodes_are_one(tmp_path: Path, on_one_node, layout: list[str], transport: str) -> None:
    run = Nodes(tmp_path, "two", 2, *MORE, *layout, f"bridge.transport={transport}").end()
    assert_same(run, on_one_node(*layout), STEPS)
    out = run.launchers[0].out.read_text()
    assert re.search(r"engine \d is up.*engines sleep; the trainer ranks build", out, re.DOTALL)
    for index in (0, 1):
        log = run.log(f"engine_{index}")
        for tags in ("['weights']", "['kv_cache']"):
            assert log.count(f"seconds to wake up tags {tags}.") == STEPS + 1
        # At the start, before each update, and twice for each checkpoint, in which it sleeps and wakes.
        assert log.count("sleep mode is not supported on CPU") >= 1 + STEPS + 2 * STEPS
    assert all(row["mismatch/logp_max"] < 1e-3 for row in run.rows()[1:])


def test_a_core_that_hangs_on_the_other_node(
    tmp_path: Path, on_one_node, capsys: pytest.CaptureFixture[str]
) -> None:
    """Detected from the first node, restarted on its own node; the other engine takes over its work."""
    run = Nodes(
        tmp_path, "hung", 2, *MORE, *WHOLE, "bridge.transport=shared_memory", "engine.health_timeout=30"
    )
    first, second = run.launchers
    first.wait_for_output("engine 1 is up", 900)
    (server,) = [pid for pid in second.processes() if is_server(pid)]
    core = find_core(server)
    first.wait_for_output("step 0/", 600)  # now the first rollout begins
    began = time.monotonic()
    os.kill(core, signal.SIGSTOP)
    first.wait_for_output("engine 1 hangs: its core did not answer for 30 s (engine.health_timeout)", 300)
    noticed = time.monotonic() - began
    run.end()
    with capsys.disabled():
        print(f"\nhung on the other node: noticed after {noticed:.0f} s")
    assert sum(row["engine/restarts"] for row in run.rows()) == 1
    assert_same(run, on_one_node(*WHOLE), STEPS)


def is_server(pid: int) -> bool:
    return b"rpg_megatron.engine.server" in read_proc_file(pid, "cmdline")
