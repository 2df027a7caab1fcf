"""Environments of trainer ranks and engines: threads, hardware queues, the rendezvous, the token.

Why: nothing fails if these are wrong. It is only slow: an optimizer in host memory on one core, or messages
that wait for the matrix products that they should overlap with. Or other users of the node can listen. Not
covered: that it is fast (GPUs).
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rpg_megatron.bridge.transports import process_group_publisher
from rpg_megatron.config import load_settings
from rpg_megatron.config.rollout import BridgeSettings
from rpg_megatron.engine.command import engine_environment, engine_threads
from rpg_megatron.launcher.bandwidth import measure
from rpg_megatron.launcher.nodes import NodeAssignment, free_ports
from rpg_megatron.launcher.rank_env import NodeSpec, rank_starts
from rpg_megatron.launcher.scratch_dirs import Workspace
from rpg_megatron.policy import device
from rpg_megatron.policy.device import _open_store, bind_to_numa_node, start_device
from rpg_megatron.system.collectives import bind_stores
from rpg_megatron.training import batch_scatter
from rpg_megatron.training.weight_sync import open_publisher

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture
def environments(config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(96)))
    monkeypatch.delenv(CONNECTIONS, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")

    def make(*overrides: str, share: NodeAssignment | None = None) -> list[dict[str, str]]:
        settings = load_settings(config_file, ["device=cuda", "precision.dtype=bfloat16", *overrides])
        share = share or NodeAssignment(range(settings.parallel.world), range(0))
        spec = NodeSpec(settings, Path("run"), "token", share)
        starts = rank_starts(spec, Workspace(tmp_path, tmp_path), None, "127.0.0.1", 1)
        return [environment for _, _, environment in starts]

    return make


def test_an_optimizer_in_host_memory_has_the_nodes_cores(environments) -> None:
    data = ["parallel.data=8", "optimizer.distributed=true"]
    assert {e["OMP_NUM_THREADS"] for e in environments(*data)} == {"1"}
    off = [*data, "memory.offload_optimizer=1"]
    assert {e["OMP_NUM_THREADS"] for e in environments(*off)} == {"12"}
    # Cores are this node's, and so are the ranks that share them.
    second = environments(*off, share=NodeAssignment(range(4, 8), range(0)))
    assert [(e["RANK"], e["LOCAL_WORLD_SIZE"], e["OMP_NUM_THREADS"]) for e in second] == [
        (str(rank), "4", "24") for rank in range(4, 8)
    ]


def test_ranks_compile_kernels_in_their_own_process(environments, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's compiler would start 32 processes in each of the eight ranks of a node."""
    name = "TORCHINDUCTOR_COMPILE_THREADS"
    monkeypatch.delenv(name, raising=False)
    assert {e[name] for e in environments("parallel.data=8")} == {"1"}
    assert all(name not in e for e in environments("device=cpu"))
    monkeypatch.setenv(name, "4")
    assert {e[name] for e in environments("parallel.data=8")} == {"4"}


def test_engines_and_ranks_share_the_cores_of_a_cpu(environments, config_file: Path) -> None:
    """If they work at the same time: a product whose threads wait for a core takes several times as long."""
    cpu = ["device=cpu", "precision.dtype=float32", "parallel.data=2"]
    ahead = [*cpu, "rollout.ahead=1", "correction.type=truncate"]
    for settings, engine, rank in (
        (cpu, 96, 48),
        (ahead, 48, 24),
        ([*ahead, "engine.replicas=4"], 12, 24),
        ([*ahead, "engine.cpu_threads=20", "engine.replicas=2"], 20, 28),
        ([*ahead, "engine.cpu_threads=96"], 96, 1),
    ):
        assert engine_threads(load_settings(config_file, settings)) == engine
        assert {e["OMP_NUM_THREADS"] for e in environments(*settings)} == {str(rank)}


def test_the_ranks_of_each_of_two_nodes_take_its_gpus_in_turn(environments, monkeypatch) -> None:
    devices: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr(device, "bind_to_numa_node", lambda gpu: None)
    for node in range(2):
        share = NodeAssignment(range(4 * node, 4 * node + 4), range(0))
        for rank, environment in zip(share.ranks, environments("parallel.data=8", share=share), strict=True):
            variables = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
            assert variables == {"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": str(rank % 4)}
            monkeypatch.setenv("LOCAL_RANK", variables["LOCAL_RANK"])
            assert start_device("cuda") == torch.device("cuda", rank % 4)
    assert devices == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("node", "cpulist", "allowed", "bound"),
    [
        ("1", "2-3,6", {0, 1, 2, 6, 7}, {2, 6}),
        ("1", "8-15", {0, 1}, None),  # the job has none of its cores
        ("-1", "0-1", {0, 1}, None),
        (None, "0-1", {0, 1}, None),
    ],
)
def test_a_rank_runs_on_its_gpus_numa_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node: str | None,
    cpulist: str,
    allowed: set[int],
    bound: set[int] | None,
) -> None:
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x1B, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu: properties)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: allowed)
    set_to: list[frozenset[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: set_to.append(cores))
    for name, text in {
        "bus/pci/devices/0000:1b:00.0/numa_node": node,
        f"devices/system/node/node{node}/cpulist": cpulist,
    }.items():
        if text is not None and "node-1" not in name:
            (tmp_path / name).parent.mkdir(parents=True)
            (tmp_path / name).write_text(text + "\n")
    assert bind_to_numa_node(0, tmp_path) == bound
    assert set_to == ([] if bound is None else [bound])


def test_ranks_of_one_node_meet_in_a_private_file(config_file: Path, tmp_path: Path) -> None:
    settings = load_settings(config_file)

    def environment(address: str | None) -> dict[str, str]:
        share = NodeAssignment(range(1), range(0))
        spec = NodeSpec(settings, Path("run"), "token", share, address=address)
        return next(rank_starts(spec, Workspace(tmp_path, tmp_path), None, "10.0.0.1", 29500))[2]

    single, several = environment(None), environment("127.0.0.1")
    assert single["RPG_RENDEZVOUS"] == str(tmp_path / "rendezvous")
    assert "MASTER_PORT" not in single
    assert (several["MASTER_ADDR"], several["MASTER_PORT"]) == ("10.0.0.1", "29500")
    assert "RPG_RENDEZVOUS" not in several
    assert (single["GLOO_SOCKET_IFNAME"], several["GLOO_SOCKET_IFNAME"]) == ("lo", "lo")


def test_ranks_of_several_nodes_meet_at_one_address_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPG_RENDEZVOUS", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port := free_ports("127.0.0.1", 1)[0]))
    store = _open_store(0)
    addresses = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in addresses if address.port == port] == ["127.0.0.1"]
    del store


def test_the_workers_of_an_engine_on_several_nodes_meet_at_one_address_only(monkeypatch) -> None:
    """Torch's own rendezvous, which vLLM takes there."""
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "TCPStore", None)  # restored at the end
    bind_stores()
    (port,) = free_ports("127.0.0.1", 1)
    store, *_ = next(torch.distributed.rendezvous(f"tcp://127.0.0.1:{port}?world_size=1&rank=0"))
    addresses = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [address.ip for address in addresses if address.port == port] == ["127.0.0.1"]
    del store


def test_the_measurement_of_the_network_listens_at_one_address_only(monkeypatch) -> None:
    (port,), listening = free_ports("127.0.0.1", 1), []

    def look(*_: object, **__: object) -> None:
        connections = psutil.Process().net_connections("tcp")
        listening.extend(c.laddr for c in connections if c.status == psutil.CONN_LISTEN)
        raise RuntimeError("seen")

    monkeypatch.setattr(torch.distributed, "init_process_group", look)
    with pytest.raises(RuntimeError, match="seen"):
        measure(0, 1, "cpu", "127.0.0.1", port)
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_every_rank_has_the_token_from_its_environment_alone(config_file, tmp_path, monkeypatch) -> None:
    """Neither on a command line, which all users can read, nor over gloo, which has no authentication."""
    settings = load_settings(config_file, ["parallel.tensor=2"])
    spec = NodeSpec(settings, Path("run"), "0123abc", NodeAssignment(range(2), range(0)))
    starts = list(rank_starts(spec, Workspace(tmp_path, tmp_path), "checkpoint", "10.0.0.1", 29500))
    assert [environment["RPG_ENGINE_TOKEN"] for _, _, environment in starts] == ["0123abc", "0123abc"]
    assert not any("0123abc" in word for _, command, _ in starts for word in command)
    sent: list[Any] = []
    monkeypatch.setattr(batch_scatter, "broadcast_object", lambda value, kind: sent.append(value) or value)
    sampler, mesh = SimpleNamespace(addresses=lambda: ["ipc://a"]), SimpleNamespace(leads=False)
    batch_scatter.open_source(sampler, "0123abc", mesh, SimpleNamespace())  # type: ignore[arg-type]
    assert sent == [["ipc://a"]]


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_rank_takes_the_threads_that_it_is_given(threads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    monkeypatch.setattr(device, "bind_to_numa_node", lambda gpu: None)
    before = torch.get_num_threads()
    try:
        start_device("cuda")
        assert torch.get_num_threads() == int(threads)
    finally:
        torch.set_num_threads(before)


def test_ranks_that_cut_layers_have_one_queue_engines_have_all(
    environments, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [e.get(CONNECTIONS) for e in environments("parallel.data=2")] == [None, None]
    assert [e[CONNECTIONS] for e in environments("parallel.tensor=2")] == ["1", "1"]
    assert [e[CONNECTIONS] for e in environments("parallel.context=2")] == ["1", "1"]
    cpu = environments("device=cpu", "precision.dtype=float32", "parallel.tensor=2")
    assert [e.get(CONNECTIONS) for e in cpu] == [None, None]
    # What the user says holds for the ranks; engines never get it.
    monkeypatch.setenv(CONNECTIONS, "32")
    assert [e[CONNECTIONS] for e in environments("parallel.tensor=2")] == ["32", "32"]
    for overrides in (["parallel.tensor=2"], ["parallel.tensor=2", "engine.colocated=true"]):
        settings = load_settings(config_file, ["device=cuda", *overrides])
        assert CONNECTIONS not in engine_environment(settings, 0, tmp_path, "secret")


def test_the_links_store_is_a_private_folder_on_one_node(tmp_path, monkeypatch) -> None:
    stores: list[tuple[str, Path | None]] = []
    monkeypatch.setattr(
        process_group_publisher,
        "GroupPublisher",
        lambda address, *_, **options: stores.append((address, options["private"])),
    )
    for node_address in (None, "10.0.0.2"):
        monkeypatch.delenv("RPG_NODE_ADDRESS", raising=False)
        if node_address:
            monkeypatch.setenv("RPG_NODE_ADDRESS", node_address)
        settings = BridgeSettings(transport="process_group")
        open_publisher(settings, tmp_path, *[None] * 4, adopt=False)  # type: ignore[arg-type]
    assert stores == [("127.0.0.1", tmp_path), ("10.0.0.2", None)]
