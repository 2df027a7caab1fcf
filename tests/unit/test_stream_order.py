"""Every read of GPU memory comes after its write, and every free after its last use, whatever the GPU's pace.

Why: a wait that is missing shows on a GPU as wrong weights now and then, and on a CPU never. The real code of
transports, off-load and anchor runs on a model of streams (``tests.support.stream_order``), in which an
operation counts as done only if something waited for it. The model documents what it cannot show.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from rpg_megatron.bridge import publisher
from rpg_megatron.bridge.checksum import checksum
from rpg_megatron.bridge.controller import compare_checksums
from rpg_megatron.bridge.manifest import Manifest
from rpg_megatron.bridge.publisher import Publisher
from rpg_megatron.bridge.slice_table import TableCache, checksums
from rpg_megatron.bridge.transports import cuda_ipc, mapped_reader, process_group_publisher
from rpg_megatron.bridge.transports.cuda_ipc import CudaIpcPublisher, gpu_of
from rpg_megatron.bridge.transports.mapped_reader import Copies, Reader, ShardReader, own_stream
from rpg_megatron.bridge.transports.process_group_publisher import GroupPublisher
from rpg_megatron.bridge.transports.process_group_reader import GroupReader
from rpg_megatron.bridge.vllm.sync_route import sum_acks
from rpg_megatron.config.objective import AnchorSettings
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.policy import anchor
from rpg_megatron.policy.anchor import HeldAnchor
from rpg_megatron.policy.host_memory import host_tensor
from rpg_megatron.policy.offload import StateOffloader
from rpg_megatron.system import collectives
from rpg_megatron.system.encoding import decode, encode
from tests.support.megatron_shards import grid, stage_values
from tests.support.stream_order import Clock, Order, Process, on_gpu, stream_order
from tests.support.tiny_models import random_state_dict, tiny_shape

T = TypeVar("T")
SHAPE = tiny_shape(tied_embeddings=True)
LAYOUT = mapping_for(SHAPE)
WANTED = [(name, Box.whole(shape)) for name, shape in LAYOUT.hf_tensors().items()]
TRAINER_GPU = 1


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """The test itself is a trainer on the second GPU of its node."""
    mapped_reader._stream.cache_clear()
    with stream_order(monkeypatch) as model, model.within(Process("trainer", TRAINER_GPU)):
        yield model
    mapped_reader._stream.cache_clear()


class Ranks:
    """Data-parallel ranks: threads that are processes, each with all weights on a GPU of its own.

    The first computes checksums, for which its host waits; the second sends without that.
    """

    def __init__(self, order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
        self._order, self._rank = order, threading.local()
        self.processes = [Process(f"rank {rank}", rank) for rank in range(2)]
        self.places = grid(SHAPE, 1, 1, vocab_multiple=16, data=2)
        self._messages: list[tuple[bytes, Clock]] = [(b"", {})] * 2
        self._barrier = threading.Barrier(2)
        for module in (publisher, cuda_ipc, process_group_publisher, collectives):
            monkeypatch.setattr(module, "gather_objects", self._gather)
        for name, function in {
            "gather_on_first": self._gather,
            "broadcast_object": lambda value, kind: self._gather(value)[0],
        }.items():
            monkeypatch.setattr(process_group_publisher, name, function)
        self.params = self.all(self._weights)

    def all(self, step: Callable[[int], T]) -> list[T]:
        """A step's results, each rank's in a thread of its process."""
        out: list[Any] = [None, None]

        def run(rank: int) -> None:
            self._rank.number = rank
            with self._order.within(self.processes[rank]):
                out[rank] = step(rank)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return out

    def sync(self, publishers: list[Publisher], engines: list[Engine], side_stream: bool = False) -> None:
        """Two steps: an update on the trainer's stream, a sync of all engines, the next update at once.

        side_stream: the update ends on a stream that nobody waits for.
        """
        for version in range(2):
            self.all(lambda rank: self._update(rank, side_stream))
            (manifest, _) = self.all(lambda rank, v=version: publishers[rank].publish(v))
            for engine in engines:
                engine.sync(manifest)
                for name, expected in random_state_dict(LAYOUT).items():
                    for _ in range(version + 1):
                        expected = expected + 0.25
                    assert torch.equal(engine.read[name], expected), name
            self.all(lambda rank: publishers[rank].retract())
        self.all(lambda rank: self._update(rank, side_stream))
        self.all(lambda rank: publishers[rank].close())

    def _weights(self, rank: int) -> dict[str, torch.Tensor]:
        values = stage_values(LAYOUT, self.places[rank], 1, random_state_dict(LAYOUT))
        return {name: on_gpu(value) for name, value in values.items()}

    def _update(self, rank: int, side_stream: bool) -> None:
        stream = torch.cuda.current_stream()
        if side_stream:
            stream = torch.cuda.Stream(torch.device("cuda", rank))
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for value in self.params[rank].values():
                value.add_(0.25)

    def _gather(self, value: Any, kind: Any = Any, group: Any = None) -> list[Any]:
        """``gather_objects`` between the threads."""
        self._messages[self._rank.number] = encode(value), dict(self._order.host.clock)
        self._barrier.wait(30)
        messages = list(self._messages)
        for _, clock in messages:
            self._order.host.learn(clock)
        self._barrier.wait(30)
        return [decode(x, kind) for x, _ in messages]


class Engine:
    """A worker: checks and applies as ``plugin.PullEngine`` does, then uses its weights on its own stream."""

    def __init__(self, order: Order, gpu: int, reader: Callable[[torch.device], Reader]) -> None:
        self._order, self.process, self.device = order, Process("engine", gpu), torch.device("cuda", gpu)
        with order.within(self.process):
            self.reader = reader(self.device)
            self.caches: list[TableCache[Any]] = [TableCache(), TableCache()]
            self.weights = {
                name: torch.zeros(shape, device=self.device) for name, shape in LAYOUT.hf_tensors().items()
            }

    def sync(self, manifest: Manifest) -> None:
        with self._order.within(self.process):
            with own_stream(self.device):
                self.reader.open(manifest.place, manifest.version)
                sums = self.reader.check(WANTED)
            with own_stream(self.device):
                self.reader.begin()
                # Two modules, one after the other: a message has parts of both.
                for wanted, cache in zip((WANTED[:7], WANTED[7:]), self.caches, strict=True):
                    targets = [self.weights[name] for name, _ in wanted]
                    self.reader.load(Copies(wanted, targets, lambda t=targets: t, cache))
                sums = self.reader.end() or sums
            ack = {"rank": 0, "sums": sums, "ranks_read": {name: [0] for name, _ in WANTED}}
            assert compare_checksums(manifest, sum_acks([ack])) == {}
            for weight in self.weights.values():
                weight.mul(2.0)
            self.read = {
                name: torch.from_numpy(weight.numpy().copy()) for name, weight in self.weights.items()
            }


@pytest.mark.parametrize("colocated", [False, True])
def test_weights_that_links_carry(order: Order, tmp_path, monkeypatch, colocated: bool) -> None:
    """NCCL between GPUs, and gloo through pinned memory where the engine has the trainer's GPU."""
    ranks = Ranks(order, monkeypatch)
    publishers = ranks.all(
        lambda rank: GroupPublisher(
            *("127.0.0.1", ranks.places[rank], ranks.params[rank], LAYOUT, torch.float32),
            timeout=20.0,
            bucket_bytes=4000,
            colocated_in=tmp_path if colocated else None,
            private=tmp_path,
        )
    )
    engines = [
        Engine(order, i if colocated else i + 2, lambda device, i=i: GroupReader(device, position=(i, 0, 1)))
        for i in range(2)
    ]
    ranks.sync(publishers, engines)
    assert order.faults == []
    for process in [*ranks.processes, *(engine.process for engine in engines)]:
        assert len(process.streams) == 4 + 1  # one for all syncs, and a rank one for its link
        # A message that waited for the default stream would wait for all that is queued there.
        assert not order.messages & set(process.default)
    assert len(order.messages) == (0 if colocated else 4)


@pytest.mark.parametrize("gpu", [0, 1, 2])
def test_weights_that_handles_open(order: Order, tmp_path, monkeypatch, gpu: int) -> None:
    """cuda_ipc, on a trainer's GPU and from another one. Publishing waits for all streams of the GPU."""
    ranks, folder = Ranks(order, monkeypatch), tmp_path / "bridge"
    folder.mkdir(mode=0o700)
    publishers = ranks.all(
        lambda rank: CudaIpcPublisher(folder, ranks.places[rank], ranks.params[rank], LAYOUT, torch.float32)
    )
    engine = Engine(order, gpu, lambda device: ShardReader(folder, gpu_of(device)))
    ranks.sync(publishers, [engine], side_stream=True)
    assert order.faults == []


def test_slices_that_are_cast_are_held_until_they_are_summed(order: Order) -> None:
    """A slice that is cast to be sent is a copy, whose memory may go to what is allocated next."""
    values = [torch.full((4, 8), float(i)) for i in range(3)]
    copies: list[weakref.ref[torch.Tensor]] = []

    def cast() -> Iterator[tuple[torch.Tensor, tuple[int, int]]]:
        for x in values:
            assert sum(copy() is not None for copy in copies) <= 1  # not a second model
            copy = on_gpu(x).to(torch.bfloat16)
            copies.append(weakref.ref(copy))
            yield copy, (0, 0)

    sums = checksums(cast())
    assert sums == [checksum(x.to(torch.bfloat16), (0, 0)) for x in values]
    assert order.faults == []


class Model(torch.nn.Module):
    """Stands in for Megatron's DDP: a weight, and a buffer of gradients that comes and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(on_gpu(torch.ones(300)))

    def offload_grad_buffers(self, empty_cache: bool) -> None: ...
    def restore_grad_buffers(self) -> None: ...


def test_state_that_leaves_the_gpu_and_comes_back(order: Order) -> None:
    model = Model()
    main = torch.nn.Parameter(on_gpu(torch.arange(300.0)))
    optimizer = torch.optim.SGD([main], lr=1.0, momentum=0.9)
    offloader = StateOffloader([model], SimpleNamespace(optimizer=optimizer))  # type: ignore[list-item,arg-type]
    for _ in range(3):
        main.grad = on_gpu(torch.ones(300))
        optimizer.step()
        before = main.detach().clone(), optimizer.state[main]["momentum_buffer"].clone()
        assert offloader.offload() > 0
        order.require_idle_host_memory()
        offloader.reload()
        order.require_idle_host_memory()
        assert torch.equal(main, before[0])
        assert torch.equal(optimizer.state[main]["momentum_buffer"], before[1])
    assert order.faults == []


def test_an_anchor_that_takes_the_place_of_the_policy(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchor, "_PART", 100)
    weights = [torch.nn.Parameter(on_gpu(torch.full((250,), float(i)))) for i in range(3)]
    held_anchor = HeldAnchor(weights, AnchorSettings(type="every", updates=2))
    order.require_idle_host_memory()
    for step in range(1, 4):
        with torch.no_grad():
            for weight in weights:
                weight.add_(1.0)
        present = [w.detach().clone() for w in weights]
        with held_anchor.swapped_in():
            order.require_idle_host_memory()
            assert float(weights[1].detach()[0]) == (1.0 if step <= 2 else 3.0)
        order.require_idle_host_memory()
        assert all(torch.equal(w, p) for w, p in zip(weights, present, strict=True))
        held_anchor.after_step(1, 0.0)
        order.require_idle_host_memory()
    assert order.faults == []


def test_an_error_of_cuda_is_taken_off_where_it_was_made(order: Order, monkeypatch) -> None:
    """CUDA keeps it, and torch would report it for the next kernel: one runs at once, on the GPU."""
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    stream = torch.cuda.current_stream()
    before = dict(stream.clock)
    host_tensor((100,), torch.float32, pinned=True)
    assert stream.clock != before


def gpu_tensor() -> torch.Tensor:
    return torch.zeros(100, device=torch.device("cuda", TRAINER_GPU))


def read_on_another_stream(x: torch.Tensor, *, waits: bool) -> None:
    stream = torch.cuda.Stream(x.device)
    if waits:
        stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        x.mul(2.0)


def another_stream_reads(order: Order) -> None:
    read_on_another_stream(gpu_tensor(), waits=False)


def host_reads_a_copy(order: Order) -> None:
    host = host_tensor((100,), torch.float32, pinned=True)
    host.copy_(gpu_tensor(), non_blocking=True)
    float(host[3])


def host_writes_before_a_copy(order: Order) -> None:
    host = torch.zeros(100, pin_memory=True)
    gpu_tensor().copy_(host, non_blocking=True)
    host.fill_(1.0)


def event_before_the_write(order: Order) -> None:
    x, stream = gpu_tensor(), torch.cuda.Stream(torch.device("cuda", TRAINER_GPU))
    torch.cuda.synchronize()
    event = torch.cuda.current_stream(x.device).record_event()
    x.fill_(1.0)
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x.mul(2.0)


def free_of_host_memory(order: Order) -> None:
    host = host_tensor((100,), torch.float32, pinned=True)
    host.copy_(gpu_tensor(), non_blocking=True)
    del host


def free_while_another_stream_reads(order: Order) -> None:
    x = gpu_tensor()
    read_on_another_stream(x, waits=True)
    del x


def memory_given_back(order: Order) -> None:
    x = gpu_tensor()
    x.untyped_storage().resize_(0)
    torch.cuda.empty_cache()


def returns_early(order: Order) -> None:
    host = host_tensor((100,), torch.float32, pinned=True)
    host.copy_(gpu_tensor(), non_blocking=True)
    order.require_idle_host_memory()
    torch.cuda.synchronize()


def thread_of_another_gpu(order: Order) -> None:
    thread = threading.Thread(target=lambda: torch.zeros(5, pin_memory=True))
    thread.start()
    thread.join()


def other_process_reads(order: Order) -> None:
    x = gpu_tensor()
    with order.within(Process("engine", TRAINER_GPU)):
        x.mul(2.0)


PLANTED: dict[Callable[[Order], None], str] = {
    another_stream_reads: "reads",
    host_reads_a_copy: "reads",
    host_writes_before_a_copy: "writes",
    event_before_the_write: "reads",
    free_of_host_memory: "frees",
    free_while_another_stream_reads: "frees",
    memory_given_back: "goes back to the device",
    returns_early: "returns while",
    thread_of_another_gpu: "pins memory on GPU 0",
    other_process_reads: "reads",
}


@pytest.mark.parametrize("fault", PLANTED, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found(order: Order, fault: Callable[[Order], None]) -> None:
    fault(order)
    first, *more = order.faults
    assert PLANTED[fault] in first
    assert first.startswith("tests/unit/test_stream_order.py:")
    assert all("frees" in other for other in more)  # memory still in use is freed at the end


def test_what_is_in_order_is_not_a_fault(order: Order) -> None:
    """The same operations, each with the wait that orders it."""
    x = gpu_tensor()
    read_on_another_stream(x, waits=True)
    host = host_tensor((100,), torch.float32, pinned=True)
    host.copy_(x, non_blocking=True)
    torch.cuda.synchronize()
    float(host[3])
    event = torch.cuda.current_stream(x.device).record_event()
    stream = torch.cuda.Stream(x.device)
    stream.wait_event(event)
    with torch.cuda.stream(stream):
        x.mul(2.0)
    stream.synchronize()
    del host
    x[:50].fill_(1.0)
    with torch.cuda.stream(stream):
        x[50:].mul(2.0)  # other bytes
    stream.synchronize()
    gpu_tensor().copy_(torch.zeros(100, pin_memory=True), non_blocking=True)  # torch keeps it until then
    x.tolist()
    with order.within(Process("engine", TRAINER_GPU)):
        x.mul(2.0)
        torch.cuda.synchronize()
    x.fill_(0.0)
    torch.cuda.synchronize()
    x.untyped_storage().resize_(0)
    torch.cuda.empty_cache()
    assert order.faults == []
