"""Bytes that tensors take while a block runs, counted exactly: every storage from creation to release."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocationWatch(TorchDispatchMode):
    """Counts the storages made by operations within the block, in forward and backward.

    Unlike the resident set of the process it knows neither allocator nor other memory, so its numbers repeat
    exactly. Memory that a kernel uses and frees before it returns is not counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        """Bytes made within the block: alive now, and at most at one time."""
        self.largest: tuple[int, ...] = ()
        """Shape of the tensor with the most elements."""
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record its outputs."""
        for before in tree_leaves((args, kwargs)):
            if isinstance(before, Tensor):
                self._see(before, made=False)
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                self._see(tensor, made=True)
        return out

    def _see(self, tensor: Tensor, *, made: bool) -> None:
        if made and tensor.numel() > torch.Size(self.largest).numel() * bool(self.largest):
            self.largest = tuple(tensor.shape)
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if made else 0
        self._known[key] = weakref.finalize(storage, self._forget, key, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size

    def __exit__(self, *args: Any) -> None:
        """Stop counting; ``live`` keeps the bytes that are still alive."""
        super().__exit__(*args)
        for end in list(self._known.values()):
            end.detach()
        self._known.clear()
