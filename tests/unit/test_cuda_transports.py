"""What an engine worker does on a GPU, as far as it can be tested without one.

Why: an error here breaks nothing; one card or one hardware queue then does the work that all should share.
Links are replaced by a stand-in; which replica's memory each worker opens is computed from manifests with
made-up GPUs. Not covered: CUDA itself (tests/gpu).
"""

import asyncio
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist

from rpg_megatron.bridge import publisher
from rpg_megatron.bridge.controller import _describe, compare_checksums
from rpg_megatron.bridge.manifest import Copy, Layout, Manifest, PublishedBox, PublishedTensor, Shard
from rpg_megatron.bridge.slice_table import TableCache
from rpg_megatron.bridge.transports import cuda_ipc, mapped_reader
from rpg_megatron.bridge.transports.buckets import BucketPart
from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher
from rpg_megatron.bridge.transports.mapped_reader import Copies, ShardError, ShardReader
from rpg_megatron.bridge.transports.process_group_link import SENDER, Link, LinkError
from rpg_megatron.bridge.transports.process_group_reader import GroupReader, Receiver
from rpg_megatron.bridge.vllm.sync_route import sum_acks
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.encoding import decode, encode
from tests.support.megatron_shards import stage_values
from tests.support.tiny_models import TINY, random_state_dict


class SlowLink:
    """Counts receives that were begun and not finished."""

    def __init__(self) -> None:
        self.open = self.most = 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def receive(self, into: torch.Tensor) -> torch.Tensor:
        self.open += 1
        self.most = max(self.most, self.open)
        return into

    def finish(self, work: torch.Tensor) -> None:
        self.open -= 1


def test_a_link_has_one_receive_under_way() -> None:
    """A second one, and other links behind it, would wait in a hardware queue until the first one ends."""
    parts = [BucketPart("w", Box((row,), (16,)), 64) for row in range(0, 96, 16)]
    link = SlowLink()
    receiver = Receiver(link, "name")  # type: ignore[arg-type]
    receiver.plan([(part,) for part in parts])
    for _ in range(2):
        receiver.begin()
        places = [values.data_ptr() for _, _, values in receiver.parts]
        for i in range(len(parts)):
            receiver.wait_for(i)
            # The next one comes while this one is used, into other memory.
            assert link.open == (i < len(parts) - 1)
            assert receiver.busy == (i < len(parts) - 1)
        assert places == [places[0], places[1]] * 3
        assert places[0] != places[1]
    assert link.most == 1


def test_a_plan_of_copies_follows_the_messages() -> None:
    """On a GPU parts are not taken one by one: the plan that is made at the first sync compares them."""
    whole, parts = Box((0,), (32,)), [BucketPart("w", Box((row,), (16,)), 64) for row in (0, 16)]
    tensors = {"w": PublishedTensor("float32", (32,), (PublishedBox(0, 0, (32,), whole, whole),))}
    reader, receiver = GroupReader(torch.device("cpu")), Receiver(SlowLink(), "name")  # type: ignore[arg-type]
    receiver.plan([tuple(parts)])
    receiver.begin()
    reader.manifest = Manifest("process_group", {}, 1, Layout((Shard(0, 128),), tensors).to_json(), (0,))
    reader._links, reader._max_part_bytes = {0: receiver}, 64
    for wanted in (parts[::-1], [*parts, parts[1]]):  # in another order, and one more
        boxes = [("w", part.box) for part in wanted]
        targets = [torch.empty(16)] * len(wanted)
        copies = Copies(boxes, [], lambda t=targets: t, TableCache())  # type: ignore[misc]
        with pytest.raises(ShardError, match=r"trainer rank 0.* is next, not"):
            reader._plan_steps(copies)


def test_a_link_through_the_host_has_pinned_memory_until_it_is_closed(monkeypatch) -> None:
    """From other memory, copies to and from the GPU are several times slower."""
    monkeypatch.setattr(dist, "ProcessGroupGloo", MagicMock())
    place = {"backend": "gloo", "timeout": 1.0, "address": "127.0.0.1"}
    rendezvous: Any = SimpleNamespace(place=place, link_store=lambda *_: None)
    link = Link(rendezvous, "name", SENDER, torch.device("cuda"))
    made: dict[str, Any] = {}
    with monkeypatch.context() as patch:  # torch cannot pin memory without a GPU
        patch.setattr(torch, "empty", lambda *_, **options: made.update(options))
        link.buffer(16)
    assert made == {"dtype": torch.uint8, "device": torch.device("cpu"), "pin_memory": True}
    link.send(torch.zeros(16))
    link.close()
    with pytest.raises(LinkError, match="is closed"):
        link.send(torch.zeros(16))


LAYOUT = mapping_for(TINY)
WANTED = [(name, Box.whole(shape)) for name, shape in LAYOUT.hf_tensors().items()]


class Node:
    """A node's trainer ranks, each a thread with its weights in memory of a made-up GPU."""

    def __init__(self, folder: Path, tensor: int, data: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.world = folder, tensor * data
        folder.mkdir(mode=0o700)
        self.opened: list[Copy] = []
        self._barrier = threading.Barrier(self.world)
        self._messages: list[bytes] = [b""] * self.world
        self.sent: list[int] = []
        self._rank = threading.local()
        self._memory: dict[str, torch.Tensor] = {}
        for module in (publisher, cuda_ipc, sys.modules[cuda_ipc.run_together.__module__]):
            monkeypatch.setattr(module, "gather_objects", self._gather)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(cuda_ipc, "_export", self._export)
        monkeypatch.setattr(mapped_reader, "open_memory", self._open)
        values = random_state_dict(LAYOUT)
        places = [
            RankCoordinates(rank, tensor, rank % tensor, 0, rank // tensor, 0, vocab_multiple=1)
            for rank in range(self.world)
        ]
        self.params = [_in_one_buffer(stage_values(LAYOUT, place, 1, values)) for place in places]
        self.publishers = self._all(
            lambda rank: CudaIpcPublisher(folder, places[rank], self.params[rank], LAYOUT, torch.float32)
        )

    def publish(self, version: int) -> Manifest:
        return self._all(lambda rank: self.publishers[rank].publish(version))[0]

    def worker(self, gpu: str, manifest: Manifest) -> tuple[set[int], dict[str, Any]]:
        """The ranks whose memory a worker on a GPU opens, and its answer to a check."""
        self.opened.clear()
        reader = ShardReader(self.folder, gpu)
        reader.open(manifest.place, manifest.version)
        ack = {"rank": 0, "sums": reader.check(WANTED)}
        assert reader.manifest is not None
        ack["ranks_read"] = {name: sorted(reader.ranks_read(name)) for name in manifest.tensors}
        return {copy.rank for copy in self.opened}, ack

    def _all(self, step: Callable[[int], Any]) -> list[Any]:
        out: list[Any] = [None] * self.world

        def run(rank: int) -> None:
            self._rank.number = rank
            out[rank] = step(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return out

    def _gather(self, value: Any, kind: Any, group: Any = None) -> list[Any]:
        self._messages[self._rank.number] = encode(value)
        self._barrier.wait(30)
        messages = [decode(x, kind) for x in self._messages]
        if self._rank.number == 0:
            self.sent.append(sum(map(len, self._messages)))
        self._barrier.wait(30)
        return messages

    def _export(self, storage: torch.UntypedStorage) -> tuple[str, str]:
        handle = f"memory at {storage.data_ptr()}"
        self._memory[handle] = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        return f"GPU-{self._rank.number}", handle

    def _open(self, copy: Copy) -> torch.Tensor:
        assert copy.gpu == f"GPU-{copy.rank}"
        self.opened.append(copy)
        return self._memory[copy.handle]


def _in_one_buffer(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The first half of the parameters share a piece of memory, as in Megatron's buffers."""
    names = list(params)[: len(params) // 2]
    buffer = torch.cat([params[name].flatten() for name in names])
    parts = buffer.split([params[name].numel() for name in names])
    return params | {n: part.view(params[n].shape) for n, part in zip(names, parts, strict=True)}


@pytest.mark.parametrize(("tensor", "data"), [(1, n) for n in range(2, 9)] + [(2, 4), (4, 2)])
def test_each_worker_reads_the_replica_on_its_own_gpu(tensor: int, data: int, tmp_path, monkeypatch) -> None:
    node = Node(tmp_path / "bridge", tensor, data, monkeypatch)
    manifest = node.publish(1)
    for rank in range(node.world):
        ranks, ack = node.worker(f"GPU-{rank}", manifest)
        first = rank - rank % tensor
        assert ranks == set(range(first, first + tensor)), (
            rank
        )  # its own, and what it lacks of the same replica
        assert compare_checksums(manifest, sum_acks([ack])) == {}
    # Workers on other GPUs keep to a replica each, and do not all take the first.
    others_ranks = [node.worker(f"GPU-of-an-engine-{i}", manifest)[0] for i in range(8)]
    assert all(len(ranks) == tensor and len({r // tensor for r in ranks}) == 1 for ranks in others_ranks)
    assert len(set(map(frozenset, others_ranks))) > 1
    # Memory locations are sent once.
    before = node.sent[-1]
    node.publish(2)
    assert node.sent[-1] < before


def test_a_replica_that_has_drifted_is_found_and_named(tmp_path, monkeypatch) -> None:
    node = Node(tmp_path / "bridge", 2, 2, monkeypatch)
    node.params[3]["decoder.layers.1.mlp.linear_fc2.weight"][0, 0] += 1
    manifest = node.publish(1)
    answers = [node.worker(f"GPU-{rank}", manifest)[1] for rank in range(4)]
    name = "model.layers.1.mlp.down_proj.weight"
    assert [list(compare_checksums(manifest, sum_acks([ack]))) for ack in answers] == [[], [], [name], [name]]
    wrong = compare_checksums(manifest, sum_acks([answers[3]]))
    verdict = asyncio.run(_describe(manifest, wrong, [answers[3]]))
    assert f"{name}: checksum differs" in verdict
    assert "(from trainer ranks 2, 3)" in verdict


def test_a_replica_laid_out_otherwise_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node(tmp_path / "bridge", 1, 3, monkeypatch)
    node.params[1] |= {name: value.clone() for name, value in node.params[1].items()}
    manifest = node.publish(1)
    assert {tuple(c.rank for c in shard.copies) for shard in manifest.shards} == {(0, 2)}
    ranks, ack = node.worker("GPU-1", manifest)
    assert len(ranks) == 1
    assert compare_checksums(manifest, sum_acks([ack])) == {}
