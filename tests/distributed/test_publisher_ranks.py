"""Two trainer ranks publish one model, as its two halves and as replicas on two nodes; readers find it whole.

Real gloo processes: ranks agree on which of them publishes a tensor, and learn of each other's failures. Not
covered: vLLM (tests/integration).
"""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.manifest import read_manifest
from rpg_megatron.bridge.publisher import node_name
from rpg_megatron.bridge.transports.mapped_reader import ShardError, ShardReader
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.bridge.transports.shared_memory import SharedMemoryPublisher
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.registry import mapping_for
from tests.support.megatron_shards import grid, stage_values
from tests.support.ranks import fork_server
from tests.support.tiny_models import TINY, random_state_dict, tiny_shape


def _publish_rank(rank, folder, tied):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    layout = mapping_for(tiny_shape(tied_embeddings=tied))
    place = grid(layout.shape, 2, 1, vocab_multiple=16)[rank]
    params = stage_values(layout, place, 1, random_state_dict(layout))
    pub = SharedMemoryPublisher(folder / "bridge", place, params, layout, torch.bfloat16)
    manifest = pub.publish(7)
    assert (manifest is None) == (rank != 0)
    # A rank that cannot write must not leave the others waiting.
    if rank == 1:
        params["decoder.layers.0.mlp.linear_fc2.weight"] = torch.zeros(3)
    with pytest.raises(RuntimeError, match="rank 1" if rank == 0 else "size"):
        pub.publish(8)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # leave the files behind, as a killed trainer does


def test_two_ranks_publish_one_model(tmp_path):
    fork_server()
    mp.start_processes(_publish_rank, (tmp_path, True), nprocs=2, start_method="forkserver")
    layout = mapping_for(tiny_shape(tied_embeddings=True))
    manifest = read_manifest(tmp_path / "bridge" / "manifest.json")
    assert [s.rank for s in manifest.shards] == [0, 1]
    sd = random_state_dict(layout)
    assert list(manifest.tensors) == list(sd)
    for name in manifest.tensors:
        assert manifest.checksum(name) == checksum(sd[name].bfloat16(), (0,) * sd[name].dim())
    # Both ranks hold the norms; they are published once.
    assert len(manifest.tensors["model.norm.weight"].boxes) == 1
    assert manifest.shards[1].size < manifest.shards[0].size
    reader = ShardReader(tmp_path / "bridge")
    with pytest.raises(ShardError, match="asked for 7"):
        reader.open(manifest.place, 7)


def _replica(rank, folder, manifests, done):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    layout = mapping_for(TINY)
    place = RankCoordinates(rank, 1, 0, 0, data_rank=rank, context_rank=0, vocab_multiple=1)
    # Real replicas have the same weights; here they differ, to show which one was read.
    params = stage_values(layout, place, 1, random_state_dict(layout, seed=rank))
    node = folder / f"node-{rank}"
    shared = SharedMemoryPublisher(node, place, params, layout, torch.float32)
    manifest = shared.publish(1)
    group = GroupPublisher(
        "127.0.0.1", place, params, layout, torch.float32, timeout=60, bucket_bytes=1 << 20, colocated_in=node
    )
    manifests.put((rank, manifest, group.publish(1)))
    done.wait()
    group.close()
    shared.close()
    os._exit(0)


def test_colocated_engines_read_from_their_own_node(tmp_path):
    """Two data-parallel ranks on two nodes, that is with a folder each: by shared memory and by messages."""
    context = fork_server()
    manifests, done = context.Queue(), context.Event()
    processes = mp.start_processes(
        _replica, (tmp_path, manifests, done), nprocs=2, join=False, start_method="forkserver"
    )
    (_, shared, sent), (_, *second) = sorted(
        (manifests.get(timeout=120) for _ in range(2)), key=lambda x: x[0]
    )
    assert second == [None, None]
    try:
        for rank in (0, 1):
            expected = random_state_dict(mapping_for(TINY), seed=rank)
            node = tmp_path / f"node-{rank}"
            memory = ShardReader(node)
            memory.open(shared.place, 1)
            assert [shard.rank for shard in memory.manifest.shards] == [rank]
            messages = GroupReader(torch.device("cpu"), node_name(node))
            messages.open(sent.place, 1)
            boxes = [(name, Box.whole(tensor.shape)) for name, tensor in expected.items()]
            messages.check(boxes)
            messages.begin()
            for reader in (memory, messages):
                assert all(torch.equal(reader.whole(name), tensor) for name, tensor in expected.items())
                reader.close()
    finally:
        done.set()
        processes.join()
    assert [file.name for node in tmp_path.glob("node-*") for file in node.iterdir()] == []
