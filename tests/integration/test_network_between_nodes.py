"""Before a run on two nodes begins, its network is measured; a slow or dead one is a warning, never the end.

Why: a network that is slow without an error costs a part of every step, and a dead one is a hang of an
hour. Both whole launchers run here, as in ``test_launcher_nodes.py``, with stand-ins for engines, sampler and
ranks; the all-reduce is a real one, over gloo on loopback, where the measurement itself is the subject. Not
covered: NCCL, GPUs, two machines.
"""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.support.launcher import wait_for
from tests.support.launcher_pair import DRIVER, WELL, Pair

STAND_IN = """
from rpg_megatron.launcher import bandwidth
bandwidth.SECONDS = float(os.environ.get("PROBE_SECONDS", bandwidth.SECONDS))
bandwidth.probe_command = lambda rank, *_: [sys.executable, "-m", "stand_in_network", str(rank)]
"""


@pytest.fixture(name="pair")
def _pair(pair, tmp_path: Path):
    def make(network_1: str | None = None, **plan: str) -> Pair:
        """network_1: code at the start of the second node's stand-in; None: the real processes measure."""
        nodes = pair(**plan)
        if network_1 is not None:
            driver = DRIVER.replace("cli.main()", f"{STAND_IN}\ncli.main()")
            (tmp_path / "driver.py").write_text(driver)
            (tmp_path / "stand_in_network.py").write_text(
                f"import os, sys, stand_in\nif sys.argv[1] == '1': {network_1}\n"
                "stand_in.act('network_' + sys.argv[1])"
            )
        return nodes

    return make


def test_the_bandwidth_is_printed_and_too_low_a_one_warned_of(pair) -> None:
    nodes = pair(rank_0=WELL, rank_1=WELL)
    nodes.begin("cluster.min_bandwidth=1e6")
    nodes.go()
    assert nodes.finish() == [0, 0], nodes.logs()
    network, warning = re.findall(r"^(?:network|warning): .*", nodes.out(0), re.MULTILINE)
    measured = re.fullmatch(r"network: all-reduce over 2 nodes, gloo: (\d+\.\d) GB/s each", network)
    assert measured, nodes.out(0)
    assert warning.startswith(
        f"warning: the network is slow: {measured[1]} GB/s is below 1e+06 GB/s (cluster.min_bandwidth); set "
    )
    assert nodes.out(0).index(warning) < nodes.out(0).index("starting (takes")
    (log,) = nodes.folder.glob("runs/*/logs/launcher.log")
    assert (network in log.read_text(), warning in log.read_text()) == (True, True)


@pytest.mark.parametrize(
    ("network_1", "says"),
    [
        pytest.param(
            "sys.exit(print('error: no route to host') or 2)",
            r"node 1 \(.*\): no route to host",
            id="fails",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "os.kill(os.getpid(), 9)",
            r"node 1 \(.*\): its process was killed \(SIGKILL.*network_1\.log",
            id="is killed",
            marks=pytest.mark.long,
        ),
        pytest.param("pass", r"no answer within 1 s from node 0, node 1 \(", id="hangs"),
    ],
)
def test_a_measurement_that_fails_is_a_warning(
    pair, monkeypatch: pytest.MonkeyPatch, network_1: str, says: str
) -> None:
    if network_1 == "pass":
        monkeypatch.setenv("PROBE_SECONDS", "1")
    nodes = pair(network_1, rank_0=WELL, rank_1=WELL)
    for rank in (0, 1):
        nodes.start(rank, "cluster.min_bandwidth=1")
    started = {"engine_0", "engine_1", "rank_0", "rank_1", "sampler"}
    wait_for(lambda: started <= set(nodes.acted()), 60, nodes.logs)
    assert len(nodes.living()) == 2 * len(started)  # none of the measurement: it has freed the GPUs
    nodes.go()
    assert nodes.finish() == [0, 0], nodes.logs()
    (warning,) = re.findall(r"^warning: .*", nodes.out(0), re.MULTILINE)
    assert re.match(rf"warning: the all-reduce between the nodes failed, .*: {says}", warning), warning


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_measurement(pair, number: signal.Signals) -> None:
    nodes = pair("pass")
    for rank in (0, 1):
        nodes.start(rank, "cluster.min_bandwidth=1")
    wait_for(lambda: len(nodes.acted()) == 2, 60, nodes.logs)
    nodes.launchers[number == signal.SIGTERM].send_signal(number)
    assert nodes.finish() == ([130, 1] if number == signal.SIGINT else [75, 0]), nodes.logs()
    assert sorted(nodes.acted()) == ["network_0", "network_1"]
