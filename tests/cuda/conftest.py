"""The CUDA builds of vLLM and Transformer Engine, up to the first kernel, without a GPU: ``make test-cuda``.

The driver's libraries are stand-ins (stubs.c), and torch answers as on a node of eight H100s. Skipped
elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 << 30,
    multi_processor_count=132,
    warp_size=32,
    shared_memory_per_multiprocessor=228 << 10,
    shared_memory_per_block_optin=227 << 10,
    L2_cache_size=50 << 20,
    uuid="GPU-0",
    gcnArchName="",
)


@pytest.fixture(scope="session", autouse=True)
def h100() -> Iterator[SimpleNamespace]:
    """Lets torch find eight H100s; no kernel can run."""
    if "RPG_CUDA_STUBS" not in os.environ:
        pytest.skip("needs the CUDA packages with stand-ins for the driver: make test-cuda")
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for module in (torch.cuda, torch.accelerator):
            patch.setattr(module, "is_available", lambda: True)
            patch.setattr(module, "device_count", lambda: 8)
            patch.setattr(module, "synchronize", lambda *_: None)
        patch.setattr(torch.cuda, "_device_count_nvml", lambda: 8)  # vLLM's count
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        patch.setattr(torch.cuda, "get_device_properties", lambda *_: H100)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (H100.major, H100.minor))
        patch.setattr(torch.cuda, "get_device_name", lambda *_: H100.name)
        yield H100
