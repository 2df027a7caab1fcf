"""GPU state in host memory: how much memory is allocated, how it is copied, when it is freed.

Why: torch's pinned memory takes up to twice the requested size, a blocking copy stops the GPU once per
tensor, and memory must not be freed while CUDA has it registered. CUDA's two functions are replaced. Not
covered: that copies are fast, and that memory is pinned (GPUs).
"""

import gc
import logging
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpg_megatron.config.objective import AnchorSettings
from rpg_megatron.policy import anchor, host_memory, offload
from rpg_megatron.policy.host_memory import host_tensor

SIZES = [1, 5000, 3 << 20, (1 << 22) + 1]


class Runtime:
    """CUDA's list of registered memory."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}
        self.code = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        if self.code == 0:
            registered = [range(a, a + n) for a, n in self.held.items()]
            assert not any(max(r.start, address) < min(r.stop, address + nbytes) for r in registered)
            self.held[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        assert _mapped(address)  # unregistered before it is freed
        del self.held[address]
        return 0


def _mapped(address: int) -> bool:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in lines]
    return any(int(a, 16) <= address < int(b, 16) for a, b in spans)


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    fake = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(host_memory, "_refused", False)
    yield fake
    gc.collect()
    assert fake.held == {}


def test_pinned_memory_is_what_was_asked_for_in_whole_pages(runtime: Runtime) -> None:
    tensors = [host_tensor((size,), torch.uint8, pinned=True) for size in SIZES]
    for size, tensor in zip(SIZES, tensors, strict=True):
        assert tensor.data_ptr() % mmap.PAGESIZE == 0
        assert runtime.held[tensor.data_ptr()] == -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        assert tensor.untyped_storage().nbytes() <= size + 2 * mmap.PAGESIZE
    weight = host_tensor((3, 5), torch.bfloat16, pinned=True)
    weight.fill_(2.0)
    assert (weight.shape, weight.dtype, weight.is_contiguous()) == ((3, 5), torch.bfloat16, True)
    assert len(runtime.held) == 5
    del tensor, tensors[-1]
    assert len(runtime.held) == 4


def test_a_refused_pin_gives_ordinary_memory_and_one_warning(runtime: Runtime, caplog) -> None:
    runtime.code = 2
    with caplog.at_level(logging.WARNING):
        for size in SIZES:
            tensor = host_tensor((size,), torch.uint8, pinned=True)
            assert int(tensor.fill_(7).sum()) == 7 * size
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "CUDA cannot pin host memory (cudaHostRegister"
    ]


class Storage:
    """A piece of GPU memory."""

    device = torch.device("cuda", 0)

    def __init__(self, size: int) -> None:
        self.memory = torch.arange(size) % 251

    def nbytes(self) -> int:
        return len(self.memory)

    def resize_(self, size: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.int64)


def test_parked_state_takes_its_own_size_once(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    storages = [Storage(size) for size in SIZES]
    monkeypatch.setattr(offload.StateOffloader, "_storages", lambda self: storages)
    monkeypatch.setattr(offload, "_bytes", lambda storage: storage.memory)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    offloader = offload.StateOffloader([], None)  # type: ignore[arg-type]
    before = [s.memory.clone() for s in storages]
    for _ in range(3):
        assert offloader.offload() == sum(SIZES)
        assert sum(runtime.held.values()) <= sum(SIZES) + len(SIZES) * mmap.PAGESIZE
        offloader.reload()
        assert all(torch.equal(s.memory, b) for s, b in zip(storages, before, strict=True))
    assert len(runtime.held) == len(SIZES)
    del offloader


class Copies(TorchDispatchMode):
    """Counts copied elements and blocking copies, and has the size of the largest clone."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.copied = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name == "copy_":
            self.waits += not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False))
            self.copied += args[0].numel()
        elif name == "_to_copy":
            self.waits += not (kwargs or {}).get("non_blocking", False)
        elif name == "clone":
            self.largest = max(self.largest, args[0].numel())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_anchor_changes_places_without_a_wait_for_each_weight(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(anchor, "_PART", 1000, raising=False)
    torch.manual_seed(3)
    weights = [torch.nn.Parameter(torch.randn(s).to(dtype)) for s in [(50, 70), (1000,), (3,), (2001,)]]
    initial = [w.detach().clone() for w in weights]
    held_anchor = anchor.HeldAnchor(weights, AnchorSettings(type="fixed"))
    with torch.no_grad():
        for w in weights:
            w.mul_(1.7).add_(0.1)
    later = [w.detach().clone() for w in weights]
    total = sum(w.numel() for w in weights)
    with Copies() as copies:
        for _ in range(2):
            with held_anchor.swapped_in():
                assert all(torch.equal(w, f) for w, f in zip(weights, initial, strict=True))
            assert all(torch.equal(w, n) for w, n in zip(weights, later, strict=True))
    assert copies.waits == 0
    assert copies.copied == 2 * 2 * 2 * total
    assert 0 < copies.largest <= 1000  # of the device's memory


def test_a_swap_waits_once_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    weight = torch.nn.Parameter(torch.ones(3))
    held_anchor = anchor.HeldAnchor([weight], AnchorSettings(type="fixed"))
    held_anchor._params = [OnGpu(weight)] * 5  # type: ignore[list-item]
    held_anchor._held = held_anchor._held * 5
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(1))
    with held_anchor.swapped_in():
        assert len(waits) == 1
    assert len(waits) == 2


class OnGpu:
    """A weight that says that it is on a GPU."""

    device = torch.device("cuda", 0)

    def __init__(self, weight: torch.Tensor) -> None:
        self.detach = weight.detach
