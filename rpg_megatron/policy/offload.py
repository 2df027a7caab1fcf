"""Device memory that is lent to the engines: optimizer state waits in host memory, gradients are let go."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from rpg_megatron.policy import host_memory


class StateOffloader:
    """The optimizer state and the gradients of one rank, on the device or away from it.

    Tensors stay the same objects and come back with the same bits; only their memory goes. Weights stay, for
    engines read them. Nothing is communicated; ``offload`` and ``reload`` may be called in any state.
    """

    def __init__(self, models: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer) -> None:
        self._models, self._optimizer = models, optimizer
        self._offloaded: list[tuple[torch.UntypedStorage, Tensor]] | None = None
        self._buffers: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def is_offloaded(self) -> bool:
        """Whether the state is in host memory: no update can be made, nothing be saved."""
        return self._offloaded is not None

    @torch.no_grad()
    def offload(self) -> int:
        """Free the device's memory; returns how many bytes are in host memory now, 0 if they were before.

        Host memory, pinned where the device is a GPU, is kept for the next time.
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
        torch.cuda.synchronize()  # before the memory that is read from is given away
        for storage, _ in self._offloaded:
            storage.resize_(0)
        for model in self._models:
            model.offload_grad_buffers(empty_cache=False)
            for module in model.modules():
                # Weights in FP8 that Transformer Engine keeps of a batch; the next one makes them anew.
                getattr(module, "_fp8_workspaces", {}).clear()
        torch.cuda.empty_cache()  # torch would keep what was freed for itself
        return sum(host.nbytes for _, host in self._offloaded)

    @torch.no_grad()
    def reload(self) -> None:
        """Take the memory again: the state as it was, gradients zero."""
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
        """Each piece of memory of the optimizer's that is on the models' device and not theirs, once."""
        weights = [p for model in self._models for p in model.parameters()]
        device = weights[0].device
        seen = {p.untyped_storage().data_ptr() for p in weights}
        for tensor in self._state():
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.nbytes() and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                yield storage

    def _state(self) -> Iterable[Tensor]:
        for part in getattr(self._optimizer, "chained_optimizers", [self._optimizer]):
            for group in part.optimizer.param_groups:
                yield from group["params"]
            for state in part.optimizer.state.values():
                yield from (x for x in state.values() if isinstance(x, Tensor))


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
