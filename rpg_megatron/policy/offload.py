"""Offloads optimizer state to host memory and frees gradients while colocated engines use the GPU."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rpg_megatron.policy import host_memory


class StateOffloader:
    """Moves the optimizer state of one rank between device and host memory, and frees its gradients.

    Tensors stay the same objects and are restored bit for bit; only their storage is freed. Weights stay on
    the device, since engines read them. Not collective; ``offload`` and ``reload`` may be called in any
    state.
    """

    def __init__(self, models: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._models, self._optimizer = models, optimizer
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] | None = None
        self._buffers: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def is_offloaded(self) -> bool:
        """Whether the state is in host memory: updates and saves are not possible then."""
        return self._offloaded is not None

    @torch.no_grad()
    def offload(self) -> int:
        """Free the device memory; returns the bytes moved to host memory, 0 if already offloaded.

        Host memory, pinned if the device is a GPU, is kept for the next call.
        """
        if self._offloaded is not None:
            return 0
        self._offloaded = []
        free = {size: list(buffers) for size, buffers in self._buffers.items()}
        for storage in self._storages():
            size = storage.nbytes()
            if free.get(size):
                host = free[size].pop()
            else:
                on_gpu = storage.device.type == "cuda"
                host = host_memory.host_tensor((size,), torch.uint8, pinned=on_gpu)
                self._buffers[size].append(host)
            host.copy_(_bytes(storage), non_blocking=True)
            self._offloaded.append((storage, host))
        torch.cuda.synchronize()  # the copies must be done before their source is freed
        for storage, _ in self._offloaded:
            storage.resize_(0)
        for model in self._models:
            model.offload_grad_buffers(empty_cache=False)
            for module in model.modules():
                # FP8 weights that Transformer Engine caches during a batch; the next batch recreates them.
                getattr(module, "_fp8_workspaces", {}).clear()
        torch.cuda.empty_cache()  # returns the freed memory from torch's cache to the device
        return sum(host.nbytes for _, host in self._offloaded)

    def reload(self, patience: float = 0.0) -> None:
        """Allocate the memory again and restore the state; gradients are zero.

        patience: seconds to wait for other processes on the GPU to free their memory.
        """
        end = time.monotonic() + patience
        while True:
            try:
                return self._reload()
            except torch.OutOfMemoryError:
                if time.monotonic() > end:
                    raise
                time.sleep(1.0)

    @torch.no_grad()
    def _reload(self) -> None:
        if self._offloaded is None:
            return
        torch.cuda.empty_cache()
        for storage, host in self._offloaded:
            storage.resize_(host.nbytes)
            _bytes(storage).copy_(host, non_blocking=True)
        for model in self._models:
            model.restore_grad_buffers()
        torch.cuda.synchronize()
        self._offloaded = None

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Each storage of the optimizer on the models' device that is not a weight's, once."""
        weights = [p for model in self._models for p in model.parameters()]
        device = weights[0].device
        pointers = {p.untyped_storage().data_ptr() for p in weights}
        for tensor in self._state():
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage.data_ptr() not in pointers:
                pointers.add(storage.data_ptr())
                yield storage

    def _state(self) -> Iterable[Tensor]:
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, Tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
