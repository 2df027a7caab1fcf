"""Transport ``process_group``, trainer side: sends slices to engine workers on any node, by gloo or NCCL.

Nothing is gathered and no full copy is made: slices are packed from the live parameters into buckets while
sending. Each link has a thread, so a slow worker does not delay others. All data- and context-parallel
replicas send; each worker reads from one of them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rpg_megatron.bridge.manifest import Manifest, Shard
from rpg_megatron.bridge.publisher import (
    ManifestBuilder,
    PublishPlan,
    SliceSums,
    make_publish_plan,
    node_name,
)
from rpg_megatron.bridge.slice_table import SliceTable, TableCache
from rpg_megatron.bridge.transports.buckets import BucketPart, largest, message_bytes
from rpg_megatron.bridge.transports.process_group_link import SENDER, Link, LinkError, Rendezvous
from rpg_megatron.models.boxes import Box, Piece
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.placement import local_pieces
from rpg_megatron.system.collectives import broadcast_object, gather_objects, gather_on_first, run_together

logger = logging.getLogger("rpg_megatron.bridge")


def inbox(version: int, rank: int) -> str:
    """Name of the queue for workers' requests to a trainer rank."""
    return f"requests/{version}/{rank}"


class GroupPublisher:
    """``Publisher`` that serves this rank's parameters on request, from ``publish`` until ``retract``.

    Every rank constructs one and calls every method in the same order.
    """

    def __init__(
        self,
        address: str,
        coordinates: RankCoordinates,
        params: Mapping[str, torch.Tensor],
        mapping: ModelMapping,
        dtype: torch.dtype,
        *,
        timeout: float,
        bucket_bytes: int,
        colocated_in: Path | None = None,
        private: Path | None = None,
    ) -> None:
        """Make the publish plan; rank 0 starts the key-value store at ``address``, an address of its machine.

        private: on a single node, a private folder for the store, which then needs no address. params: live
        parameters by Megatron name. dtype: what engines receive. timeout: seconds per message. bucket_bytes:
        memory for messages in flight, per worker. colocated_in: RPG_BRIDGE_DIR of this node's engines if they
        share the trainers' GPUs. NCCL does not allow both ends on one GPU ("Duplicate GPU detected"), so
        messages then go through host memory by gloo, and workers prefer ranks of their own node.
        """
        self.coordinates, self.mapping, self.dtype = coordinates, mapping, dtype
        self._params, self._builder = params, ManifestBuilder(mapping, dtype)
        self._device = next((p.device for p in params.values()), torch.device("cpu"))
        self._plan = make_publish_plan(coordinates, params, mapping)
        backend = "nccl" if self._device.type == "cuda" and colocated_in is None else "gloo"
        hosted = run_together(
            lambda: (
                Rendezvous.host(address, timeout=timeout, backend=backend, private=private)
                if coordinates.rank == 0
                else None
            )
        )
        nodes = gather_objects(node_name(colocated_in.resolve()) if colocated_in else "", str)
        layout = {"bucket_bytes": bucket_bytes, "tensor": coordinates.tensor}
        place = broadcast_object(hosted.place | layout if hosted else None, dict[str, Any])
        self._rendezvous = run_together(lambda: hosted or Rendezvous.join(place))
        self._rendezvous.place = place
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for param, values in params.items():
            for piece in local_pieces(mapping, coordinates, param, values.shape):
                self._pieces.setdefault(piece.hf_name, []).append((param, piece))
        sizes = dict.fromkeys(self._plan.ranks, 0)
        for name, owners in self._plan.owners.items():
            for s in owners:
                sizes[s.rank] += s.piece.hf.numel * self._plan.dtype_of(name, dtype).itemsize
        self._shards = tuple(
            Shard(r, size, replicas=tuple((peer, nodes[peer]) for peer in self._plan.replicas[r]))
            for r, size in sizes.items()
        )
        self._index = {s.rank: i for i, s in enumerate(self._shards)}
        self._where = {
            (s.rank, s.param): (self._index[s.rank], 0)
            for owners in self._plan.owners.values()
            for s in owners
        }
        self._links: dict[str, _Sender] = {}
        self._published: torch.cuda.Event | None = None
        """On a GPU: recorded after all work that produced the published weights."""
        self._listening: int | None = None
        """Version whose requests are being served."""
        self._threads: list[threading.Thread] = []

    @torch.no_grad()
    def publish(self, version: int, only: Collection[str] | None = None) -> Manifest | None:
        """Serve the current weights; returns the manifest on rank 0, else None.

        The weights must not change before ``retract``. A failure on one rank is raised on all.
        """
        self.retract()
        while self._rendezvous.poll_request(inbox(version, self.coordinates.rank)):
            pass  # drop requests of an aborted sync of the same version
        plan = self._plan.restricted(only)
        sums = run_together(lambda: plan.sum_boxes(self._params, self.dtype, shared=True))
        gathered = gather_on_first((self.coordinates.rank, sums), tuple[int, SliceSums])
        manifest = None
        if self.coordinates.rank == 0:
            by_rank = dict(gathered)
            manifest = self._builder.build(
                plan,
                self._shards,
                self._where,
                by_rank,
                self._shared(by_rank, plan),
                transport="process_group",
                place=self._rendezvous.place,
                version=version,
            )
        run_together(lambda: self._rendezvous.store.set("manifest", manifest.to_json()) if manifest else None)
        if self._device.type == "cuda":
            self._published = torch.cuda.current_stream(self._device).record_event()
        if self._pieces:
            self._listening = version
            self._start(self._listen, version)
        return manifest

    def retract(self) -> None:
        """Stop serving, after pending transfers: from here on the weights may change."""
        if self._listening is not None:
            try:
                self._rendezvous.send_request(inbox(self._listening, self.coordinates.rank), {"kind": "stop"})
            except RuntimeError:
                self._threads.pop(0)  # the store has closed, so there are no more requests
        self._listening = None
        while self._threads:
            self._threads.pop().join()

    def close(self) -> None:
        """Close all links and the connection to the store."""
        self.retract()
        for sender in self._links.values():
            sender.link.close()
        self._links.clear()

    def _start(self, work: Any, *arguments: Any) -> None:
        def run() -> None:
            if self._device.type == "cuda":  # else pinned memory of each rank would allocate on the first GPU
                torch.cuda.set_device(self._device)
            work(*arguments)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()  # before it is in the list, since ``retract`` may join it at once
        self._threads.append(thread)

    def _listen(self, version: int) -> None:
        """Handle each incoming request in a thread of its own."""
        try:
            rendezvous = self._rendezvous.reconnect()
            while (request := rendezvous.wait_request(inbox(version, self.coordinates.rank)))[
                "kind"
            ] != "stop":
                self._start(self._answer, request, version)
        except (OSError, RuntimeError) as e:
            logger.warning("rank %d stops serving weights: %s", self.coordinates.rank, e)

    @torch.no_grad()
    def _answer(self, request: dict[str, Any], version: int) -> None:
        """Handle a request: ``hello`` opens a link and sets its slices, ``stream`` sends them."""
        name = str(request["link"])
        try:
            if request["kind"] == "hello":
                sender = self._links.get(name)
                if sender is None:
                    if request["buckets"] is None:
                        raise LinkError("the link is closed; the worker's next check opens a new one")
                    link = Link(self._rendezvous.reconnect(), name, SENDER, self._device)
                    sender = self._links[name] = _Sender(link, self._device)
                with sender.on_own_stream(self._published):
                    if request["buckets"] is not None:
                        located = [[self._locate(*part) for part in each] for each in request["buckets"]]
                        sender.plan(located)
                    sender.handshake(version)
            else:
                sender = self._links[name]
                with sender.on_own_stream(self._published):
                    sender.stream(self._params, self.dtype, self._plan)
        except Exception as e:
            logger.warning("rank %d, link %s: %s: %s", self.coordinates.rank, name, type(e).__name__, e)
            if (broken := self._links.pop(name, None)) is not None:
                broken.link.close()

    def _shared(
        self, sums: Mapping[int, SliceSums], plan: PublishPlan
    ) -> dict[tuple[str, int], tuple[int, ...]]:
        """For the manifest: the other shards that hold a slice with the same bits, and so may send it."""
        return {
            key: tuple(
                self._index[s.rank]
                for s in slices
                if sums[s.rank][key] == sums[plan.owners[key[0]][key[1]].rank][key]
            )
            for key, slices in plan.shared.items()
        }

    def _locate(self, name: str, start: list[int], extent: list[int]) -> tuple[BucketPart, str, Box]:
        """A part of a request in this rank's parameters."""
        box = Box(tuple(start), tuple(extent))
        for param, piece in self._pieces.get(name, []):
            cut = piece.cut(box)
            if cut is not None and cut.hf == box:
                size = self._plan.dtype_of(name, self.dtype).itemsize
                return BucketPart(name, box, box.numel * size), param, cut.local
        raise ValueError(
            f"a worker requested {name} {box} from rank {self.coordinates.rank}, which does not hold it"
        )


class _Sender:
    """The trainer's end of one link."""

    def __init__(self, link: Link, device: torch.device) -> None:
        """device: where the parameters are."""
        self.link = link
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buckets: list[list[tuple[BucketPart, str, Box]]] = []
        self._buffers: list[torch.Tensor] = []
        self._tables: list[TableCache[SliceTable | None]] = []
        """Of each bucket; None where the slices are cast, or not packed on a GPU."""

    @contextmanager
    def on_own_stream(self, published: torch.cuda.Event | None) -> Iterator[None]:
        """Run the block's GPU work on this link's own stream; no effect on a CPU.

        A thread starts on the default stream. There its copies would queue behind the main thread's work,
        while the main thread may be waiting for this link. published: event that the work waits for.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if published is not None:
                self._stream.wait_event(published)
            yield

    def plan(self, buckets: list[list[tuple[BucketPart, str, Box]]]) -> None:
        """Set what to send from now on; allocates two buckets: one is packed while the other is sent."""
        self._buckets = buckets
        size = largest([tuple(p for p, _, _ in b) for b in buckets])
        self._buffers = [self.link.buffer(size) for _ in range(min(2, len(buckets)))]
        self._tables = [TableCache() for _ in buckets]

    def handshake(self, version: int) -> None:
        """Send the worker the version that this rank serves and the number of bytes that it will send."""
        total = sum(p.nbytes for bucket in self._buckets for p, _, _ in bucket)
        message = self.link.buffer(16)
        message.view(torch.int64).copy_(torch.tensor([version, total]))
        self.link.finish(self.link.send(message))

    def stream(self, params: Mapping[str, torch.Tensor], dtype: torch.dtype, plan: PublishPlan) -> None:
        """Send all buckets once; each is packed while the one before it is sent.

        A send starts only after the previous one ended: a send that waits on the GPU could block other links.
        """
        pending: Any = None
        for i, bucket in enumerate(self._buckets):
            message = self._buffers[i % 2][: message_bytes(tuple(p for p, _, _ in bucket))]

            def parts(
                bucket: Any = bucket, message: Any = message
            ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
                at = 0
                for part, param, local in bucket:
                    space = message[at : at + part.nbytes].view(plan.dtype_of(part.hf_name, dtype))
                    yield params[param].detach()[local.slices()], space.view(local.extent)
                    at += part.padded_nbytes

            memory = [message, *(params[param] for _, param, _ in bucket)]
            table = self._tables[i].get(dtype, memory, partial(_copies, parts))
            if table is not None:
                table.copy()
            else:
                for values, space in parts():
                    space.copy_(values)
            if pending is not None:
                self.link.finish(pending)
            pending = self.link.send(message)
        if pending is not None:
            self.link.finish(pending)


def _copies(parts: Callable[[], Iterator[tuple[torch.Tensor, torch.Tensor]]]) -> SliceTable | None:
    """The table of these copies, if they are bit by bit and within a GPU."""
    pairs = list(parts())
    if any((a.dtype, a.device) != (b.dtype, b.device) or a.device.type != "cuda" for a, b in pairs):
        return None
    return SliceTable([(a, (0,) * a.dim()) for a, _ in pairs], [b for _, b in pairs])
