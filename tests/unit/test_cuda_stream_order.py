"""Ranks that wait leave their GPU idle, and weights are sent on streams that wait for nobody else's.

Two GPUs with NCCL would show it by not hanging. Here the real code runs on a CPU, with stand-ins for torch's
stream functions, which write down on which stream each message was sent. The order is put into a model of
streams: one queue each, whose first operation runs when what it needs is done. Not covered: CUDA itself.
"""

import contextlib
import threading

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.bridge.transports.process_group_link import Link
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy import device
from rpg_megatron.system.collectives import control_group
from rpg_megatron.training.preemption import StopRequest
from rpg_megatron.training.weight_sync import WeightSync
from tests.support.megatron_shards import grid, stage_values
from tests.support.tiny_models import random_state_dict, tiny_shape

SHAPE = tiny_shape(tied_embeddings=True)
LAYOUT = mapping_for(SHAPE)


def ends(queues: dict[str, list[tuple[str, str | None]]]) -> bool:
    """Whether everything gets done: stream -> its operations in order, each (name, what it needs or None)."""
    done: set[str] = set()
    left = {stream: list(operations) for stream, operations in queues.items()}
    while any(left.values()):
        ready = [q for q in left.values() if q and (q[0][1] is None or q[0][1] in done)]
        if not ready:
            return False
        done.update(q.pop(0)[0] for q in ready)
    return True


def sync(waits_on: str, copies_on: str) -> dict[str, list[tuple[str, str | None]]]:
    """Rank 1 in a sync: it waits for rank 0's word, which comes when rank 1's thread has sent its weights."""
    queues: dict[str, list[tuple[str, str | None]]] = {"default": []}
    queues.setdefault(waits_on, []).append(("hears rank 0", "rank 0 speaks"))
    queues.setdefault(copies_on, []).append(("weights are sent", None))
    return queues | {"rank 0": [("rank 0 speaks", "weights are sent")]}


def test_the_model_hangs_where_a_gpu_does():
    """Waiting in NCCL on the stream that the copies queue on as well; either mend alone is enough."""
    assert not ends(sync("default", "default"))
    assert ends(sync("default", "link"))
    assert ends(sync("host", "default"))
    assert ends(sync("host", "link"))


@pytest.fixture
def alone():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Streams:
    """Stands in for ``torch.cuda``'s streams: which is current in which thread, what happened on it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, str]] = []
        self._made = 0
        self._current = threading.local()
        streams = self

        class Stream:
            def __init__(self, device: object = None) -> None:
                streams._made += 1
                self.name = f"stream {streams._made}"

            def wait_event(self, event: str) -> None:
                streams.events.append((self.name, f"waits for {event}"))

        class Default:
            def record_event(self) -> str:
                streams.events.append((streams.current, "published"))
                return "published"

        @contextlib.contextmanager
        def use(stream: Stream):
            before, self._current.name = self.current, stream.name
            yield
            self._current.name = before

        for name, value in {
            "Stream": Stream,
            "stream": use,
            "current_stream": lambda device: Default(),
            "set_device": lambda device: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        send = Link.send

        def noted(link: Link, message: torch.Tensor) -> object:
            self.events.append((self.current, f"sends {message.numel()}"))
            return send(link, message)

        monkeypatch.setattr(Link, "send", noted)
        monkeypatch.setattr(Link, "buffer", lambda link, n: torch.empty(n, dtype=torch.uint8))

    @property
    def current(self) -> str:
        return getattr(self._current, "name", "default")


def test_each_link_sends_on_a_stream_of_its_own(alone, monkeypatch):
    """Two workers, two versions: no message on the default stream, none before the weights are there."""
    (place,) = grid(SHAPE, 1, 1, vocab_multiple=16)
    params = stage_values(LAYOUT, place, 1, random_state_dict(LAYOUT))
    publisher = GroupPublisher(
        "127.0.0.1", place, params, LAYOUT, torch.float32, timeout=20.0, bucket_bytes=4000
    )
    streams = Streams(monkeypatch)
    publisher._device = torch.device("cuda", 0)  # where it would be; the parameters stay here
    readers = [GroupReader(torch.device("cpu")) for _ in range(2)]
    wanted = [(name, Box.whole(shape)) for name, shape in LAYOUT.hf_tensors().items()]
    for version in range(2):
        manifest = publisher.publish(version)
        for reader in readers:
            reader.open(manifest.place, version)
            assert reader.check(wanted) == {}
            reader.begin()
            for name, box in wanted:
                for part, _ in reader.cut(name, box):
                    part.clone()
            reader.end()
        publisher.retract()
    publisher.close()
    senders = {stream for stream, what in streams.events if what.startswith("sends")}
    assert len(senders) == 2
    assert "default" not in senders
    for stream in senders:
        happened = [what for where, what in streams.events if where == stream]
        sent = [i for i, what in enumerate(happened) if what.startswith("sends")]
        assert happened[0] == "waits for published"
        assert len(sent) > 4, "a greeting and several buckets, twice"
        assert ends(sync("host", stream))


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
