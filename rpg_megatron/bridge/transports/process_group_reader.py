"""Transport ``process_group``, engine side: receives slices as messages from trainer ranks, by gloo or NCCL.

*Check* connects to every trainer rank that holds slices for this worker, requests them, and receives the
version that the rank serves; no weights are moved. *Apply* streams: one message is unpacked into the model
while the next one arrives. Every byte is sent once, and checksums are computed on the way into the model. So
damage in transit is detected after the weights are loaded: the controller compares the checksums before the
engine serves again.
"""

from __future__ import annotations

import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from rpg_megatron.bridge.manifest import Manifest, parse_manifest
from rpg_megatron.bridge.slice_table import HostSlices, Slice, SliceTable, TableCache, modulo, table_of
from rpg_megatron.bridge.transports.buckets import (
    Bucket,
    BucketPart,
    choose_shard,
    exclusive_bytes,
    largest,
    message_bytes,
    plan_streams,
    split_box,
)
from rpg_megatron.bridge.transports.mapped_reader import (
    Copies,
    Parts,
    ReadSums,
    ShardError,
    add_sums,
    own_stream,
    read_whole,
)
from rpg_megatron.bridge.transports.process_group_link import RECEIVER, Link, LinkError, Rendezvous
from rpg_megatron.bridge.transports.process_group_publisher import inbox
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.dtypes import torch_dtype

Position = tuple[int, int, int]
"""Index of the engine, index of the worker in it, number of workers per engine."""
_MAX_CONNECTING = 16
"""Number of links that a worker opens at the same time; each thread needs a connection to the store."""


class GroupReader:
    """``Reader`` of weights that a ``GroupPublisher`` serves."""

    def __init__(
        self,
        device: torch.device,
        node: str = "",
        on_progress: Callable[[], None] = lambda: None,
        position: Position = (0, 0, 1),
    ) -> None:
        """device: the engine's device, on which slices are returned. node: the engine's ``node_name``, to
        find trainer ranks on the same node. on_progress: called for each answer of a rank and each slice.
        position: divides the workers among the trainers' replicas.
        """
        self.manifest: Manifest | None = None
        self._device, self._node, self._on_progress = device, node, on_progress
        self._position = position
        self._rendezvous: Rendezvous | None = None
        self._name = f"{os.uname().nodename}-{os.getpid()}-{secrets.token_hex(4)}"
        self._links: dict[int, Receiver] = {}
        self._made = 0
        self._sums: ReadSums = {}
        self._unread: list[tuple[Parts, torch.Tensor]] = []
        """Parts and their checksums, which are still on the GPU."""
        self._planned: TableCache[tuple[Counter[int], int, dict[int, list[Bucket]]]] = TableCache()
        self._max_part_bytes = 0
        self._exclusive: Counter[int] = Counter()

    def open(self, place: dict[str, Any], version: int) -> Manifest:
        """Fetch the manifest from the trainers' key-value store. Raises ShardError with the reason."""
        self.manifest = None
        if self._rendezvous is None or self._rendezvous.place != place:
            self.close()
            try:
                self._rendezvous = Rendezvous.join(place)
            except OSError as e:
                raise ShardError(str(e)) from None
        try:
            if not self._rendezvous.store.check(["manifest"]):
                raise ShardError("the trainers have published nothing yet")
            manifest = parse_manifest(self._rendezvous.store.get("manifest").decode(), place)
        except RuntimeError as e:
            self.close()
            raise ShardError(f"the trainers' store does not answer ({e})") from None
        except ValueError as e:
            raise ShardError(str(e)) from None
        if manifest.version != version:
            raise ShardError(f"the trainers serve version {manifest.version}, asked for {version}")
        self.manifest = manifest
        return manifest

    def check(self, wanted: Sequence[tuple[str, Box]]) -> ReadSums:
        """Connect to every rank that holds some of ``wanted`` and request it; no weights are moved yet.

        Returns no checksums, since nothing is read.
        Raises ShardError that names the rank.
        """
        manifest = self._opened()
        self._sums, self._unread = {}, []
        budget = int(manifest.place["bucket_bytes"])

        def plan() -> tuple[Counter[int], int, dict[int, list[Bucket]]]:
            # The memory is divided into two buckets per sending rank. Which ranks send does not depend on
            # sizes.
            exclusive = exclusive_bytes(manifest, wanted)
            ranks = plan_streams(manifest, wanted, 1 << 62, exclusive)
            most = max(1, budget // (2 * max(len(ranks), 1)))
            return exclusive, most, plan_streams(manifest, wanted, most, exclusive)

        key = manifest.parsed, tuple(wanted), budget
        self._exclusive, self._max_part_bytes, streams = self._planned.get(key, [], plan)
        for shard in [s for s in self._links if s not in streams]:
            self._links.pop(shard).close()
        try:
            self._connect(streams, manifest)
        except BaseException:
            # Links may be in the middle of a transfer; the next check opens new ones.
            self._close_links()
            raise
        return {}

    def begin(self) -> None:
        """Request the transfer from all ranks. Raises ShardError."""
        manifest = self._opened()
        for shard, receiver in self._links.items():
            self._ask(shard, {"kind": "stream", "link": receiver.name})
            try:
                receiver.begin()
            except LinkError as e:
                raise ShardError(f"{manifest.shards[shard]} has closed its link: {e}") from None
        self._sums = {name: (0, 0) for name in manifest.tensors}

    def load(self, copies: Copies) -> None:
        """Copy boxes to their targets; in GPU memory by one launch for a message's checksums, one for copies.

        Boxes must come in the order given to ``check``. The next message overwrites the one before, so all of
        it is copied first. Raises ShardError.
        """
        links, plan = self._links, partial(self._plan_steps, copies)
        key = self._opened().parsed, tuple((s, k.name, k.plans, k.taken) for s, k in links.items())
        buffers = [buffer for link in links.values() for buffer in link.buffers]
        on_gpu = all(buffer.device.type == "cuda" for buffer in buffers)
        # Host memory would stay in use.
        steps, taken = copies.cache.get(key, [*copies.memory, *buffers], plan) if on_gpu else plan()
        for step in steps:
            try:
                links[step.shard].wait_for(step.message)
            except LinkError as e:
                raise ShardError(f"{self._opened().shards[step.shard]} failed: {e}") from None
            self._unread.append((step.parts, step.table.sums()))
            step.table.copy()
            self._on_progress()
        for shard, number in taken.items():
            links[shard].taken = number

    def _plan_steps(self, copies: Copies) -> tuple[list[_Step], dict[int, int]]:
        """What ``load`` does from here on, and how many parts of each link it has taken then."""
        taken = {shard: link.taken for shard, link in self._links.items()}
        arrived = {shard: link.arrived for shard, link in self._links.items()}
        steps: list[tuple[int, int, Parts, list[Slice], list[torch.Tensor]]] = []

        def split(name: str, box: Box) -> Iterator[tuple[tuple[int, BucketPart], Box]]:
            parts = split_box(self._opened(), name, box, self._max_part_bytes, self._exclusive)
            return (((shard, part), part.box) for shard, part in parts)

        for name, (shard, part), _, target in copies.parts(split):
            number = taken[shard]
            message, expected, raw = next(
                iter(self._links[shard].parts[number : number + 1]), (0, None, None)
            )
            if expected != part or raw is None:
                raise ShardError(f"{self._opened().shards[shard]}: {expected} is next, not {part}")
            if message >= arrived[shard] or not steps:
                steps.append((shard, message, [], [], []))
            taken[shard], arrived[shard] = number + 1, max(arrived[shard], message + 1)
            _, _, parts, slices, targets = steps[-1]
            parts.append((name, part.nbytes))
            values = raw.view(torch_dtype(self._opened().tensors[name].dtype)).view(part.box.extent)
            slices.append((values, part.box.start))
            targets.append(target)
        return [
            _Step(shard, message, parts, table_of(slices, targets, self._on_progress))
            for shard, message, parts, slices, targets in steps
        ], taken

    def whole(self, name: str) -> torch.Tensor:
        """A full HF tensor, as a copy."""
        return read_whole(self, self._opened(), name, self._device)

    def end(self) -> ReadSums:
        """Checksum and bytes of each tensor received since ``begin``; the host waits once for a GPU."""
        if self._unread:
            numbers = modulo(torch.cat([sums for _, sums in self._unread]))
            add_sums(self._sums, [part for parts, _ in self._unread for part in parts], numbers)
            self._unread.clear()
        return {name: total for name, total in self._sums.items() if total[1]}

    def ranks_read(self, name: str) -> set[int]:
        """The ranks that slices of a tensor are requested from."""
        shards = (choose_shard(box, self._exclusive) for box in self._opened().tensors[name].boxes)
        return {self._rank_of(shard) for shard in shards if shard in self._links}

    def release(self) -> None:
        """Abandon an interrupted update: closes the links, so that the next update gets no old messages."""
        if any(receiver.busy for receiver in self._links.values()):
            self._close_links()

    def close(self) -> None:
        """Close all links and the open version."""
        self._close_links()
        self.manifest, self._rendezvous = None, None

    def _opened(self) -> Manifest:
        if self.manifest is None:
            raise ShardError("no publication is open")
        return self.manifest

    def _connect(self, streams: dict[int, list[Bucket]], manifest: Manifest) -> None:
        """Open missing links, send changed lists of slices, and receive all ranks' handshakes, several at a
        time. Raises ShardError that names the rank.
        """
        assert self._rendezvous is not None
        join, connections = self._rendezvous.reconnect, threading.local()

        def connect(shard: int, name: str, buckets: list[Bucket]) -> None:
            with own_stream(self._device):
                if shard not in self._links:
                    if not hasattr(connections, "own"):
                        connections.own = join()
                    link = Link(connections.own, name, RECEIVER, self._device)
                    self._links[shard] = Receiver(link, name)
                if self._links[shard].buckets != buckets:
                    self._links[shard].plan(buckets)
                self._links[shard].finish_handshake(manifest.version)

        with ThreadPoolExecutor(_MAX_CONNECTING, initializer=self._use_device) as pool:
            connecting = {
                shard: pool.submit(connect, shard, self._request_handshake(shard, buckets), buckets)
                for shard, buckets in streams.items()
            }
            try:
                for shard in connecting:
                    connecting[shard].result()
                    self._on_progress()
            except (LinkError, RuntimeError, OSError) as e:
                pool.shutdown(wait=False, cancel_futures=True)
                raise ShardError(f"{manifest.shards[shard]} does not answer: {e}") from None

    def _use_device(self) -> None:
        """A thread starts on the first GPU, and on leaving a stream goes back to it: a context there."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def _request_handshake(self, shard: int, buckets: list[Bucket]) -> str:
        """Request a handshake from a rank; returns the name of the link."""
        receiver = self._links.get(shard)
        name = f"{self._name}-{self._made}" if receiver is None else receiver.name
        self._made += receiver is None
        lists = None
        if receiver is None or receiver.buckets != buckets:
            lists = [[(p.hf_name, p.box.start, p.box.extent) for p in b] for b in buckets]
        self._ask(shard, {"kind": "hello", "link": name, "buckets": lists})
        return name

    def _ask(self, shard: int, request: dict[str, Any]) -> None:
        assert self._rendezvous is not None
        key = inbox(self._opened().version, self._rank_of(shard))
        try:
            self._rendezvous.send_request(key, request)
        except RuntimeError as e:
            raise ShardError(f"the trainers' store does not answer ({e})") from None

    def _rank_of(self, shard: int) -> int:
        """The rank to request a shard's slices from: one of those on this node, if there are any.

        Several workers of an engine read a shard if the engine has more workers than the trainer has tensor
        ranks. These workers, of all engines, are distributed over the ranks in turn.
        """
        manifest = self._opened()
        replicas = manifest.shards[shard].replicas
        ranks = [rank for rank, node in replicas if node == self._node] or [rank for rank, _ in replicas]
        engine, worker, workers = self._position
        readers = max(1, workers // int(manifest.place["tensor"]))
        return ranks[(engine * readers + worker % readers) % len(ranks)]

    def _close_links(self) -> None:
        for receiver in self._links.values():
            receiver.close()
        self._links.clear()


@dataclass(frozen=True)
class _Step:
    """What ``GroupReader.load`` does between two messages."""

    shard: int
    message: int
    """Number of the message of this shard to wait for first."""
    parts: Parts
    """Of ``table``."""
    table: SliceTable | HostSlices


class Receiver:
    """The engine worker's end of one link, whose messages arrive one after the other in two buffers."""

    def __init__(self, link: Link, name: str) -> None:
        self.name = name
        self.buckets: list[Bucket] = []
        self.buffers: list[torch.Tensor] = []
        self.parts: list[tuple[int, BucketPart, torch.Tensor]] = []
        """Of all messages, in order: number of the message, part, and where its bytes arrive."""
        self.taken = 0
        """Number of parts that were used."""
        self.plans = 0
        """How often ``plan`` was called."""
        self.arrived = 0
        """Number of messages that have arrived."""
        self._link = link
        self._coming: Any = None

    @property
    def busy(self) -> bool:
        """Whether messages are still expected."""
        return self._coming is not None

    def plan(self, buckets: list[Bucket]) -> None:
        """Set the buckets to receive from now on; allocates memory for two messages."""
        self.buckets, self.parts = buckets, []
        size = largest(buckets)
        self.plans += 1
        self.buffers = [self._link.buffer(size) for _ in range(min(2, len(buckets)))]
        for i, bucket in enumerate(buckets):
            at = 0
            for part in bucket:
                self.parts.append((i, part, self.buffers[i % 2][at : at + part.nbytes]))
                at += part.padded_nbytes

    def finish_handshake(self, version: int) -> None:
        """Receive the version and size that the rank serves. Raises LinkError if they are not as expected."""
        message = self._link.buffer(16)
        self._link.finish(self._link.receive(message))
        served, total = message.view(torch.int64).tolist()
        expected = sum(part.nbytes for _, part, _ in self.parts)
        if (served, total) != (version, expected):
            raise LinkError(f"it serves {total} bytes of version {served}, expected {expected} of {version}")

    def begin(self) -> None:
        """Start receiving the first message."""
        self.taken = self.arrived = 0
        self._post()

    def wait_for(self, message: int) -> None:
        """Wait until this message has arrived; all before it were used. Raises LinkError."""
        while self.arrived <= message:
            if self._coming is None:
                raise LinkError("all messages were received, but another one is requested")
            self._link.finish(self._coming)
            self.arrived += 1
            # The previous message has been used, so its memory can receive the next one. Not earlier: on a
            # GPU, a receive that waits for the previous one may block other links in the same hardware
            # queue, and with them the rank that this one waits for.
            self._post()

    def close(self) -> None:
        """Close the link."""
        self._link.close()

    def _post(self) -> None:
        """Start receiving the next message, if there is one."""
        self._coming, number = None, self.arrived
        if number < len(self.buckets):
            message = self.buffers[number % 2][: message_bytes(self.buckets[number])]
            self._coming = self._link.receive(message)
