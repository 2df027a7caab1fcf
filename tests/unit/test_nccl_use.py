"""What ranks say to each other outside NCCL, and how its process group is made.

Why: a rank that waits in NCCL for another one blocks the stream that its weights are copied on, and the other
waits for those. And a GPU stays idle where its rank waits in a kernel. Order on streams: test_stream_order.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.policy import device
from rpg_megatron.system.collectives import control_group
from rpg_megatron.training.preemption import Stopped, StopRequest
from rpg_megatron.training.weight_sync import WeightSync


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Refusing:
    """A publisher and a sampler that note the order in which they are asked."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def __getattr__(self, name: str):
        def note(*args: object, **kwargs: object) -> None:
            self.order.append(name)

        return note


def test_ranks_wait_for_rank_0_outside_nccl(alone, monkeypatch):
    """Sync, questions, sleep and stop: every word between ranks goes over the control group, in order."""
    asked = Refusing()
    control = control_group()
    assert dist.get_backend(control) == "single_rank"
    assert control is not dist.group.WORLD
    for name in (
        "broadcast",
        "all_gather",
        "gather",
        "barrier",
        "broadcast_object_list",
        "all_gather_object",
    ):
        real = getattr(dist, name)

        def noted(*args: object, real=real, name=name, group=None, **kwargs: object) -> object:
            asked.order.append(name if group is control else f"{name} on another group")
            return real(*args, group=group, **kwargs)

        monkeypatch.setattr(dist, name, noted)
    sent = ["broadcast", "broadcast"]  # the size, the bytes
    weight_sync = WeightSync(asked, None, StopRequest())
    weight_sync.sync(1)
    assert asked.order == ["publish", *sent, "retract"]
    asked.order.clear()
    weight_sync.call_with_resync(lambda sampler: None)
    weight_sync.sleep(2)
    weight_sync.wake()
    weight_sync.check_stop()
    assert asked.order == [*sent * 3, "all_gather", "all_gather"]


class Stopping(Refusing):
    """A sampler that a stop signal interrupts in its sync."""

    def sync(self, *args: object, **kwargs: object) -> None:
        raise Stopped


def test_a_stop_within_a_sync_stops_every_rank_and_takes_the_weights_back(alone):
    publisher = Refusing()
    publisher.publish = lambda version: publisher.order.append("publish") or SimpleNamespace(tensors={})
    with pytest.raises(Stopped):
        WeightSync(publisher, Stopping(), StopRequest()).sync(1)
    assert publisher.order == ["publish", "retract"]


def test_the_process_group_is_bound_to_no_device(monkeypatch):
    """A bound device has torch make a communicator for each of Megatron's groups at once."""
    given: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **k: given.update(k, backend=backend))
    monkeypatch.setattr(dist, "TCPStore", lambda *a, **k: dist.HashStore())
    monkeypatch.setattr(device, "control_group", lambda: given.update(control=True))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    device.start_process_group(torch.device("cuda", 0))
    assert given["backend"] == "nccl"
    assert "device_id" not in given
    assert given["control"]


def test_ranks_of_one_node_open_no_port(monkeypatch, tmp_path):
    """Torch's TCP store has no authentication; the launcher's work folder is accessible to its owner only."""
    given: dict[str, object] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **k: given.update(k))
    monkeypatch.setattr(dist, "TCPStore", lambda *a, **k: pytest.fail("a TCP store"))
    monkeypatch.setattr(device, "control_group", lambda: None)
    file = tmp_path / "rendezvous"
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "RPG_RENDEZVOUS": str(file)}.items():
        monkeypatch.setenv(name, value)
    device.start_process_group(torch.device("cpu"))
    assert isinstance(given["store"], dist.FileStore)
    given["store"].set("key", "value")
    assert file.is_file()
