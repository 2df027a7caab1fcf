"""Transport ``cuda_ipc``: engines on the node read the trainers' GPU memory by CUDA IPC handles.

Publishing copies nothing. A worker reads the live parameters on its own GPU if a replica is there, else from
another GPU by peer access.
Handles are JSON, not pickle, so reading one runs no code.

Does not support torch's expandable segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``).
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from rpg_megatron.bridge.manifest import MANIFEST, Copy, Manifest, Shard
from rpg_megatron.bridge.publisher import (
    ManifestBuilder,
    PublishPlan,
    SliceSums,
    make_publish_plan,
    node_name,
)
from rpg_megatron.bridge.transports.shared_memory import require_private_folder
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import remove
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.system.collectives import gather_objects, run_together

_BYTES = (1, 4, 6)
"""Indices of the bytes in the result of ``UntypedStorage._share_cuda_()``; the rest are numbers and a bool.
"""


class HandleError(Exception):
    """GPU memory cannot be opened by its handle."""


class CudaIpcPublisher:
    """``Publisher`` whose engines read this rank's parameters in GPU memory."""

    def __init__(
        self,
        folder: Path,
        coordinates: RankCoordinates,
        params: Mapping[str, torch.Tensor],
        mapping: ModelMapping,
        dtype: torch.dtype,
    ) -> None:
        """folder: private folder for the manifest, the engines' RPG_BRIDGE_DIR.

        params: live parameters of element type ``dtype`` (or float32, see ``ModelMapping``) by Megatron name,
        on a GPU. With several nodes, each node publishes all weights, in a folder of its own.
        Raises UserError if parameters have another dtype, MappingError if the ranks of a node do not hold the
        whole model.
        """
        self.folder = run_together(lambda: require_private_folder(folder))
        self.coordinates, self.mapping, self.dtype = coordinates, mapping, dtype
        self._params, self._builder = params, ManifestBuilder(mapping, dtype)
        self._plan = make_publish_plan(coordinates, params, mapping, node_name(self.folder))
        replicas = self._plan.replicas
        self._owner = next(owner for owner, ranks in replicas.items() if coordinates.rank in ranks)
        """The sending rank whose parameters this rank holds: itself, or a rank of the node's first replica.
        """
        self._handles: dict[int, tuple[str, str]] = {}
        self._sent: _Memory | None = None
        self._known: dict[int, _Memory] = {}
        run_together(self._check_types)

    @torch.no_grad()
    def publish(self, version: int, only: Collection[str] | None = None) -> Manifest | None:
        """Let engines read the current weights; returns the manifest (of the first node) on rank 0.

        Engines may read any replica. Checksums are those of the node's first replica, so reading another one
        also verifies that both are equal.
        """
        plan = self._plan.restricted(only)

        def own() -> tuple[SliceSums, _Memory]:
            torch.cuda.synchronize()
            return plan.sum_boxes(self._params, self.dtype), self._memory(plan)

        sums, memory = run_together(own)
        # Addresses rarely change, so they are sent only when they did.
        contribution = self.coordinates.rank, sums, None if memory == self._sent else memory
        gathered = gather_objects(contribution, tuple[int, SliceSums, _Memory | None], plan.group)
        self._sent = memory
        if self.coordinates.rank != self._plan.lead:
            return None
        self._known |= {rank: memory for rank, _, memory in gathered if memory is not None}
        shards: list[Shard] = []
        where: dict[tuple[int, str], tuple[int, int]] = {}
        for rank in plan.ranks:
            for param, (index, offset) in self._known[rank].places.items():
                where[rank, param] = len(shards) + index, offset
            shards += self._shards(rank)
        sums_by_rank = {rank: sums_of_rank for rank, sums_of_rank, _ in gathered}
        return self._builder.write(
            *(self.folder, plan, tuple(shards), where, sums_by_rank), transport="cuda_ipc", version=version
        )

    def retract(self) -> None:
        """From here on the weights may change; engines that are still reading detect it."""
        if self.coordinates.rank == self._plan.lead:
            remove(self.folder / MANIFEST)

    def close(self) -> None:
        """Remove the manifest."""
        self.retract()

    def _check_types(self) -> None:
        slices = self._plan.slices_of(self._owner)
        needed = {p: self._plan.dtype_of(name, self.dtype) for name, _, p, _ in slices}
        if wrong := sorted({str(d) for p, need in needed.items() if (d := self._params[p].dtype) != need}):
            raise UserError(
                f"bridge.transport: cuda_ipc needs parameters of {self.dtype}, they are {', '.join(wrong)}; "
                "use another transport"
            )

    def _memory(self, plan: PublishPlan) -> _Memory:
        """Where this rank holds the published parameters."""
        memory = _Memory([], [], {})
        index: dict[int, int] = {}
        for _, _, name, _ in plan.slices_of(self._owner):
            param = self._params[name]
            storage = param.untyped_storage()
            address = storage.data_ptr()
            if address not in index:
                index[address] = len(memory.sizes)
                # Export each storage once: torch keeps a record of every export.
                if address not in self._handles:
                    self._handles[address] = _export(storage)
                memory.handles.append(self._handles[address])
                memory.sizes.append(storage.nbytes())
            memory.places[name] = index[address], int(param.storage_offset()) * param.element_size()
        return memory

    def _shards(self, owner: int) -> Iterator[Shard]:
        """The storages of a sending rank, each with its copies."""
        memory = self._known[owner]
        equal = [
            (rank, self._known[rank])
            for rank in self._plan.replicas[owner]
            # Skip replicas with another memory layout: the sender's offsets would be wrong for them.
            if (self._known[rank].sizes, self._known[rank].places) == (memory.sizes, memory.places)
        ]
        for i, size in enumerate(memory.sizes):
            yield Shard(owner, size, copies=tuple(Copy(rank, *m.handles[i]) for rank, m in equal))


@dataclass(frozen=True)
class _Memory:
    """Where a rank's parameters are in GPU memory."""

    sizes: list[int]
    """Bytes of each storage."""
    handles: list[tuple[str, str]]
    """(UUID of the GPU, CUDA IPC handle) of each storage."""
    places: dict[str, tuple[int, int]]
    """Megatron name -> (index of the storage, byte offset in it)."""


def _export(storage: torch.UntypedStorage) -> tuple[str, str]:
    parts = list(storage._share_cuda_())
    gpu = str(torch.cuda.get_device_properties(parts[0]).uuid)
    parts[7] = False  # no event to wait for: ``publish`` has synchronised
    for i in _BYTES:
        parts[i] = base64.b64encode(parts[i]).decode()
    return gpu, json.dumps(parts[1:])


def choose_copies(shards: Sequence[Shard], gpu: str) -> list[Copy]:
    """The copy of each shard that a worker reads: the one on its own GPU (a UUID), if there is one.

    Other shards are read from the same replica, so that a GPU is read by the workers of one replica only. A
    worker on none of these GPUs reads a single replica; such workers are spread over the replicas.
    """
    near = [i for shard in shards for i, copy in enumerate(shard.copies) if copy.gpu == gpu]
    replica = near[0] if near else zlib.crc32(gpu.encode())
    return [
        next((c for c in shard.copies if c.gpu == gpu), shard.copies[replica % len(shard.copies)])
        for shard in shards
    ]


def gpu_of(device: torch.device) -> str:
    """UUID of a GPU; empty on a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def open_memory(copy: Copy) -> torch.Tensor:
    """The memory of a copy as uint8. Raises HandleError if this process cannot open it.

    Opened from the current GPU, as one of its tensors, wherever it lies: CUDA then lets that GPU's kernels
    access it, which run on its streams.
    """
    arguments = [torch.cuda.current_device(), *json.loads(copy.handle)]
    for i in _BYTES:
        arguments[i] = base64.b64decode(arguments[i])
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    except RuntimeError as e:
        raise HandleError(
            f"memory of trainer rank {copy.rank} on GPU {copy.gpu} cannot be opened ({e}); let the engine "
            "see all GPUs of the node, and check with nvidia-smi topo -p2p r that they reach each other"
        ) from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
