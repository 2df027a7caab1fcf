"""Which messages between ranks avoid NCCL, and how its process group is made.

Why: a rank that waits in NCCL for another one blocks the stream that its weights are copied on, and the other
waits for those. And a GPU stays idle while its rank waits in a kernel. Order on streams: test_stream_order.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.policy import device
from rpg_megatron.system import collectives
from rpg_megatron.system.collectives import control_group
from rpg_megatron.training.preemption import Stopped, StopRequest
from rpg_megatron.training.weight_sync import WeightSync
from tests.support.alone import alone


@pytest.fixture
def single_rank():
    """A process group of this process alone."""
    with alone():
        yield


class Recorder:
    """A publisher and a sampler that record the order of calls."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __getattr__(self, name: str):
        def note(*args: object, **kwargs: object) -> None:
            self.order.append(name)

        return note


def test_ranks_wait_for_rank_0_outside_nccl(single_rank, monkeypatch):
    """Sync, requests, sleep and stop: all messages between ranks use the control group, in order."""
    recorder = Recorder()
    control = control_group()
    assert dist.get_backend(control) == "single_rank"
    assert control is not dist.group.WORLD
    functions = [
        (dist, name)
        for name in (
            "broadcast",
            "all_gather",
            "gather",
            "barrier",
            "broadcast_object_list",
            "all_gather_object",
        )
    ]
    for module, name in (*functions, (collectives, "max_over_ranks")):
        real = getattr(module, name)

        default = control if module is collectives else None

        def noted(*args: object, real=real, name=name, group=default, **kwargs: object) -> object:
            recorder.order.append(name if group is control else f"{name} on another group")
            return real(*args, group=group, **kwargs)

        monkeypatch.setattr(module, name, noted)
    sent = ["broadcast", "broadcast"]  # the size, the bytes
    weight_sync = WeightSync(recorder, None, StopRequest())
    weight_sync.sync(1)
    assert recorder.order == ["publish", *sent, "retract"]
    recorder.order.clear()
    weight_sync.call_with_resync(lambda sampler: None)
    weight_sync.sleep(2)
    weight_sync.wake()
    weight_sync.check_stop()
    assert recorder.order == [*sent * 3, "max_over_ranks"]


class Stopping(Recorder):
    """A sampler that a stop signal interrupts in its sync."""

    def sync(self, *args: object, **kwargs: object) -> None:
        raise Stopped


def test_a_stop_within_a_sync_stops_all_ranks_and_retracts(single_rank):
    publisher = Recorder()
    publisher.publish = lambda version, only: publisher.order.append("publish") or SimpleNamespace(tensors={})
    with pytest.raises(Stopped):
        WeightSync(publisher, Stopping(), StopRequest()).sync(1)
    assert publisher.order == ["publish", "retract"]


def test_the_process_group_is_bound_to_no_device(monkeypatch):
    """A bound device has torch make a communicator for each of Megatron's groups at once."""
    arguments: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **k: arguments.update(k, backend=backend))
    monkeypatch.setattr(dist, "TCPStore", lambda *a, **k: dist.HashStore())
    monkeypatch.setattr(device, "control_group", lambda: arguments.update(control=True))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    device.start_process_group(torch.device("cuda", 0))
    assert arguments["backend"] == "nccl"
    assert "device_id" not in arguments
    assert arguments["control"]


def test_ranks_of_one_node_open_no_port(monkeypatch, tmp_path):
    """Torch's TCP store has no authentication; the launcher's work folder is accessible to its owner only."""
    arguments: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **k: arguments.update(k))
    monkeypatch.setattr(dist, "TCPStore", lambda *a, **k: pytest.fail("a TCP store"))
    monkeypatch.setattr(device, "control_group", lambda: None)
    file = tmp_path / "rendezvous"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "RPG_RENDEZVOUS": str(file)}.items():
        monkeypatch.setenv(name, value)
    device.start_process_group(torch.device("cpu"))
    assert isinstance(arguments["store"], dist.FileStore)
    arguments["store"].set("key", "value")
    assert file.is_file()
