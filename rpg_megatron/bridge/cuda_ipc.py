"""Memory of one GPU in two processes: CUDA IPC handles of the trainer's parameters.

Nothing is copied to publish: engines on the same node read the live parameters, on the GPU where they lie or,
between GPUs that reach each other, over their link. A handle is JSON, so that reading one runs no code.

Not for memory from torch's expandable segments (``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True``).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from rpg_megatron.bridge.agreement import Sums, agree, describe, node_name
from rpg_megatron.bridge.collective import gather_objects, run_together
from rpg_megatron.bridge.layouts import Layout
from rpg_megatron.bridge.manifest import MANIFEST, Manifest, Shard, write_private
from rpg_megatron.bridge.plan import Placement
from rpg_megatron.bridge.shared_memory import require_private_folder
from rpg_megatron.config.errors import UserError

_BYTES = (1, 4, 6)
"""Which parts of ``UntypedStorage._share_cuda_()`` are bytes; the others are numbers and a truth value."""


class HandleError(Exception):
    """Memory cannot be opened by its handle."""


class CudaIpcPublisher:
    """Lets engines on this node read this rank's parameters on their GPU; see ``Publisher``."""

    def __init__(
        self,
        folder: Path,
        placement: Placement,
        params: Mapping[str, torch.Tensor],
        layout: Layout,
        dtype: torch.dtype,
    ) -> None:
        """folder: private folder for the manifest, the engines' RPG_BRIDGE_DIR.

        params: live parameters of element type ``dtype`` by Megatron name, on a GPU.
        On several nodes each has all of the weights, and a folder of its own.
        Raises UserError if parameters are of another type, LayoutError if the ranks of a node together do not
        hold the model.
        """
        self.folder = run_together(lambda: require_private_folder(folder))
        self.placement, self.layout, self.dtype = placement, layout, dtype
        self._params = params
        self._agreement = agree(placement, params, layout, node_name(self.folder))
        self._handles: dict[int, str] = {}
        run_together(self._check_types)

    @torch.no_grad()
    def publish(self, generation: int) -> Manifest | None:
        """Let engines read the present weights; returns the manifest on rank 0, else None.

        On several nodes it is that of the first one.
        """

        def own() -> tuple[Sums, list[Shard], dict[str, tuple[int, int]]]:
            torch.cuda.synchronize()
            return self._agreement.sum_boxes(self._params, self.dtype), *self._shards()

        gathered = gather_objects((self.placement.rank, *run_together(own)))
        if self.placement.rank != self._agreement.lead:
            return None
        sources = set(self._agreement.ranks)
        gathered = [part for part in gathered if part[0] in sources]
        shards: list[Shard] = []
        where: dict[tuple[int, str], tuple[int, int]] = {}
        for rank, _, held, places in gathered:
            for param, (index, offset) in places.items():
                where[rank, param] = len(shards) + index, offset
            shards += held
        path = self.folder / MANIFEST
        manifest = describe(
            self._agreement,
            self.layout,
            self.dtype,
            tuple(shards),
            where,
            {rank: found for rank, found, _, _ in gathered},
            transport="cuda_ipc",
            # On several nodes each engine looks into its own folder.
            place={"manifest": str(path) if self._agreement.alone else MANIFEST},
            generation=generation,
        )
        write_private(path, manifest.to_json())
        return manifest if self.placement.rank == 0 else None

    def retract(self) -> None:
        """From here on the weights may change: engines that still read notice it."""
        if self.placement.rank == self._agreement.lead:
            (self.folder / MANIFEST).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the manifest."""
        self.retract()

    def _check_types(self) -> None:
        found = {str(self._params[p].dtype) for _, _, p, _ in self._agreement.mine()}
        if wrong := sorted(found - {str(self.dtype)}):
            raise UserError(f"parameters are {', '.join(wrong)}, engines are to receive {self.dtype}")

    def _shards(self) -> tuple[list[Shard], dict[str, tuple[int, int]]]:
        """This rank's pieces of memory, and in which of them, and where, each parameter lies."""
        shards: list[Shard] = []
        index: dict[int, int] = {}
        places = {}
        for _, _, name, _ in self._agreement.mine():
            param = self._params[name]
            storage = param.untyped_storage()
            if storage.data_ptr() not in index:
                index[storage.data_ptr()] = len(shards)
                # Once for each piece of memory: every export would add to a chain that torch keeps.
                handle = self._handles.setdefault(storage.data_ptr(), "") or _export(storage)
                self._handles[storage.data_ptr()] = handle
                shards.append(Shard(self.placement.rank, storage.nbytes(), handle=handle))
            places[name] = index[storage.data_ptr()], param.storage_offset() * param.element_size()
        return shards, places


def _export(storage: torch.UntypedStorage) -> str:
    parts = list(storage._share_cuda_())
    gpu = str(torch.cuda.get_device_properties(parts[0]).uuid)
    parts[7] = False  # no event to wait for: ``publish`` has synchronised
    for i in _BYTES:
        parts[i] = base64.b64encode(parts[i]).decode()
    return json.dumps([gpu, *parts[1:]])


def open_memory(shard: Shard) -> torch.Tensor:
    """The memory of a shard, as bytes on its GPU. Raises HandleError if this process cannot reach it."""
    gpu, *parts = json.loads(shard.handle)
    device = _find_gpu(gpu)
    arguments = [device, *parts]
    for i in _BYTES:
        arguments[i] = base64.b64decode(arguments[i])
    try:
        storage = torch.UntypedStorage._new_shared_cuda(*arguments)
    except RuntimeError as e:
        raise HandleError(f"memory of {shard} on GPU {gpu} cannot be opened ({e})") from None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _find_gpu(uuid: str) -> int:
    """Number of a GPU in this process: processes may see different GPUs, in different order."""
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise HandleError(
        f"GPU {uuid} of the trainer is hidden from this engine; let engines see all GPUs of the node"
    )
