"""Data-parallel replicas share the sending of weights; links are made together; no process polls the store.

Real gloo ranks with shards cut by other means than the layouts (``megatron_shards``), which count the bytes
that they send; the engines' workers are readers in the test's process. Not covered: vLLM (tests/integration),
NCCL.
"""

import os
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.controller import compare_checksums
from rpg_megatron.bridge.slice_table import TableCache
from rpg_megatron.bridge.transports import folder_store, process_group_reader
from rpg_megatron.bridge.transports.folder_store import FolderStore
from rpg_megatron.bridge.transports.mapped_reader import Copies
from rpg_megatron.bridge.transports.process_group_link import Link, Rendezvous
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.bridge.vllm.sync_route import sum_acks
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_trainers import PublishingRanks
from tests.support.launcher import LIMIT, wait_for
from tests.support.megatron_shards import grid, stage_shapes, stage_values
from tests.support.sockets import listening_ports
from tests.support.tiny_models import random_state_dict, tiny_shape

SHAPE = tiny_shape(tied_embeddings=True)
LAYOUT = mapping_for(SHAPE)
WORKERS = 2
NORM = "decoder.layers.0.pre_mlp_layernorm.weight"


def _rank(rank, commands, answers, folder, tensor, data):
    torch.set_num_threads(1)
    world = tensor * data
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    place = RankCoordinates(rank, tensor, rank % tensor, 0, rank // tensor, 0, vocab_multiple=16)
    params = stage_values(LAYOUT, place, 1, random_state_dict(LAYOUT))
    publisher = GroupPublisher(
        "127.0.0.1", place, params, LAYOUT, torch.float32, timeout=3000.0, bucket_bytes=30_000
    )
    sent = [0]
    send = Link.send

    def counted(link, message):
        sent[0] += message.nbytes
        return send(link, message)

    Link.send = counted
    while (command := commands.get()) is not None:
        if command == "retract":
            publisher.retract()
            answers.put((rank, sent[0]))
        elif command == "drift":
            params[NORM] += rank == 1
            answers.put((rank, None))
        else:
            answers.put((rank, publisher.publish(*command)))
    os._exit(0)


@pytest.fixture
def trainers(tmp_path):
    groups = []

    def make(tensor, data):  # ``data`` replicas of ``tensor`` ranks
        groups.append(PublishingRanks(_rank, tensor * data, tmp_path, tensor, data))
        return groups[-1]

    yield make
    for t in groups:
        t.stop()


def boxes_read(worker):
    """What a worker of two reads: its half of each matrix, by tensor parallelism, and all of the norms."""
    place = grid(SHAPE, WORKERS, 1, vocab_multiple=16)[worker]
    return [
        (piece.hf_name, piece.hf)
        for param in stage_shapes(LAYOUT, place, 1)
        for piece in LAYOUT.pieces(param, place)
    ]


def read(reader, manifest, worker):
    """One sync of one worker; its acknowledgement."""
    reader.open(manifest.place, manifest.version)
    reader.check(boxes_read(worker))
    reader.begin()
    boxes = boxes_read(worker)
    targets = [torch.full(box.extent, float("nan")) for _, box in boxes]
    reader.load(Copies(boxes, targets, lambda: targets, TableCache()))
    assert all(target.isfinite().all() for target in targets)
    return {"rank": worker, "sums": reader.end()}


@pytest.mark.parametrize(("tensor", "data", "engines"), [(2, 2, 4), (1, 4, 2)])
def test_every_replica_sends_an_equal_share(trainers, tensor, data, engines):
    t = trainers(tensor, data)
    readers = [
        [
            GroupReader(torch.device("cpu"), position=(7 + engine, worker, WORKERS))
            for worker in range(WORKERS)
        ]
        for engine in range(engines)
    ]
    before = 0
    for version in range(2):
        manifest = t.publish(version)
        for name, weights in random_state_dict(LAYOUT).items():
            assert manifest.checksum(name) == checksum(weights, (0,) * weights.dim()), name
        for engine in readers:
            acks = [read(reader, manifest, worker) for worker, reader in enumerate(engine)]
            assert compare_checksums(manifest, sum_acks(acks)) == {}
            # The norms come from the rank that a worker reads the rest from.
            assert [len(reader._links) for reader in engine] == [1] * WORKERS
        sent = t.tell("retract")
        requested = engines * sum(4 * box.numel for worker in range(WORKERS) for _, box in boxes_read(worker))
        assert sum(sent) - before == pytest.approx(requested, rel=0.05)  # messages are padded
        before = sum(sent)
        assert max(sent) == pytest.approx(before / (tensor * data), rel=0.02)


def test_a_norm_that_differs_on_a_rank_is_read_from_its_owner(trainers):
    t = trainers(2, 1)
    reader = GroupReader(torch.device("cpu"), position=(0, 1, WORKERS))
    read(reader, t.publish(0), 1)
    assert len(reader._links) == 1
    t.tell("retract")
    t.tell("drift")
    manifest = t.publish(1)
    name = "model.layers.0.post_attention_layernorm.weight"
    assert read(reader, manifest, 1)["sums"][name][0] == manifest.checksum(name)
    assert reader.ranks_read(name) == {0}
    t.tell("retract")


def test_links_are_made_at_the_same_time(trainers, monkeypatch):
    t = trainers(2, 1)
    manifest = t.publish(0)
    both, connect = threading.Barrier(2), process_group_reader.Link

    def together(*arguments):
        both.wait(30)
        return connect(*arguments)

    monkeypatch.setattr(process_group_reader, "Link", together)
    reader = GroupReader(torch.device("cpu"))
    reader.open(manifest.place, 0)
    before = len(listening_ports())
    reader.check(boxes_read(0) + boxes_read(1))
    assert len(reader._links) == len(listening_ports()) - before == 2, "a port for each link"


def test_ranks_stop_serving_when_the_store_is_gone(trainers):
    t = trainers(2, 1)
    reader = GroupReader(torch.device("cpu"))
    reader.open(t.publish(0).place, 0)
    reader.check(boxes_read(0) + boxes_read(1))  # both ranks serve
    t.processes[0].kill()  # the store is in rank 0
    t.processes[0].join()
    t.commands[1].put("retract")
    assert t.answers.get(timeout=LIMIT)[0] == 1, "long before the transport's own limit"


class Counted:
    """A store that notes the calls."""

    def __init__(self, store):
        self._store, self.calls = store, []

    def __getattr__(self, name):
        self.calls.append(name)
        return getattr(self._store, name)


def test_a_wait_for_a_request_blocks_in_the_store():
    host = Rendezvous.host("127.0.0.1", timeout=20, backend="gloo")
    waiting = host.reconnect()
    waiting.store = Counted(waiting.store)
    requests = []
    thread = threading.Thread(target=lambda: requests.append(waiting.wait_request("inbox")), daemon=True)
    thread.start()
    wait_for(lambda: "queue_pop" in waiting.store.calls)
    time.sleep(0.5)
    assert waiting.store.calls == ["set_timeout", "queue_pop"], "no call while it waits"
    host.store.queue_push("inbox", "unsigned")
    host.send_request("inbox", {"kind": "hello"})
    thread.join(60)
    assert requests == [{"kind": "hello"}]


def test_an_idle_wait_in_a_folder_looks_ever_less_often(tmp_path, monkeypatch):
    store, now, slept = FolderStore(tmp_path), [0.0], []

    def sleep(seconds):
        slept.append(seconds)
        now[0] += seconds
        if now[0] > 10:
            store.queue_push("inbox", "at last")

    monkeypatch.setattr(folder_store.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(folder_store.time, "monotonic_ns", lambda: int(1e9 * now[0]))
    monkeypatch.setattr(folder_store.time, "sleep", sleep)
    assert store.queue_pop("inbox") == b"at last"
    assert max(slept) == slept[-1] == 0.05
    assert len(slept) < 250, "5 ms would be 2000"
    assert all(pause <= max(0.002, 0.1 * sum(slept[:i])) + 1e-9 for i, pause in enumerate(slept))


def test_a_queue_emptied_during_a_write_takes_the_message(tmp_path, monkeypatch):
    """The reader removes an empty queue, also just after a writer has found that it exists."""
    store, make = FolderStore(tmp_path), Path.mkdir
    store.queue_push("inbox", "first")

    def mkdir(path, *arguments, **named):
        monkeypatch.undo()
        with pytest.raises(FileExistsError):
            make(path)
        assert store.queue_pop("inbox") == b"first"
        assert not path.exists()
        if not path.is_dir():  # what exist_ok looks at
            raise FileExistsError(path)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    store.queue_push("inbox", "second")
    assert store.queue_pop("inbox") == b"second"
