"""A process that acts as one rank of a job on H100s: fake CUDA tensors, fake NCCL and gloo groups.

torch's FakeTensorMode gives tensors that have a shape, a dtype, strides and a device, and no values. On them
the product runs as it is. ``Watch`` sees every operation, and with it

- what no GPU accepts: tensors of two devices in one operation, ``.numpy()`` of a CUDA tensor, dtypes;
- what NCCL or gloo does not accept: a tensor of the other's device, one that is not contiguous, a dtype that
  NCCL lacks; and an object collective or a barrier in an NCCL group, which it does accept;
- each time that the host waits for the device, with its line: values read (``item``, ``bool``, ``tolist``),
  shapes that depend on values (boolean indices, ``unique``, ``bincount``), copies that are not both pinned
  and non_blocking, ``synchronize``. Small integer tensors keep their values, for Megatron reads some of them.

It cannot show the order of streams or groups, memory, kernels and their limits, nor any value: a float that
is read is 0, a condition true unless it asks for ``any`` (floats: ``flags_are_set``). Transformer Engine is
not installed where it runs, nor is FLA.

It patches torch permanently, so each use needs a process of its own, which ``leave`` ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._subclasses.fake_tensor as fake_tensor
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from rpg_megatron.bridge import slice_table
from rpg_megatron.system import collectives
from rpg_megatron.system.encoding import decode, encode

REPOSITORY = f"{Path(__file__).resolve().parents[2]}/"
OURS = "rpg_megatron"
aten = torch.ops.aten

_GPUS = 8
_SMALL = 256
"""Integer tensors of at most this many elements keep their values."""
_NCCL_DTYPES = {
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
}
"""Types that ProcessGroupNCCL of torch 2.13 maps to an NCCL type."""
_NAMES = {
    torch.float32: "Float",
    torch.bfloat16: "BFloat16",
    torch.float16: "Half",
    torch.float64: "Double",
    torch.int64: "Long",
    torch.int32: "Int",
    torch.uint8: "Byte",
    torch.bool: "Bool",
}


class Recorder:
    """Faults and waits so far. A place is ``file:line function``, in this repository or another package."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.waits: Counter[tuple[str, str]] = Counter()
        """(owner of the line: rpg_megatron or another package, place and operation) -> count."""
        self.messages: Counter[str] = Counter()
        self.launches: Counter[str] = Counter()
        """Kernels of ``bridge/slice_kernels``."""
        self.cached = False
        """Whether torch would keep freed memory of the GPU from others: no ``empty_cache`` followed."""
        self.communicators: dict[str, tuple[int, set[str]]] = {}
        """Size of each NCCL group and its operations, by its name."""

    def fault(self, message: str) -> None:
        text = f"{place()[1]}: {message}"
        if text not in self.faults:
            self.faults.append(text)

    def wait(self, operation: str) -> None:
        owner, where = place()
        self.waits[owner, f"{where}: {operation}"] += 1


RECORDER = Recorder()


def place() -> tuple[str, str]:
    """Owner and place of the running line: the innermost one outside of torch, numpy and this module.

    An operation that autograd runs counts as ours unless shown otherwise: no line calls it.
    """
    frame, backward = sys._getframe(1), ""
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if function in ("_engine_run_backward", "custom_backward"):  # torch's way into the engine; Megatron's
            node = torch._C._current_autograd_node()
            backward = f"backward of {node.name()}, called from " if node is not None else ""
        if file.startswith(REPOSITORY) and "/site-packages/" not in file:
            if file != __file__:
                return OURS, f"{backward}{file.removeprefix(REPOSITORY)}:{frame.f_lineno} {function}"
        elif "/site-packages/" in file:
            inside = file.partition("/site-packages/")[2]
            package = inside.split("/")[0].removesuffix(".py")
            if package not in ("torch", "numpy"):
                owner = OURS if backward else package
                return owner, f"{backward}{inside}:{frame.f_lineno} {function}"
        frame = frame.f_back
    return OURS, "?"


# --- values of small integer tensors, and memory that is pinned ---------------------------------------------

_PINNED: dict[int, torch.UntypedStorage] = {}
"""Kept alive, or another storage could get the same number."""
_PLACES: dict[int, tuple[torch.UntypedStorage, torch.device]] = {}
"""Devices of storages that were requested: torch has all fake storages on ``meta``. Kept alive, too."""
_ADDRESSES: dict[int, tuple[int, torch.UntypedStorage]] = {}
"""Addresses of storages that were requested, 64 GiB apart. Kept alive, too."""
_ROOM = 1 << 36


def _pinned(x: Tensor) -> bool:
    return x.untyped_storage()._cdata in _PINNED


def _address(storage: torch.UntypedStorage) -> int:
    return _ADDRESSES.setdefault(storage._cdata, (_ROOM * (len(_ADDRESSES) + 1), storage))[0]


def set_value(x: Tensor, value: Tensor) -> None:
    """Give a fake tensor a value, for when it is read."""
    x._value = value  # type: ignore[attr-defined]


def _value_of(x: Any) -> Any:
    """A tensor's value; None if it has none. Anything else is returned as it is."""
    if not isinstance(x, Tensor):
        return x
    if isinstance(x, FakeTensor):
        return getattr(x, "_value", None)
    return x if x.numel() <= _SMALL else None


def _keep_value(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Run the operation on the values too, where the result is a small integer tensor and all are known."""
    if not isinstance(out, FakeTensor) or out.is_floating_point() or out.numel() > _SMALL:
        return
    if func is aten._pin_memory.default:
        set_value(out, _value_of(args[0]))
        return
    flat = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    if (not flat and func.overloadpacket is not aten.arange) or any(_value_of(x) is None for x in flat):
        if func._schema.is_mutable and flat and flat[0] is out:
            set_value(out, None)  # type: ignore[arg-type]
        return
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "cpu"}
    kwargs = {k: v for k, v in kwargs.items() if k not in ("pin_memory", "non_blocking")}
    with _disable_current_modes():
        set_value(out, func(*tree_map(_value_of, args), **tree_map(_value_of, kwargs)))


def _read(x: Tensor) -> Any:
    """The result of ``item`` of a fake tensor."""
    value = _value_of(x)
    if value is not None:
        with _disable_current_modes():
            return value.item()
    if x.dtype is torch.bool:
        return not getattr(x, "_asks_for_any", False)
    return 0.0 if x.is_floating_point() else 0


# --- every operation ----------------------------------------------------------------------------------------


_ASK_FOR_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Watch(TorchDispatchMode):
    """Passes every operation on to the fake tensors and records faults and waits of a GPU."""

    def __torch_dispatch__(self, func: Any, types_: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten.is_pinned.default:
            return _pinned(args[0])
        if func.namespace == "c10d":
            _check_message(func, args)
        else:
            _count_wait(func, args, kwargs)
        try:
            # Not as fake tensors do it: for a constant they would pin real memory, which takes a driver.
            pinned = func is aten._pin_memory.default
            out = torch.empty_like(args[0], device="cpu") if pinned else func(*args, **kwargs)
        except Exception as e:
            RECORDER.fault(f"{func}: {type(e).__name__}: {str(e).splitlines()[0][:300]}")
            raise
        to_host = func is aten._to_copy.default and kwargs.get("non_blocking") and _type(out) == "cpu"
        if kwargs.get("pin_memory") or to_host or pinned:
            storage = out.untyped_storage()
            _PINNED[storage._cdata] = storage
        if func.namespace == "c10d" and func.overloadpacket.__name__ == "recv_":
            _receive(args[0])
        if func.overloadpacket is aten.any:
            out._asks_for_any = True
        elif func is aten._to_copy.default and out.dtype is torch.bool and args[0].is_floating_point():
            out._asks_for_any = not flags_are_set[0]
        elif func is aten._local_scalar_dense.default:
            return _read(args[0])
        _keep_value(func, args, kwargs, out)
        return out


def _receive(tensors: list[Tensor]) -> None:
    """Three integers over a pipeline are the shape of the next tensor; Megatron reads them."""
    for x in tensors:
        if x.dtype is torch.int64 and x.numel() == len(received_shape):
            with _disable_current_modes():
                set_value(x, torch.tensor(received_shape))


def _type(x: Any) -> str:
    return x.device.type if isinstance(x, Tensor) else ""


def _count_wait(func: Any, args: Any, kwargs: Any) -> None:
    """Does the host wait for the device in this operation?"""
    packet = func.overloadpacket
    first = args[0] if args else None
    if func in (aten._to_copy.default, aten.copy_.default):
        to, source = (args[0], args[1]) if packet is aten.copy_ else (None, args[0])
        target = _type(to) if to is not None else torch.device(kwargs.get("device") or source.device).type
        if target == _type(source):
            return
        host = to if target == "cpu" else source
        later = kwargs.get("non_blocking") or (packet is aten.copy_ and len(args) > 2 and args[2])
        if not later or (host is not None and not (_pinned(host) and host.is_contiguous())):
            how = "" if later else ", not non_blocking"
            memory = "" if host is None or _pinned(host) else ", pageable memory"
            RECORDER.wait(f"copy {_type(source)} -> {target}{how}{memory}")
    elif packet in (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_):
        if _type(first) != "cuda":
            return
        # Writing a single host value through a boolean index is a masked_fill.
        filled = packet is not aten.index and _type(args[2]) == "cpu" and args[2].numel() == 1
        for index in args[1]:
            if index is not None and index.dtype in (torch.bool, torch.uint8) and not filled:
                RECORDER.wait("boolean index (nonzero)")
            elif _type(index) == "cpu":
                RECORDER.wait("index in host memory")
    elif packet is aten.equal and first is args[1]:
        return  # torch compares neither values nor devices of a tensor and itself
    elif _type(first) == "cuda" and _ASK_FOR_VALUES & set(func.tags) and "output_size" not in kwargs:
        RECORDER.wait(str(packet).removeprefix("aten."))


def _check_message(func: Any, args: Any) -> None:
    """May these tensors be sent in this group?"""
    flat = tree_flatten(args)[0]
    tensors = [x for x in flat if isinstance(x, Tensor)]
    group = next(
        (x for x in flat if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())), None
    )
    group = dist.ProcessGroup.unbox(group) if group is not None else dist.group.WORLD
    backend = backend_of(group)
    name = func.overloadpacket.__name__
    RECORDER.messages[f"{name} over {backend}"] += 1
    if backend == "nccl":
        RECORDER.communicators.setdefault(group.group_name, (group.size(), set()))[1].add(name)
    if name == "barrier":
        return  # its tensor is torch's own
    for x in tensors:
        if x.device.type != ("cuda" if backend == "nccl" else "cpu"):
            RECORDER.fault(f"{name} of a tensor on {x.device} in a group of {backend}")
        if backend == "nccl" and not x.is_contiguous():
            RECORDER.fault(f"{name} of a tensor that is not contiguous, strides {x.stride()}, over nccl")
        if backend == "nccl" and x.dtype not in _NCCL_DTYPES:
            RECORDER.fault(f"{name} of {x.dtype}, which nccl does not have")


flags_are_set = [True]
"""Whether a float that is read as a condition (``.bool()``) is true; an update is skipped then."""


# --- answers that fake tensors lack -------------------------------------------------------------------------


def _answer_data_dependent() -> None:
    def local_scalar(mode: FakeTensorMode, func: Any, x: Tensor) -> Any:
        return _read(x)

    def nonzero(mode: FakeTensorMode, func: Any, x: Tensor) -> Tensor:
        with mode:
            return torch.empty(x.numel(), x.dim(), dtype=torch.int64, device=x.device)

    def unique(mode: FakeTensorMode, func: Any, x: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        with mode:
            return (
                torch.empty_like(x),
                torch.empty(x.shape, dtype=torch.int64, device=x.device),
                torch.empty(x.numel(), dtype=torch.int64, device=x.device),
            )

    def bincount(mode: FakeTensorMode, func: Any, x: Tensor, *_: Any, **__: Any) -> Tensor:
        with mode:
            return torch.empty(x.numel(), dtype=torch.int64, device=x.device)

    def equal(mode: FakeTensorMode, func: Any, *_: Any) -> bool:
        return True

    fake_impls.op_implementations_dict.update(
        {
            aten._local_scalar_dense.default: local_scalar,
            aten.nonzero.default: nonzero,
            aten._unique2.default: unique,
            aten.bincount.default: bincount,
            aten.equal.default: equal,
        }
    )


def _answer_python() -> None:
    """Methods that bypass the operations."""
    real_type, real_numpy = Tensor.type, Tensor.numpy

    def tolist(x: FakeTensor) -> Any:
        if x.device.type == "cuda":
            RECORDER.wait("tolist")
        value = _value_of(x)
        if value is not None:
            with _disable_current_modes():
                return value.tolist()
        return np.full(tuple(x.shape), _read(x)).tolist()

    def numpy(x: FakeTensor, *, force: bool = False) -> Any:
        if x.device.type == "cuda" and not force:
            RECORDER.fault(".numpy() of a tensor on cuda")
            return real_numpy(x)  # raises as it would
        value = _value_of(x)
        if value is not None:
            with _disable_current_modes():
                return real_numpy(value)
        return np.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch."))

    def type_(x: Tensor, dtype: Any = None, **more: Any) -> Any:
        if dtype is None:
            return f"torch.{'cuda.' if x.device.type == 'cuda' else ''}{_NAMES[x.dtype]}Tensor"
        return real_type(x, dtype, **more)

    def data_ptr(x: FakeTensor) -> int:
        return _address(x.untyped_storage()) + x.storage_offset() * x.element_size()

    def apply(module: torch.nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """``Module._apply`` sets ``.data``, which fake tensors of another device do not take."""
        for part in module.modules():
            for name, p in part._parameters.items():
                if p is None:
                    continue
                moved = fn(p)
                if (moved.device, moved.dtype) != (p.device, p.dtype):
                    new = torch.nn.Parameter(moved.detach(), requires_grad=p.requires_grad)
                    new.__dict__.update({k: v for k, v in p.__dict__.items() if k not in new.__dict__})
                    part._parameters[name] = new
            part._buffers.update({k: b if b is None else fn(b) for k, b in part._buffers.items()})
        return module

    real_storage = Tensor.untyped_storage
    real_device = torch.UntypedStorage.device

    def untyped_storage(x: Tensor) -> torch.UntypedStorage:
        storage = real_storage(x)
        _PLACES[storage._cdata] = storage, x.device
        return storage

    def device_of(storage: torch.UntypedStorage) -> torch.device:
        entry = _PLACES.get(storage._cdata)
        return entry[1] if entry is not None else real_device.__get__(storage)

    real_data = Tensor.data

    def set_data(x: FakeTensor, value: FakeTensor) -> None:
        real_data.__set__(x, value)  # type: ignore[attr-defined]
        x.fake_device = value.fake_device

    FakeTensor.data = property(real_data.__get__, set_data)  # type: ignore[assignment,attr-defined,misc]
    real_resize = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> Any:
        RECORDER.cached |= size == 0 and device_of(storage).type == "cuda"
        return real_resize(storage, size)

    torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
    Tensor.untyped_storage = untyped_storage  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.device = property(device_of)  # type: ignore[assignment]
    FakeTensor.tolist, FakeTensor.numpy = tolist, numpy  # type: ignore[method-assign,assignment]
    Tensor.type = type_  # type: ignore[method-assign,assignment]
    FakeTensor.record_stream = lambda x, stream: None  # type: ignore[method-assign]
    FakeTensor.data_ptr = data_ptr  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.data_ptr = _address  # type: ignore[method-assign,assignment]
    torch.nn.Module._apply = apply  # type: ignore[method-assign,assignment]


# --- the device ---------------------------------------------------------------------------------------------


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.cuda_stream, self.device = 0, torch.device("cuda", 0)

    def synchronize(self) -> None:
        RECORDER.wait("Stream.synchronize")

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def query(self) -> bool:
        return True

    def wait_stream(self, other: Any) -> None: ...
    def wait_event(self, event: Any) -> None: ...
    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, stream: Any = None) -> None: ...
    def wait(self, stream: Any = None) -> None: ...
    def synchronize(self) -> None:
        RECORDER.wait("Event.synchronize")

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: Any) -> float:
        return 1.0


class _Runtime:
    """torch.cuda.cudart(): registering host memory pins its storage."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:
        for cdata, (address, storage) in _ADDRESSES.items():
            if address // _ROOM == pointer // _ROOM:
                _PINNED[cdata] = storage
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        for cdata, (address, _) in _ADDRESSES.items():
            if address // _ROOM == pointer // _ROOM:
                _PINNED.pop(cdata, None)
        return 0


def _pretend_gpus() -> None:
    torch._C._ensureCUDADeviceGuardSet()
    properties = types.SimpleNamespace(
        major=9,
        minor=0,
        name="NVIDIA H100 80GB HBM3",
        total_memory=80 << 30,
        multi_processor_count=132,
        warp_size=32,
        uuid="00000000-0000-0000-0000-000000000000",
    )
    current = [0]

    def set_device(device: Any) -> None:
        current[0] = device if isinstance(device, int) else torch.device(device).index or 0

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: _GPUS,
        "current_device": lambda: current[0],
        "set_device": set_device,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "synchronize": lambda device=None: RECORDER.wait("cuda.synchronize"),
        "empty_cache": lambda: setattr(RECORDER, "cached", False),
        "ipc_collect": lambda: None,
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "Stream": _Stream,
        "Event": _Event,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "memory_reserved": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "cudart": _Runtime,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def _let_autograd_pass() -> None:
    """Autograd's engine asks CUDA's hooks whether a device has a context, which raises without a driver.

    The answer no is put in place of that one entry (hasPrimaryContext) of a copy of their virtual table; the
    number of the entry is that of one version of torch.
    """
    assert torch.__version__.startswith("2.13."), "look up hasPrimaryContext in CUDAHooks' virtual table anew"
    slot, entries = 4, 160
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    get_hooks = library._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    hooks = ctypes.cast(get_hooks(), ctypes.POINTER(ctypes.c_void_p))
    address = hooks[0]
    assert address is not None
    old = ctypes.cast(address - 16, ctypes.POINTER(ctypes.c_void_p))  # two entries stand before the first
    table = (ctypes.c_void_p * entries)(*[old[i] for i in range(entries)])
    no = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(lambda self, index: False)
    table[2 + slot] = ctypes.cast(no, ctypes.c_void_p).value
    _KEPT.extend([table, no])
    hooks[0] = ctypes.addressof(table) + 16


_KEPT: list[Any] = []


def _launch(kernel: str, tiles: int, *tensors: Tensor, size: int) -> None:
    """In place of ``slice_table.launch``."""
    RECORDER.launches[kernel] += 1
    if any(x.device.type != "cuda" for x in tensors):
        RECORDER.fault(f"{kernel} of a table on {[str(x.device) for x in tensors]}")


# --- process groups -----------------------------------------------------------------------------------------

_BACKENDS: dict[str, str] = {}
"""The requested backend of each group, by its name."""
received_shape: list[int] = []
"""The shape of the activations that a pipeline stage receives."""
peer_value: list[Callable[[Any, int], Any]] = [lambda value, rank: value]
"""The value of rank ``rank`` in an object collective in which this rank has ``value``."""


def backend_of(group: Any) -> str:
    """Of a group, nccl or gloo; None is the default group."""
    return _BACKENDS[(group or dist.group.WORLD).group_name]


def _pretend_groups() -> None:
    real_init, real_new = dist.init_process_group, dist.new_group

    def init(backend: str, *, rank: int, world_size: int, **more: Any) -> None:
        if more.get("device_id") is not None:
            RECORDER.fault("init_process_group(device_id=) makes every communicator eagerly")
        real_init("fake", store=FakeStore(), rank=rank, world_size=world_size)
        _BACKENDS[dist.group.WORLD.group_name] = backend

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *_: Any, **more: Any) -> Any:
        named = {k: v for k, v in more.items() if k in ("use_local_synchronization", "group_desc")}
        group = real_new(ranks, **named)
        if isinstance(group, dist.ProcessGroup):
            _BACKENDS[group.group_name] = backend or backend_of(None)
        return group

    @contextlib.contextmanager
    def coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        """Sends message by message: FakeTensorMode lacks the operations that send several at once."""
        yield types.SimpleNamespace(wait=lambda: None, append=lambda work: None)

    def require_host(name: str, group: Any) -> None:
        RECORDER.messages[f"{name} over {backend_of(group)}"] += 1
        if backend_of(group) == "nccl":
            RECORDER.fault(f"{name} in a group of nccl: it takes memory of a GPU, and ranks wait in a kernel")

    def everyone(value: Any, group: Any) -> list[Any]:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        return [value if r == dist.get_rank() else peer_value[0](value, r) for r in ranks]

    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
        require_host("all_gather_object", group)
        object_list[:] = everyone(obj, group)

    def gather_object(
        obj: Any, object_gather_list: Any = None, dst: Any = None, group: Any = None, group_dst: Any = None
    ) -> None:
        require_host("gather_object", group)
        if object_gather_list is not None:
            object_gather_list[:] = everyone(obj, group)

    def broadcast_object_list(
        object_list: Any, src: Any = None, group: Any = None, device: Any = None, group_src: Any = None
    ) -> None:
        require_host("broadcast_object_list", group)

    def scatter_object_list(
        scatter_object_output_list: Any,
        scatter_object_input_list: Any = None,
        src: Any = None,
        group: Any = None,
        group_src: Any = None,
    ) -> None:
        require_host("scatter_object_list", group)
        values = scatter_object_input_list
        scatter_object_output_list[0] = values[dist.get_rank(group)] if values else None

    def barrier(group: Any = None, *_: Any, **__: Any) -> None:
        require_host("barrier", group)

    def gather_objects(value: Any, kind: Any = Any, group: Any = None) -> list[Any]:
        group = group or collectives.control_group()
        require_host("gather_objects", group)
        return everyone(decode(encode(value), kind), group)

    def gather_on_first(value: Any, kind: Any = Any, group: Any = None) -> list[Any]:
        values = gather_objects(value, kind, group)
        return values if dist.get_rank() == 0 else []

    def broadcast_object(value: Any, kind: Any = Any, group: Any = None, *, largest: int = 0) -> Any:
        require_host("broadcast_object", group or collectives.control_group())
        return decode(encode(value), kind)

    def maximum(value: int, group: Any = None) -> int:
        require_host("maximum", group or collectives.control_group())
        return value

    changes = dict(
        init_process_group=init,
        new_group=new_group,
        all_gather_object=all_gather_object,
        gather_object=gather_object,
        broadcast_object_list=broadcast_object_list,
        scatter_object_list=scatter_object_list,
        barrier=barrier,
        _coalescing_manager=coalescing,
    )
    product_functions = dict(
        gather_objects=gather_objects,
        gather_on_first=gather_on_first,
        broadcast_object=broadcast_object,
        max_over_ranks=maximum,
    )
    for name, function in (changes | product_functions).items():
        real = getattr(collectives if name in product_functions else c10d, name)
        for module in list(sys.modules.values()):  # some have imported it by name
            if getattr(module, "__dict__", {}).get(name) is real:
                setattr(module, name, function)
    dist.TCPStore = lambda *_, **__: FakeStore()  # type: ignore[misc,assignment]


# --- Megatron -----------------------------------------------------------------------------------------------


def _stand_in_for_kernels() -> None:
    """Replaces what Megatron computes by kernels that are not installed here, or a device's generator."""
    import megatron.core.optimizer.clip_grads as clip_grads
    import megatron.core.tensor_parallel.random as random

    from rpg_megatron.policy import logprobs

    logprobs.FUSE = False
    clip_grads.l2_norm_impl = lambda *_: (torch.zeros(1, device="cuda"), None)
    random._get_cuda_rng_state = lambda *_, **__: torch.empty(0)
    random._set_cuda_rng_state = lambda *_, **__: None


def _stand_in_for_fla() -> None:
    """FLA's two kernels of linear attention, by shape; they read the bounds unless the host has them."""
    from megatron.core.ssm.gated_delta_net import common, gdn

    def read(cu_seqlens: Tensor, cu_seqlens_cpu: Tensor | None) -> None:
        if cu_seqlens_cpu is None:
            cu_seqlens.tolist()

    def conv(x: Tensor, weight: Tensor, *, cu_seqlens: Tensor, cu_seqlens_cpu: Any = None, **_: Any) -> Any:
        read(cu_seqlens, cu_seqlens_cpu)
        return x * weight[:, 0], None

    def rule(
        q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens: Tensor, cu_seqlens_cpu: Any = None, **more: Any
    ) -> Any:
        read(cu_seqlens, cu_seqlens_cpu)
        return v * (q * k).sum(-1, keepdim=True) * (more["g"] * more["beta"])[..., None].to(v.dtype), None

    def l2norm(x: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.nn.functional.normalize(x, dim=-1)

    common.HAVE_FLA, common.l2norm = True, l2norm
    for module in (common, gdn):
        module.causal_conv1d, module.chunk_gated_delta_rule = conv, rule


def _send_tokens_evenly() -> None:
    """Routers choose experts in turn, and other ranks send as many tokens as this one: both are read."""
    import megatron.core.transformer.moe.router as router
    import megatron.core.transformer.moe.token_dispatcher as dispatcher

    route, gather = router.TopKRouter.routing, dispatcher.gather_from_sequence_parallel_region

    def routing(self: Any, logits: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        probs, chosen = route(self, logits, *more, **named)
        with _disable_current_modes():
            value = torch.zeros(tuple(chosen.shape), dtype=torch.bool)
            turns = torch.arange(chosen.size(0) * self.topk) % chosen.size(1)
            value.scatter_(1, turns.view(-1, self.topk), True)
            set_value(chosen, value)
        return probs, chosen

    def gathered(x: Tensor, *more: Any, group: Any, **named: Any) -> Tensor:
        out = gather(x, *more, group=group, **named)
        if not x.is_floating_point() and (value := _value_of(x)) is not None:
            with _disable_current_modes():
                set_value(out, torch.cat([value] * group.size()))
        return out

    router.TopKRouter.routing = routing  # type: ignore[method-assign]
    dispatcher.gather_from_sequence_parallel_region = gathered


@contextlib.contextmanager
def fake_cuda(rank: int, world: int) -> Iterator[Recorder]:
    """Make this process rank ``rank`` of ``world`` on a machine of eight H100s."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank % _GPUS))
    _let_autograd_pass()
    _pretend_gpus()
    slice_table.launch = _launch
    _answer_data_dependent()
    _answer_python()
    _pretend_groups()
    _stand_in_for_kernels()
    _stand_in_for_fla()
    _send_tokens_evenly()
    fake_tensor.init_gpu_context = lambda device: None
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, Watch(), torch.autograd.set_multithreading_enabled(False):
        yield RECORDER


def leave(code: int = 0) -> None:
    """End the process: what torch would do at exit asks for the driver."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
