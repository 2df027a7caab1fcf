"""Trainer side of the live bridge where engines share no memory with it: each source rank sends slices.

Nothing is gathered and no full copy is made: a slice is packed from the live parameters into a bucket when it
is its turn. A thread a link, so that a slow worker holds up no other.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rpg_megatron.bridge.manifest import Manifest, Shard
from rpg_megatron.bridge.publisher import build_manifest, make_publish_plan, node_name
from rpg_megatron.bridge.transports.buckets import BucketPart, largest, room_of
from rpg_megatron.bridge.transports.process_group_link import SENDER, Link, LinkError, Rendezvous
from rpg_megatron.models.boxes import Box, Piece
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.placement import RankCoordinates
from rpg_megatron.system.collectives import gather_objects, run_together

logger = logging.getLogger("rpg_megatron.bridge")

_POLL_SECONDS = 0.005


def inbox(version: int, rank: int) -> str:
    """Queue in which workers leave their requests to a trainer rank."""
    return f"requests/{version}/{rank}"


class GroupPublisher:
    """Serves this rank's parameters to whoever asks, from ``publish`` until ``retract``.

    Every rank constructs one and calls every method in the same order; only sources serve, and with colocated
    engines the ranks that hold the same as they do.
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
    ) -> None:
        """Agree on who gives what; rank 0 starts the store at ``address``, one of its own.

        params: live parameters by Megatron name. dtype: what engines are to receive. timeout: seconds that a
        message may take. bucket_bytes: memory for messages under way, at each worker. colocated_in: the
        RPG_BRIDGE_DIR of this node's engines, if those are on the trainers' devices. NCCL refuses two ends on
        one GPU ("Duplicate GPU detected"), so messages then go through host memory, over gloo; and workers
        ask the ranks of their own node for whatever those hold.
        """
        self.coordinates, self.mapping, self.dtype = coordinates, mapping, dtype
        self._params = params
        self._device = next((p.device for p in params.values()), torch.device("cpu"))
        self._plan = make_publish_plan(coordinates, params, mapping)
        backend = "nccl" if self._device.type == "cuda" and colocated_in is None else "gloo"
        hosted = run_together(
            lambda: (
                Rendezvous.host(address, timeout=timeout, backend=backend) if coordinates.rank == 0 else None
            )
        )
        nodes = gather_objects(node_name(colocated_in.resolve()) if colocated_in else "")
        replicas = self._plan.replicas if colocated_in else {}
        near = {str(source): [(rank, nodes[rank]) for rank in ranks] for source, ranks in replicas.items()}
        known = {"bucket_bytes": bucket_bytes, "replicas": near}
        place = gather_objects(hosted.place | known if hosted else None)[0]
        self._rendezvous = run_together(lambda: hosted or Rendezvous.join(place))
        self._rendezvous.place = place
        own = coordinates.rank
        self._source = next((s for s, ranks in replicas.items() if own in ranks), own)
        """The rank whose part this one serves: its own, or that of one that holds the same."""
        self._pieces: dict[str, list[tuple[str, Piece]]] = {}
        for name, _, param, piece in self._plan.slices_of(self._source):
            self._pieces.setdefault(name, []).append((param, piece))
        sizes = dict.fromkeys(self._plan.ranks, 0)
        for owners in self._plan.owners.values():
            for s in owners:
                sizes[s.rank] += s.piece.hf.numel * dtype.itemsize
        self._shards = tuple(Shard(r, size) for r, size in sizes.items())
        index = {s.rank: i for i, s in enumerate(self._shards)}
        self._where = {
            (s.rank, s.param): (index[s.rank], 0) for owners in self._plan.owners.values() for s in owners
        }
        self._links: dict[str, _Sender] = {}
        self._published: torch.cuda.Event | None = None
        """On a GPU: behind everything that made the published weights."""
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    @property
    def nbytes(self) -> int:
        """Bytes of what this rank gives; 0 for ranks that nobody asks."""
        return next((s.size for s in self._shards if s.rank == self._source), 0)

    @torch.no_grad()
    def publish(self, version: int) -> Manifest | None:
        """Serve the present weights; returns the manifest on rank 0, else None.

        The weights must not change before ``retract``. A failure on one rank is raised on all.
        """
        if version < 0:
            raise ValueError(f"version {version}: must not be negative")
        self.retract()
        while self._rendezvous.take(inbox(version, self.coordinates.rank)):
            pass  # of a worker whose controller gave up when this version was published before
        sums = run_together(lambda: self._plan.sum_boxes(self._params, self.dtype))
        gathered = gather_objects((self.coordinates.rank, sums))
        manifest = None
        if self.coordinates.rank == 0:
            manifest = build_manifest(
                self._plan,
                self.mapping,
                self.dtype,
                self._shards,
                self._where,
                dict(gathered),
                transport="process_group",
                place=self._rendezvous.place,
                version=version,
            )
        run_together(lambda: self._rendezvous.store.set("manifest", manifest.to_json()) if manifest else None)
        if self._device.type == "cuda":
            self._published = torch.cuda.current_stream(self._device).record_event()
        if self.nbytes:
            self._stopping.clear()
            self._start(self._listen, version)
        return manifest

    def retract(self) -> None:
        """Stop serving, when what is under way is through: from here on the weights may change."""
        self._stopping.set()
        while self._threads:
            self._threads.pop().join()

    def close(self) -> None:
        """Hang up all links and let go of the store."""
        self.retract()
        for sender in self._links.values():
            sender.link.close()
        self._links.clear()

    def _start(self, work: Any, *arguments: Any) -> None:
        def run() -> None:
            if self._device.type == "cuda":  # or each rank's pinned memory would take room on the first GPU
                torch.cuda.set_device(self._device)
            work(*arguments)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()  # before it is in the list: ``retract`` may join it at once
        self._threads.append(thread)

    def _listen(self, version: int) -> None:
        """Take requests as they come, and answer each in a thread of its own."""
        try:
            rendezvous = self._rendezvous.reconnect()
            while not self._stopping.is_set():
                request = rendezvous.take(inbox(version, self.coordinates.rank))
                if request is None:
                    self._stopping.wait(_POLL_SECONDS)
                else:
                    self._start(self._answer, request, version)
        except (OSError, RuntimeError) as e:
            logger.warning("rank %d serves no more: %s", self.coordinates.rank, e)

    @torch.no_grad()
    def _answer(self, request: dict[str, Any], version: int) -> None:
        """One request: ``hello`` makes a link and says what will come over it, ``stream`` sends it."""
        name = str(request["link"])
        try:
            if request["kind"] == "hello":
                sender = self._links.get(name)
                if sender is None:
                    if request["buckets"] is None:
                        raise LinkError("the link was given up; the worker's next check makes a new one")
                    link = self._rendezvous.reconnect().connect(name, SENDER, self._device)
                    sender = self._links[name] = _Sender(link, self._device)
                with sender.on_own_stream(self._published):
                    if request["buckets"] is not None:
                        sender.plan(self._find(request["buckets"]))
                    sender.handshake(version)
            else:
                sender = self._links[name]
                with sender.on_own_stream(self._published):
                    sender.stream(self._params, self.dtype)
        except Exception as e:
            logger.warning("rank %d, link %s: %s: %s", self.coordinates.rank, name, type(e).__name__, e)
            if (broken := self._links.pop(name, None)) is not None:
                broken.link.close()

    def _find(self, buckets: list[list[Any]]) -> list[list[tuple[BucketPart, str, Box]]]:
        """Where the parts of a request lie in this rank's parameters."""
        return [[self._locate(*part) for part in bucket] for bucket in buckets]

    def _locate(self, name: str, start: list[int], extent: list[int]) -> tuple[BucketPart, str, Box]:
        wanted = Box(tuple(start), tuple(extent))
        for param, piece in self._pieces.get(name, []):
            cut = piece.cut(wanted)
            if cut is not None and cut.hf == wanted:
                return BucketPart(name, wanted, wanted.numel * self.dtype.itemsize), param, cut.local
        raise ValueError(
            f"a worker asks rank {self.coordinates.rank} for {name} {wanted}, which it does not hold"
        )


class _Sender:
    """This rank's end of one link."""

    def __init__(self, link: Link, device: torch.device) -> None:
        """device: where the parameters are."""
        self.link = link
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._buckets: list[list[tuple[BucketPart, str, Box]]] = []
        self._buffers: list[torch.Tensor] = []

    @contextmanager
    def on_own_stream(self, published: torch.cuda.Event | None) -> Iterator[None]:
        """Let this thread's GPU work neither wait for other threads' nor hold it up; on a CPU nothing.

        A thread begins on the default stream. There its copies would queue behind all that the main thread
        has begun, and the main thread may be waiting for this very link.
        published: what the work has to come after.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            if published is not None:
                self._stream.wait_event(published)
            yield

    def plan(self, buckets: list[list[tuple[BucketPart, str, Box]]]) -> None:
        """What to send from now on; memory for two buckets: one is packed while one is sent."""
        self._buckets = buckets
        size = largest([tuple(p for p, _, _ in b) for b in buckets])
        self._buffers = [self.link.buffer(size) for _ in range(min(2, len(buckets)))]

    def handshake(self, version: int) -> None:
        """Tell the worker that this rank serves a version, and how many bytes of it are for the worker."""
        total = sum(p.nbytes for bucket in self._buckets for p, _, _ in bucket)
        message = self.link.buffer(16)
        message.view(torch.int64).copy_(torch.tensor([version, total]))
        self.link.finish(self.link.send(message))

    def stream(self, params: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        """Send all buckets, once: one is packed while the one before it is on its way.

        No send waits behind another one on the GPU, where it could hold up other links' work.
        """
        under_way: Any = None
        for i, bucket in enumerate(self._buckets):
            message = self._buffers[i % 2][: room_of(tuple(p for p, _, _ in bucket))]
            at = 0
            for part, param, local in bucket:
                values = params[param].detach()[local.slices()]
                message[at : at + part.nbytes].view(dtype).view(local.extent).copy_(values)
                at += part.room
            if under_way is not None:
                self.link.finish(under_way)
            under_way = self.link.send(message)
        if under_way is not None:
            self.link.finish(under_way)
