"""Pinned host memory of exactly the requested size, for copies from and to a GPU.

Torch's pinned-memory allocator rounds up to powers of two, for example 92 GiB to 128 GiB. So ordinary memory
is registered with CUDA, and unregistered before it is freed.
"""

from __future__ import annotations

import logging
import math
import mmap
import weakref
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

logger = logging.getLogger("rpg_megatron.policy")

_refused = False
"""Whether a failed registration has been logged in this process."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A contiguous, uninitialised tensor in host memory.

    pinned: for asynchronous copies from and to a GPU. If CUDA cannot pin it, the memory is pageable, copies
    are slower, and a warning is logged once. Keep this tensor while views of it are in use: its memory is
    unpinned when it is freed.
    """
    nbytes = dtype.itemsize * math.prod(shape)
    if not pinned or not nbytes:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    # Full pages, since CUDA registers pages: two tensors must not share one.
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.empty(room + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    first = -memory.data_ptr() % mmap.PAGESIZE
    tensor = memory[first : first + nbytes].view(dtype).view(*shape)
    if _register(tensor.data_ptr(), room):
        # Not at process exit, when CUDA may be shut down already.
        weakref.finalize(tensor, _unregister, tensor.data_ptr()).atexit = False
    return tensor


def _register(address: int, nbytes: int) -> bool:
    """Pin pages of this process; returns whether it succeeded."""
    global _refused
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code == 0:
        return True
    with suppress(RuntimeError):
        # CUDA keeps the error, and torch would report it for its next kernel: run one here to clear it.
        torch.ones(1, device="cuda")
    if not _refused:
        _refused = True
        logger.warning(
            "CUDA cannot pin host memory (cudaHostRegister: error %d, %.2f GiB), so copies between GPU and "
            "host are slower; check the node's free memory",
            code,
            nbytes / 2**30,
        )
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
