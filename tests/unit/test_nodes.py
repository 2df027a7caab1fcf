"""A run's nodes and what each of them runs: from Slurm's environment, from options, from the settings.

Why: a launcher that takes an interactive shell for a cluster waits for nodes that never come, and one that
takes a cluster for a single node starts as many runs as there are nodes. Not covered: Slurm itself
(tests/integration/test_slurm.py), launchers that talk to each other (test_launcher_nodes.py).
"""

import dataclasses
import json
import os
import re
import socket
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from rpg_megatron.config import Settings, UserError, load_settings
from rpg_megatron.launcher import control_channel
from rpg_megatron.launcher.bandwidth import shortfall, start_measurement
from rpg_megatron.launcher.control_channel import (
    ControlChannel,
    NodeChannel,
    RendezvousServer,
    join,
    rendezvous_file,
)
from rpg_megatron.launcher.nodes import (
    NodeAssignment,
    Nodes,
    address_towards,
    assign_node,
    expand_hosts,
    find_nodes,
    free_ports,
    interface_of,
    own_address,
    transport_note,
)
from rpg_megatron.launcher.preflight import check_gpus
from tests.support.launcher import wait_for

STEP = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07]", ["n1", "n2", "n3", "n07"]),
        ("a,gpu[08-11]-ib,b[2]", ["a", "gpu08-ib", "gpu09-ib", "gpu10-ib", "gpu11-ib", "b2"]),
        ("", []),
    ],
)
def test_host_lists(listed: str, names: list[str]) -> None:
    assert expand_hosts(listed) == names


def test_a_step_of_several_nodes() -> None:
    nodes = find_nodes(None, None, None, STEP)
    assert nodes == Nodes(1, 2, "slurm-77-0-0", ("gpu07", "gpu08"))
    assert nodes.name(1) == "node 1 (gpu08)"
    restarted = find_nodes(None, None, None, STEP | {"SLURM_RESTART_COUNT": "1"})
    assert restarted.job != nodes.job  # files of an earlier start are not this one's


def test_an_allocation_alone_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    # salloc, or a batch script that starts the command without srun: there is no step.
    batch = {"SLURM_JOB_ID": "77", "SLURM_JOB_NUM_NODES": "2", "SLURM_NODEID": "0", "SLURM_NTASKS": "2"}
    assert find_nodes(None, None, None, batch) == Nodes()
    assert find_nodes(None, None, None, {}) == Nodes()
    assert (
        find_nodes(None, None, None, STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"})
        == Nodes()
    )
    # srun --pty bash: typed into its shell the command runs alone; started by srun from there it does not.
    shell = STEP | {"SLURM_PTY_PORT": "4000"}
    monkeypatch.setattr(os, "isatty", lambda _: True)
    assert find_nodes(None, None, None, shell) == Nodes()
    monkeypatch.setattr(os, "isatty", lambda _: False)
    assert find_nodes(None, None, None, shell).count == 2


def test_several_launchers_on_a_node_are_an_error() -> None:
    with pytest.raises(UserError, match=r"started 8 launchers on 2 nodes.*--ntasks-per-node=1"):
        find_nodes(None, None, None, STEP | {"SLURM_STEP_NUM_TASKS": "8"})


def test_options_win_and_are_checked() -> None:
    assert find_nodes(1, 3, "a", STEP) == Nodes(1, 3, "job-a")
    assert find_nodes(0, 1, None, STEP) == Nodes()
    for rank, count, job, message in (
        (None, 2, None, "--nodes and --node-rank go together"),
        (2, 2, None, "--node-rank 2 is not in 0 to 1"),
        (0, 2, "../x", "--job"),
    ):
        with pytest.raises(UserError, match=message):
            find_nodes(rank, count, job, {})


def shares(settings: Settings, count: int) -> list[NodeAssignment]:
    return [assign_node(settings, rank, count) for rank in range(count)]


def test_shares(config_file: Path) -> None:
    both = ["bridge.transport=process_group", "parallel.data=4", "engine.replicas=4", "engine.tensor=2"]
    assert shares(load_settings(config_file, both), 2) == [
        NodeAssignment(range(0, 2), range(0, 2)),
        NodeAssignment(range(2, 4), range(2, 4)),
    ]
    apart = load_settings(config_file, [*both, "cluster={trainer_nodes: 1, engine_nodes: 2}"])
    assert shares(apart, 3) == [
        NodeAssignment(range(0, 4), range(0)),
        NodeAssignment(range(0), range(0, 2)),
        NodeAssignment(range(0), range(2, 4)),
    ]
    assert [shares(apart, 3)[2].gpus(apart, engine) for engine in (2, 3)] == [[0, 1], [2, 3]]
    mixed = load_settings(config_file, [*both, "cluster.engine_nodes=1"])
    assert shares(mixed, 2)[1].gpus(mixed, 3) == [2 + 3 * 2, 2 + 3 * 2 + 1]
    assert shares(load_settings(config_file, both), 1) == [NodeAssignment(range(4), range(4))]


SPAN = ["bridge.transport=process_group", "parallel.data=8", "engine={replicas: 2, tensor: 16}"]


def test_engines_on_two_nodes_each(config_file: Path) -> None:
    """With fewer engines than nodes for them; each node has half of an engine's workers."""
    settings = load_settings(config_file, [*SPAN, "cluster={trainer_nodes: 1, engine_nodes: 4}"])
    assert shares(settings, 5) == [
        NodeAssignment(range(8), range(0), 0, 2),
        NodeAssignment(range(0), range(0, 1), 0, 2),
        NodeAssignment(range(0), range(0, 1), 1, 2),
        NodeAssignment(range(0), range(1, 2), 0, 2),
        NodeAssignment(range(0), range(1, 2), 1, 2),
    ]
    assert [share.gpus(settings, index) for share in shares(settings, 5) for index in share.engines] == [
        list(range(8))
    ] * 4
    assert [share.log_name(1) for share in shares(settings, 5)[3:]] == ["engine_1", "engine_1_part_1"]
    beside = shares(load_settings(config_file, [*SPAN, "engine.replicas=1"]), 2)
    assert beside == [NodeAssignment(range(4 * n, 4 * n + 4), range(1), n, 2) for n in (0, 1)]
    assert beside[1].gpus(settings, 0) == list(range(4, 12))


def test_an_engine_on_several_nodes_uses_all_that_ranks_leave(config_file, tmp_path, monkeypatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7; do echo GPU $i: H100; done\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    apart = [*SPAN, "device=cuda", "cluster={trainer_nodes: 1, engine_nodes: 2}", "engine.replicas=1"]
    settings = load_settings(config_file, apart)
    for node in range(3):
        check_gpus(settings, assign_node(settings, node, 3))
    for tensor, told in ((8, 4), (12, 6)):
        fewer = load_settings(config_file, [*apart, f"engine.tensor={tensor}"])
        message = (
            rf"is on 2 nodes .* uses {told} of the 8 GPUs .*; set engine.tensor to 16, or, .*engine_nodes"
        )
        with pytest.raises(UserError, match=message):
            check_gpus(fewer, assign_node(fewer, 2, 3))
    whole = load_settings(config_file, [*apart, "cluster.engine_nodes=1"])
    with pytest.raises(UserError, match=r"16 for the engines .* 8 are visible; .* span several nodes"):
        check_gpus(whole, assign_node(whole, 1, 2))


def test_colocated_engines_stay_with_the_ranks_of_their_node(config_file: Path) -> None:
    """Each on GPUs of its node's ranks; it sees the others too if it reads their memory."""
    on = ["device=cuda", "engine={colocated: true, replicas: 4, tensor: 2}", "parallel.tensor=2"]
    settings = load_settings(config_file, [*on, "parallel.data=4", "bridge.transport=cuda_ipc"])
    assert shares(settings, 2) == [
        NodeAssignment(range(0, 4), range(0, 2)),
        NodeAssignment(range(4, 8), range(2, 4)),
    ]
    for share in shares(settings, 2):
        gpus = [share.gpus(settings, engine) for engine in share.engines]
        assert gpus == [[0, 1, 2, 3], [2, 3, 0, 1]]
    sent = load_settings(config_file, [*on, "parallel.pipeline=4", "bridge.transport=process_group"])
    for share in shares(sent, 2):
        assert [share.gpus(sent, engine) for engine in share.engines] == [[0, 1], [2, 3]]
    # A note points out engines that could read weights on their own node, but get them sent.
    sends = load_settings(config_file, [*on, "parallel.data=4", "bridge.transport=process_group"])
    assert "bridge.transport=cuda_ipc" in str(transport_note(sends, 2))
    assert [transport_note(settings, 2), transport_note(sent, 2), transport_note(sends, 1)] == [None] * 3


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine={tensor: 4, replicas: 2}"],
            r"engine.tensor \(4\) is more than the 2 trainer ranks.* cannot span; .*colocated to f",
        ),
        (
            ["engine={tensor: 2, replicas: 4}", "parallel.data=3"],
            "2 engines of 2 workers per node .* share the GPUs.*3 trainer ranks; .*engine.replicas to 2",
        ),
        (["cluster.engine_nodes=1"], r"cluster.engine_nodes \(1\) conflicts with engine.colocated"),
        (["parallel={tensor: 4}"], r"cuda_ipc works within one node only, and the 2 trainer ranks of node 0"),
        (["parallel={pipeline: 2, data: 2}"], r"of node 0 hold only a part .* set it to process_group"),
        (["parallel={tensor: 1, data: 4, expert: 4}"], r"of node 0 hold only a part .*, expert 4\); set it"),
        (["parallel={tensor: 2, data: 2, expert: 2, expert_tensor: 2}"], r"of node 0 hold only a part"),
    ],
)
def test_colocated_engines_that_cannot_be(config_file: Path, overrides: list[str], message: str) -> None:
    fit = ["device=cuda", "bridge.transport=cuda_ipc", "parallel={tensor: 2, data: 2}", "engine.replicas=2"]
    settings = load_settings(config_file, [*fit, *overrides])
    engine = settings.engine.model_copy(update={"colocated": True})
    with pytest.raises(UserError, match=message):
        assign_node(settings.model_copy(update={"engine": engine}), 0, 2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["bridge.transport=shared_memory"], "works within one node only; on 2 nodes set it"),
        (["engine.replicas=3"], r"3 engines \(engine.replicas\) cannot be spread evenly over 2 nodes"),
        (
            ["engine={replicas: 1, tensor: 3}"],
            r"1 engines \(engine.replicas\) cannot be spread evenly over 2",
        ),
        (["parallel.data=1"], "1 trainer ranks .* cannot be spread evenly over 2 nodes"),
        (["cluster.trainer_nodes=3"], r"cluster.trainer_nodes \(3\) is more than the job's 2 nodes"),
    ],
)
def test_what_cannot_be_shared_out(config_file: Path, overrides: list[str], message: str) -> None:
    fit = ["bridge.transport=process_group", "parallel.data=2", "engine.replicas=2"]
    with pytest.raises(UserError, match=message):
        assign_node(load_settings(config_file, [*fit, *overrides]), 0, 2)


def test_nodes_without_work_are_an_error(config_file: Path) -> None:
    settings = load_settings(config_file, ["cluster={trainer_nodes: 1, engine_nodes: 1}"])
    with pytest.raises(UserError, match=r"leave 1 of the job's 3 nodes idle"):
        assign_node(settings, 0, 3)


def test_addresses() -> None:
    assert own_address("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"
    assert address_towards("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(UserError, match=r"cluster.interface: .* has no interface 'ib7'.*lo"):
        own_address("ib7")
    with pytest.raises(UserError, match=r"192.0.2.1 is not an address of"):
        interface_of("192.0.2.1")


# -- the rendezvous ------------------------------------------------------------------------------------------


@pytest.fixture
def settings(config_file: Path) -> Settings:
    return load_settings(config_file, ["cluster={interface: lo, join_timeout: 20}"])


def test_nodes_meet_though_strangers_knock(settings: Settings) -> None:
    host = RendezvousServer(settings, Nodes(0, 2, "job-x"))
    file = rendezvous_file(settings, Nodes(1, 2, "job-x"))
    try:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        endpoint = control_channel._read_endpoint(file)
        silent = socket.create_connection((endpoint.address, endpoint.port))  # says nothing, blocks nobody
        guess = dataclasses.replace(endpoint, token="a guess")
        stranger = ControlChannel(1, guess, settings.cluster.silence)
        stranger.send("join", nodes=2, host="stranger")
        assert not stranger.wait(1.0, host.pump)
        assert host.joined == {}

        results = []
        thread = threading.Thread(
            target=lambda: results.append(join(settings, Nodes(1, 2, "job-x"), lambda: None))
        )
        thread.start()
        thread.join(20)
        channel = results[0][0]
        channel.send("join", nodes=2, host="b")
        host.wait(lambda: None)
        assert host.joined[1]["host"] == "b"
        assert not file.exists()
        second = ControlChannel(1, endpoint, settings.cluster.silence)  # has the token, but comes too late
        second.send("rank", code=0)
        second.wait(1.0, host.pump)
        assert list(host.channels[1].receive()) == []
        host.channels[1].send("hello", word="x")
        assert wait_for_message(channel) == {"kind": "hello", "word": "x"}
        for other in (silent, stranger, second):
            other.close()

        def is_alone() -> bool:
            host.pump()
            return len(host.socket.open) == 1

        wait_for(is_alone, 20)
        channel.send("still here")
        assert wait_for_message(host.channels[1]) == {"kind": "still here"}
        assert host.channels[1].lost == ""
        host.close()
        while not channel.lost:
            list(channel.receive())
        assert channel.lost == "its launcher has exited"
        channel.close()
    finally:
        host.close()


def wait_for_message(channel: ControlChannel | NodeChannel) -> dict[str, Any]:
    while True:
        for message in channel.receive():
            return message
        assert not channel.lost


def test_a_rendezvous_file_that_others_can_read_is_refused(settings: Settings) -> None:
    host = RendezvousServer(settings, Nodes(0, 2, "job-x"))
    try:
        rendezvous_file(settings, Nodes(1, 2, "job-x")).chmod(0o640)
        with pytest.raises(UserError, match=r"holds a token and is not private .*mode 0640"):
            join(settings, Nodes(1, 2, "job-x"), lambda: None)
    finally:
        host.close()


def test_a_loopback_address_of_another_machine_is_explained(settings: Settings, monkeypatch) -> None:
    host = RendezvousServer(settings, Nodes(0, 2, "job-x"))
    try:
        monkeypatch.setattr(control_channel, "boot_id", lambda: "another")
        with pytest.raises(UserError, match=r"gives 127.0.0.1 as its address.*cluster.interface"):
            join(settings, Nodes(1, 2, "job-x"), lambda: None)
    finally:
        host.close()


def test_a_file_that_a_dead_start_left_is_waited_out(settings: Settings) -> None:
    host = RendezvousServer(settings, Nodes(0, 2, "job-x"))
    file = rendezvous_file(settings, Nodes(0, 2, "job-x"))
    stale = file.read_text()
    host.close()
    file.write_text(stale)
    file.chmod(0o600)
    short = settings.model_copy(update={"cluster": settings.cluster.model_copy(update={"join_timeout": 1.0})})
    with pytest.raises(UserError, match=r"node 0 was not found within 1 s .*no answer at 127.0.0.1"):
        join(short, Nodes(1, 2, "job-x"), lambda: None)


def test_files_of_killed_launchers_go_at_the_next_start(settings: Settings) -> None:
    """Files of running launchers, of machines that cannot be asked, and of other users stay."""
    alive = RendezvousServer(settings, Nodes(0, 2, "job-alive"))
    dead = RendezvousServer(settings, Nodes(0, 2, "job-dead"))
    living, killed = (rendezvous_file(settings, Nodes(0, 2, f"job-{name}")) for name in ("alive", "dead"))
    text = json.loads(killed.read_text())
    dead.close()
    folder = killed.parent
    elsewhere, old, open_to_all = (folder / f".meeting-{name}.json" for name in ("far", "old", "open"))
    facts = {
        killed: text,
        elsewhere: text | {"machine": "another"},  # whose loopback is not ours
        old: text | {"machine": "another"},
        open_to_all: text,
    }
    for file, content in facts.items():
        file.write_text(json.dumps(content))
        file.chmod(0o644 if file == open_to_all else 0o600)
    (folder / ".meeting-job.jsonab12").write_text("half")  # killed while it wrote
    for file in (old, folder / ".meeting-job.jsonab12"):
        os.utime(file, (1, 1))
    try:
        host = RendezvousServer(settings, Nodes(0, 2, "job-next"))
        new_file = rendezvous_file(settings, Nodes(0, 2, "job-next"))
        assert {file for file in folder.iterdir() if file.is_file()} == {
            living,
            elsewhere,
            open_to_all,
            new_file,
        }
        host.close()
        assert not new_file.exists()
    finally:
        alive.close()


def test_ports_lie_below_those_that_the_kernel_hands_out() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", free_ports("127.0.0.1", 1)[0]))
        ports = set(free_ports("127.0.0.1", 50))
        assert bound.getsockname()[1] not in ports
    assert all(15_000 <= port < 32_000 for port in ports)
    with pytest.raises(OSError, match="assign requested address"):
        free_ports("192.0.2.1", 1)


@pytest.mark.parametrize(
    ("card", "setting", "rate", "norm"),
    [
        ("NVIDIA H100 80GB HBM3", None, 24.9, "below 25 GB/s, half of the usual port for H100"),
        ("NVIDIA H100 80GB HBM3", None, 25.0, None),
        ("NVIDIA H200", None, 3.0, "below 25 GB/s, half of the usual port for H200"),
        ("NVIDIA A100-SXM4-80GB", None, 12.0, "below 12.5 GB/s, half of the usual port for A100"),
        ("NVIDIA GH200 120GB", None, 0.1, None),  # no H200
        ("NVIDIA L40S", None, 0.1, None),
        (None, None, 0.1, None),
        (None, 2.5, 2.4, "below 2.5 GB/s"),
        ("NVIDIA H100 80GB HBM3", 2.5, 3.0, None),
        ("NVIDIA H100 80GB HBM3", 40.0, 39.0, "below 40 GB/s"),
    ],
)
def test_the_norm_of_a_network_is_the_setting_or_the_cards(
    card: str | None, setting: float | None, rate: float, norm: str | None
) -> None:
    expected = norm and f"{norm} (cluster.min_bandwidth)"
    assert shortfall(rate, card, setting) == expected


def test_a_measurement_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^\[Errno \d+\] Cannot assign requested address"):
        start_measurement(("0", "1", "cpu", "192.0.2.1", "15000"), os.environ)
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(UserError, match=r"^its process ended with code 1$"):
        start_measurement((), os.environ)


def test_both_numbers_of_nodes_are_named(config_file: Path) -> None:
    """What the message says is accepted, and nodes hold about as many processes each."""
    fewer = ["bridge.transport=process_group", "parallel={tensor: 1, data: 12}", "engine.replicas=2"]
    told = r"set both cluster\.trainer_nodes=3 and cluster\.engine_nodes=1$"
    with pytest.raises(UserError, match=told) as e:
        assign_node(load_settings(config_file, fewer), 0, 4)
    both = re.findall(r"cluster\.\w+=\d", str(e.value))
    shares = [assign_node(load_settings(config_file, [*fewer, *both]), node, 4) for node in range(4)]
    assert [(len(share.ranks), len(share.engines)) for share in shares] == [(4, 0)] * 3 + [(0, 2)]
    without = load_settings(config_file, [*fewer, "parallel.data=3"])
    engine = without.engine.model_copy(update={"replicas": 0})
    with pytest.raises(UserError, match=r"nodes; change their number, or the number of nodes$"):
        assign_node(without.model_copy(update={"engine": engine}), 0, 4)
