"""Host memory that a GPU copies from and to directly, no larger than asked for.

Torch's own pinned memory comes in powers of two: its caching host allocator rounds up, to 128 GiB what should
be 92. So ordinary memory is registered with CUDA, and taken off its list again before it is freed.
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
"""Whether CUDA has refused memory, and this process has said so."""


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pinned: bool) -> Tensor:
    """A contiguous tensor in host memory, its values undefined.

    pinned: for copies from and to a GPU that go on while the CPU does other things. Where CUDA refuses, it is
    ordinary memory, copied more slowly, and a warning is logged once. Keep this very tensor as long as views
    of it are in use: the memory is pinned no longer than it lives.
    """
    nbytes = dtype.itemsize * math.prod(shape)
    if not pinned or not nbytes:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    # Whole pages, for those are what is registered: neighbours must not share one.
    room = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = torch.empty(room + mmap.PAGESIZE, dtype=torch.uint8, device="cpu")
    first = -memory.data_ptr() % mmap.PAGESIZE
    found = memory[first : first + nbytes].view(dtype).view(*shape)
    if _register(found.data_ptr(), room):
        # Not at the end of the process, when CUDA may be gone and nothing is left to be done.
        weakref.finalize(found, _unregister, found.data_ptr()).atexit = False
    return found


def _register(address: int, nbytes: int) -> bool:
    """Pin pages of this process; whether CUDA has done so."""
    global _refused
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code == 0:
        return True
    with suppress(RuntimeError):
        # CUDA remembers the failure, and torch takes it for that of the next kernel: this one.
        torch.ones(1, device="cuda")
    if not _refused:
        _refused = True
        logger.warning(
            "CUDA does not pin host memory (cudaHostRegister: error %d, %.2f GiB): copies between GPU and "
            "host are slower; see that the node has memory left",
            code,
            nbytes / 2**30,
        )
    return False


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
