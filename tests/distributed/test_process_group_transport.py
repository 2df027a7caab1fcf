"""Weights sent from two trainer ranks to engine workers arrive whole, once, and failures name the rank.

The trainers are two gloo processes with shards cut by other means than the layouts (``megatron_shards``); the
workers are readers in the test's process, without vLLM (tests/integration has that). Not covered: NCCL.
"""

import itertools
import os
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.bridge.checksum import MODULUS
from rpg_megatron.bridge.manifest import HEADER_BYTES, Layout, Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.slice_table import TableCache
from rpg_megatron.bridge.transports.buckets import exclusive_bytes, message_bytes, plan_streams
from rpg_megatron.bridge.transports.mapped_reader import Copies, ShardError
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from tests.support.bridge_trainers import PublishingRanks
from tests.support.megatron_shards import grid, stage_values
from tests.support.tiny_models import random_state_dict, tiny_shape

SHAPE = tiny_shape(tied_embeddings=True)
LAYOUT = mapping_for(SHAPE)


def _rank(rank, commands, answers, folder, bucket_bytes, dtype, private, timeout):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    place = grid(SHAPE, 2, 1, vocab_multiple=16)[rank]
    params = stage_values(LAYOUT, place, 1, random_state_dict(LAYOUT))
    publisher = GroupPublisher(
        "127.0.0.1", place, params, LAYOUT, dtype, timeout=timeout, bucket_bytes=bucket_bytes, private=private
    )
    while (command := commands.get()) is not None:
        if command == "retract":
            publisher.retract()
            answers.put((rank, None))
            continue
        seed, version = command
        for name, value in stage_values(LAYOUT, place, 1, random_state_dict(LAYOUT, seed=seed)).items():
            params[name].copy_(value)
        answers.put((rank, publisher.publish(version)))
    publisher.close()
    os._exit(0)


@pytest.fixture
def trainers(tmp_path):
    ranks = []

    def make(bucket_bytes=3000, dtype=torch.float32, private=None, timeout=60.0):
        ranks.append(PublishingRanks(_rank, 2, tmp_path, bucket_bytes, dtype, private, timeout))
        return ranks[-1]

    yield make
    for t in ranks:
        t.stop()


def halves(rank):
    """What worker ``rank`` of two reads: half the rows of matrices, all of vectors."""
    out = []
    for name, shape in LAYOUT.hf_tensors().items():
        box = Box.whole(shape)
        if len(shape) == 2:
            half = shape[0] // 2
            box = Box((rank * half, 0), (half if rank == 0 else shape[0] - half, shape[1]))
        out.append((name, box))
    return out


def read(reader, manifest, boxes):
    """One sync of one worker: the boxes that it read, and its sums."""
    reader.open(manifest.place, manifest.version)
    assert reader.check(boxes) == {}
    reader.begin()
    tensors = {}
    for name, box in boxes:
        tensors[name] = load(reader, name, box)
    return tensors, reader.end()


def load(reader, name, box):
    out = torch.full(box.extent, float("nan"))
    reader.load(Copies([(name, box)], [out], lambda: [out], TableCache()))
    return out


def test_boxes_are_loaded_in_the_order_of_the_request(trainers):
    """Otherwise one weight would be loaded for another of the same size."""
    t = trainers()
    reader = GroupReader(torch.device("cpu"))
    manifest = t.publish(1, 1)
    reader.open(manifest.place, 1)
    reader.check(halves(0))
    reader.begin()
    load(reader, *halves(0)[0])
    with pytest.raises(ShardError, match="is next, not"):
        load(reader, *halves(0)[0])
    reader.release()
    t.tell("retract")


@pytest.mark.parametrize(
    ("bucket_bytes", "dtype", "one_node"), [(600, torch.float32, True), (1 << 20, torch.bfloat16, False)]
)
def test_workers_get_their_slices_again_and_again(trainers, tmp_path, bucket_bytes, dtype, one_node):
    t = trainers(bucket_bytes=bucket_bytes, dtype=dtype, private=tmp_path if one_node else None)
    readers = [GroupReader(torch.device("cpu")) for _ in range(2)]
    for version in range(3):
        manifest = t.publish(version + 5, version)
        sd = random_state_dict(LAYOUT, seed=version + 5)
        total = dict.fromkeys(sd, 0)
        moved = 0
        for rank, reader in enumerate(readers):
            boxes = halves(rank)
            tensors, sums = read(reader, manifest, boxes)
            for name, box in boxes:
                assert torch.equal(tensors[name], sd[name][box.slices()].to(dtype).float()), name
                total[name] = (total[name] + sums[name][0]) % MODULUS
            moved += sum(n for _, n in sums.values())
        for name, tensor in manifest.tensors.items():
            times = 1 if len(tensor.shape) == 2 else 2
            assert total[name] == manifest.checksum(name) * times % MODULUS, name
        vectors = sum(v.numel() for v in sd.values() if v.dim() == 1)
        assert moved == dtype.itemsize * (sum(v.numel() for v in sd.values()) + vectors)
        t.tell("retract")
    # A worker that comes back as another process makes its own links; the others' stay.
    manifest = t.publish(1, 9)
    readers[0] = GroupReader(torch.device("cpu"))
    for rank, reader in enumerate(readers):
        read(reader, manifest, halves(rank))
    t.tell("retract")
    assert ("port" in manifest.place) is not one_node
    if one_node:  # a folder that others cannot enter, and in which nothing accumulates
        folder = Path(manifest.place["folder"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert {file.name.partition("%")[0] for file in folder.iterdir()} == {"manifest", "link"}
        with pytest.raises(ShardError, match="no trainer has a rendezvous in"):
            GroupReader(torch.device("cpu")).open(manifest.place | {"folder": str(folder / "gone")}, 9)


def test_a_check_without_an_apply_leaves_nothing_behind(trainers):
    t = trainers()
    reader = GroupReader(torch.device("cpu"))
    manifest = t.publish(1, 1)
    reader.open(manifest.place, 1)
    reader.check(halves(0))
    reader.release()
    t.tell("retract")
    manifest = t.publish(2, 2)
    tensors, _ = read(reader, manifest, halves(1))
    sd = random_state_dict(LAYOUT, seed=2)
    assert all(torch.equal(tensors[n], sd[n][b.slices()]) for n, b in halves(1))
    # In the middle of an apply: the links are dropped, and the next sync makes new ones.
    reader.check(halves(0))
    reader.begin()
    load(reader, *halves(0)[0])
    reader.release()
    t.tell("retract")
    manifest = t.publish(3, 3)
    tensors, _ = read(reader, manifest, halves(0))
    sd = random_state_dict(LAYOUT, seed=3)
    assert all(torch.equal(tensors[n], sd[n][b.slices()]) for n, b in halves(0))
    t.tell("retract")


def test_what_is_stale_or_elsewhere_is_refused(trainers):
    t = trainers(timeout=4.0)
    reader = GroupReader(torch.device("cpu"))
    manifest = t.publish(1, 4)
    with pytest.raises(ShardError, match="serve version 4, asked for 5"):
        reader.open(manifest.place, 5)
    with pytest.raises(ShardError, match="published nothing"):
        reader.open(manifest.place | {"secret": "guessed"}, 4)
    with pytest.raises(ShardError, match=r"no trainer answers at 127\.0\.0\.1:1 "):
        reader.open(manifest.place | {"port": 1}, 4)
    with pytest.raises(ShardError, match="no publication is open"):
        reader.check(halves(0))
    t.tell("retract")
    # The trainers have retracted the publication: no rank serves what the manifest names.
    reader.open(manifest.place, 4)
    with pytest.raises(ShardError, match=r"trainer rank [01] does not answer"):
        reader.check(halves(0))


def test_publishing_again_ends_the_service_of_what_was_published(tmp_path):
    """Else it would go on from weights that an update changes, and its thread would never be joined."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        (place,) = grid(SHAPE, 1, 1, vocab_multiple=16)
        params = stage_values(LAYOUT, place, 1, random_state_dict(LAYOUT))
        arguments = "127.0.0.1", place, params, LAYOUT, torch.float32
        publisher = GroupPublisher(*arguments, timeout=4.0, bucket_bytes=3000, private=tmp_path)
        publisher.publish(1)
        serving = threading.active_count()
        publisher.publish(2)
        assert threading.active_count() == serving
        publisher.close()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("when", ["before the check", "before the apply", "in the apply"])
def test_a_dead_trainer_rank_is_named_within_the_timeout(trainers, when):
    t = trainers(timeout=4.0)
    reader = GroupReader(torch.device("cpu"))
    manifest = t.publish(1, 1)
    read(reader, manifest, halves(0))
    reader.open(manifest.place, 1)

    def sync():
        for phase in ("before the check", "before the apply", "in the apply"):
            if phase == when:
                t.processes[1].kill()
                t.processes[1].join()
            if phase == "before the check":
                reader.check(halves(0))
            elif phase == "before the apply":
                reader.begin()
            else:
                for name, box in halves(0):
                    load(reader, name, box)

    with pytest.raises(ShardError, match="trainer rank 1"):
        sync()


def test_streams_send_every_element_once_in_order_of_the_reads():
    whole = (Box((0, 0), (7, 10)), Box((7, 0), (6, 10)))
    boxes = tuple(PublishedBox(i, 0, b.extent, Box((0, 0), b.extent), b) for i, b in enumerate(whole))
    tensors = {
        "w": PublishedTensor("float32", (13, 10), boxes),
        "n": PublishedTensor("float32", (5,), (PublishedBox(1, 0, (5,), Box((0,), (5,)), Box((0,), (5,))),)),
    }
    layout = Layout((Shard(0, HEADER_BYTES), Shard(1, HEADER_BYTES)), tensors)
    manifest = Manifest("process_group", {}, 0, layout.to_json(), (0, 0, 0))
    boxes_read = [("n", Box((1,), (3,))), ("w", Box((2, 3), (9, 4)))]
    for most in (1, 40, 100, 10_000):
        streams = plan_streams(manifest, boxes_read, most, exclusive_bytes(manifest, boxes_read))
        counts = {name: torch.zeros(t.shape) for name, t in tensors.items()}
        for shard, buckets in streams.items():
            parts = list(itertools.chain(*buckets))
            assert [p.hf_name for p in parts] == sorted((p.hf_name for p in parts), key="nw".index)
            for bucket in buckets:
                assert message_bytes(bucket) <= most or len(bucket) == 1
            for part in parts:
                assert part.nbytes == 4 * part.box.numel
                counts[part.hf_name][part.box.slices()] += 1
                if part.hf_name == "w":
                    part.box.offset_in(whole[shard])
        for name, box in boxes_read:
            expected = torch.zeros(tensors[name].shape)
            expected[box.slices()] = 1
            assert torch.equal(counts[name], expected)
