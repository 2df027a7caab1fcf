"""A model of the order of streams, on which the real code runs with real values and without a GPU.

Tensors lie in ordinary memory; ``on_gpu`` says of some that they are on a GPU, and what is computed from them
or allocated with ``device="cuda"`` is there too. ``torch.cuda`` and process groups are stand-ins. Every
operation runs at once, and is recorded where CUDA would run it later: on the current stream of its thread.

What is known to be over when an operation begins is a vector clock: threads and streams count their
operations, and an event, a wait, a synchronisation, a start of a thread or a message hands a clock on. Then

- two uses of the same bytes, one of which writes, must have a defined order;
- memory that is freed must not be in use by another stream than the one that it was allocated on, unless the
  host knows that the use has ended; memory of the host must not be in use by the device at all;
- memory that goes back to the device (``empty_cache``) must not be in use at all, for others get it;
- what a thread does on a GPU, pins or goes back to is of the GPU of its process;
- a handle of GPU memory must not ask its reader to wait for an event, which may be gone by then.

It cannot show what CUDA, NCCL or a kernel does, nor memory of files, which two processes map.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DisableTorchFunction
from torch.cuda._sanitizer import zip_arguments
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rpg_megatron.bridge import slice_table
from rpg_megatron.bridge.transports.process_group_link import Rendezvous
from tests.support import slice_launches

aten = torch.ops.aten
REPOSITORY = str(Path(__file__).resolve().parents[2])
Clock = dict["Timeline", int]
LOCK = threading.RLock()


class Timeline:
    """A thread of a process, or a stream: its operations are in order; ``clock`` has those that are over."""

    def __init__(self, name: str, process: Process | None = None) -> None:
        self.name, self.process = name, process
        self.clock: Clock = {}

    def tick(self) -> int:
        with LOCK:
            self.clock[self] = number = self.clock.get(self, 0) + 1
        return number

    def learn(self, clock: Clock) -> None:
        with LOCK:
            for timeline, number in clock.items():
                if number > self.clock.get(timeline, 0):
                    self.clock[timeline] = number


@dataclass(frozen=True)
class Use:
    """One operation's use of the bytes ``low`` to ``high`` of a memory."""

    timeline: Timeline
    number: int
    writes: bool
    low: int
    high: int
    where: str

    def over(self, clock: Clock) -> bool:
        return clock.get(self.timeline, 0) >= self.number


@dataclass
class Memory:
    """A storage. ``gpu``: the number of the GPU that it is on; None is the host's memory."""

    gpu: int | None
    owner: Timeline | None
    """The stream that it was allocated on."""
    pinned: bool = False
    uses: list[Use] = field(default_factory=list)
    address: int = 0
    nbytes: int = 0
    opened: dict[Process, int] = field(default_factory=dict)
    """The GPU from which another process has access, and which torch says that the memory is on."""


class Process:
    """A trainer rank or an engine worker: its GPU, and its streams."""

    def __init__(self, name: str, gpu: int) -> None:
        self.name, self.gpu = name, gpu
        self.streams: list[Stream] = []
        self.default = [Stream(torch.device("cuda", i), self, f"default stream of GPU {i}") for i in range(4)]


class Stream(Timeline):
    def __init__(
        self, device: torch.device | None = None, process: Process | None = None, name: str = ""
    ) -> None:
        process = process or ORDER.process
        index = ORDER.current_gpu if device is None or device.index is None else device.index
        super().__init__(f"{process.name}: {name or f'stream {len(process.streams)}'}", process)
        self.gpu, self.device = index, torch.device("cuda", index)
        process.streams.append(self)
        if not name and index != process.gpu:
            ORDER.fault(f"a stream on GPU {index}, in a process of GPU {process.gpu}")

    def enqueue(self) -> int:
        """Append an operation of the current thread."""
        self.learn(ORDER.host.clock)
        return self.tick()

    def synchronize(self) -> None:
        ORDER.host.learn(self.clock)

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)
        self.enqueue()

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)
        self.enqueue()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event


class Event:
    def __init__(self, *_: object, **__: object) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or ORDER.current_stream()
        stream.enqueue()
        self.clock = dict(stream.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or ORDER.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        ORDER.host.learn(self.clock)


class Order:
    """The uses of all memory, and the faults so far."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self._memory: dict[int, Memory] = {}
        self._freed: list[Memory] = []
        self._local = threading.local()
        self.handles: dict[int, torch.UntypedStorage] = {}
        self.messages: set[Stream] = set()
        """Streams after whose work a message was sent or received."""

    # --- where we are

    @property
    def host(self) -> Timeline:
        return self._local.host  # type: ignore[no-any-return]

    @property
    def process(self) -> Process:
        assert self.host.process is not None
        return self.host.process

    @property
    def current_gpu(self) -> int:
        return getattr(self._local, "gpu", 0)

    @current_gpu.setter
    def current_gpu(self, gpu: int) -> None:
        self._local.gpu = gpu

    def current_stream(self, device: Any = None) -> Stream:
        gpu = self.current_gpu if device is None else torch.device(device).index or 0
        chosen: dict[int, Stream] = getattr(self._local, "streams", {})
        return chosen.get(gpu) or self.process.default[gpu]

    @contextlib.contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        """``torch.cuda.stream``: its GPU is the current one in the block; then it is again the one before.

        To go back to a GPU that the process does not use makes a context there, of half a GiB.
        """
        before, gpu = getattr(self._local, "streams", {}), self.current_gpu
        if gpu not in (stream.gpu, self.process.gpu):
            self.fault(f"a thread whose GPU is {gpu} enters a stream of GPU {stream.gpu}, and goes back")
        self._local.streams, self._local.gpu = {**before, stream.gpu: stream}, stream.gpu
        try:
            yield
        finally:
            self._local.streams, self._local.gpu = before, gpu

    @contextlib.contextmanager
    def within(self, process: Process) -> Iterator[None]:
        """The block runs in another process, which starts after what this one has done, and is waited for."""
        before = dict(self._local.__dict__)
        clock = dict(self.host.clock) if hasattr(self._local, "host") else {}
        main_thread = Timeline(f"{process.name}: main thread", process)
        main_thread.learn(clock)
        self._local.__dict__.clear()
        self._local.host, self._local.gpu = main_thread, process.gpu
        try:
            yield
        finally:
            self._local.__dict__.clear()
            self._local.__dict__.update(before)
            if "host" in before:
                self.host.learn(main_thread.clock)

    # --- what happens

    def fault(self, message: str) -> None:
        text = f"{_place()}: {message}"
        if text not in self.faults:
            self.faults.append(text)

    def memory_of(self, storage: torch.UntypedStorage) -> Memory | None:
        return self._memory.get(storage._cdata)

    def place(self, storage: torch.UntypedStorage, gpu: int | None, *, pinned: bool = False) -> Memory:
        """Say where a storage lies."""
        key = storage._cdata
        with LOCK:
            if key not in self._memory:
                weakref.finalize(storage, self._free, key).atexit = False
            owner = self.current_stream(torch.device("cuda", gpu)) if gpu is not None else None
            with torch.utils._python_dispatch._disable_current_modes():
                address, nbytes = storage.data_ptr(), storage.nbytes()
            self._memory[key] = memory = Memory(gpu, owner, pinned, address=address, nbytes=nbytes)
        return memory

    def use(self, x: Tensor, timeline: Timeline, number: int, *, writes: bool) -> None:
        """Record an operation's use of a tensor; ``number``: of the operation in ``timeline``."""
        if x.numel() == 0 or x.is_meta:
            return
        memory = self.memory_of(x.untyped_storage()) or self.place(x.untyped_storage(), None)
        low = x.storage_offset() * x.element_size()
        reach = sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) + 1
        self._use(memory, low, low + reach * x.element_size(), timeline, number, writes=writes)

    def _use(
        self, memory: Memory, low: int, high: int, timeline: Timeline, number: int, *, writes: bool
    ) -> None:
        new = Use(timeline, number, writes, low, high, _place())
        with LOCK:
            remaining = []
            for old in memory.uses:
                over = old.over(timeline.clock)
                overlap = old.low < new.high and new.low < old.high
                if (
                    overlap
                    and not over
                    and (old.writes or writes)
                    and (old.timeline, old.number) != (timeline, number)
                ):
                    earlier = f"{old.where} {_word(old)} ({old.timeline.name})"
                    self.fault(f"{_word(new)} ({timeline.name}) while {earlier}")
                if not (over and writes and new.low <= old.low and old.high <= new.high):
                    remaining.append(old)
            memory.uses = [*remaining, new]

    def copy(self, to: Tensor, source: Tensor, *, later: bool) -> None:
        """``copy_``: between GPU and host it waits, unless ``later`` and the memory is pinned."""
        gpus = [self._gpu(x) for x in (to, source)]
        gpu = next((g for g in gpus if g is not None), None)
        if gpu is None:
            number = self.host.tick()
            self.use(source, self.host, number, writes=False)
            self.use(to, self.host, number, writes=True)
            return
        stream = self.current_stream(torch.device("cuda", gpu))
        pageable = next(
            (x for x, g in zip((to, source), gpus, strict=True) if g is None and not self._pinned(x)), None
        )
        number = stream.enqueue()
        if pageable is source:  # read before the call returns
            self.use(source, self.host, self.host.tick(), writes=False)
        else:
            self.use(source, stream, number, writes=False)
        self.use(to, stream, number, writes=True)
        if None in gpus and (not later or pageable is to):
            stream.synchronize()

    def launch(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Any other operation: of the device if one of its tensors is there, else of the host."""
        gpu = next((g for x in [*reads, *writes] if (g := self._gpu(x)) is not None), None)
        timeline: Timeline = self.host if gpu is None else self.current_stream(torch.device("cuda", gpu))
        number = timeline.enqueue() if isinstance(timeline, Stream) else timeline.tick()
        for x in reads:
            if gpu is None or self._gpu(x) is not None:
                self.use(x, timeline, number, writes=False)
            else:  # a number from the host
                self.use(x, self.host, self.host.tick(), writes=False)
        for x in writes:
            self.use(x, timeline, number, writes=True)

    def launch_on_slices(self, kernel: str, tiles: int, *tensors: Tensor, size: int) -> None:
        """A kernel of ``bridge/slice_kernels``: it uses the memory at the addresses in its table."""
        table, _, *sums = tensors
        stream = self.current_stream()
        number = stream.enqueue()
        for i, x in enumerate(tensors):
            if self._gpu(x) != stream.gpu:
                self.fault(f"a kernel on GPU {stream.gpu} has an argument on {x.device}")
            self.use(x, stream, number, writes=i > 1)
        with torch.utils._python_dispatch._disable_current_modes(), DisableTorchFunction():
            values = table.numpy()
            for _, source, _, target in slice_launches.slices_of(values, size):
                for matrix, writes in ((source, False), *([(target, True)] if not sums else [])):
                    low = matrix.address
                    memory = next(
                        (m for m in list(self._memory.values()) if m.address <= low < m.address + m.nbytes),
                        None,
                    )
                    if memory is None or memory.gpu is None:
                        self.fault("a kernel uses memory of the host, or none")
                    elif self.gpu_of(memory) != stream.gpu:
                        self.fault(f"a kernel on GPU {stream.gpu} uses GPU {memory.gpu}'s, not opened there")
                    else:
                        low -= memory.address
                        self._use(memory, low, low + matrix.reach, stream, number, writes=writes)
            slice_launches.run(kernel, values, size, sums[0].numpy() if sums else None)

    def read(self, x: Tensor) -> None:
        """The host takes the values of a tensor: of a GPU, it waits for the stream."""
        self.launch([x], [])
        if (gpu := self._gpu(x)) is not None:
            self.current_stream(torch.device("cuda", gpu)).synchronize()

    def synchronize(self, device: Any = None) -> None:
        gpu = self.current_gpu if device is None else torch.device(device).index or 0
        for stream in self.process.streams:
            if stream.gpu == gpu:
                stream.synchronize()

    def empty_cache(self) -> None:
        for memory in self._freed:
            if any(not use.over(self.host.clock) for use in memory.uses):
                self.fault("memory goes back to the device while it is in use")
        self._freed.clear()

    def require_idle_host_memory(self) -> None:
        """No copy from or to pinned memory is under way, as far as this thread knows."""
        for memory in list(self._memory.values()):
            if memory.gpu is None and any(not use.over(self.host.clock) for use in memory.uses):
                self.fault(f"returns while {memory.uses[-1].where} {_word(memory.uses[-1])} host memory")

    def free(self, storage: torch.UntypedStorage) -> None:
        """Its memory goes back to the allocator of its stream, or is the host's again."""
        memory = self.memory_of(storage)
        if memory is not None:
            self._check_free(memory)
            memory.uses = []

    def _free(self, key: int) -> None:
        with LOCK:
            if (memory := self._memory.pop(key, None)) is not None and hasattr(self._local, "host"):
                self._check_free(memory)

    def _check_free(self, memory: Memory) -> None:
        clock = dict(self.host.clock)
        if memory.owner is not None:
            clock = {
                t: max(clock.get(t, 0), memory.owner.clock.get(t, 0)) for t in {*clock, *memory.owner.clock}
            }
            self._freed.append(Memory(memory.gpu, memory.owner, uses=list(memory.uses)))
        for use in memory.uses:
            # Torch's own pinned memory waits for copies.
            if not use.over(clock) and not (memory.pinned and isinstance(use.timeline, Stream)):
                self.fault(f"frees memory while {use.where} {_word(use)} it ({use.timeline.name})")

    def gpu_of(self, memory: Memory) -> int | None:
        return memory.opened.get(self.process, memory.gpu) if memory.opened else memory.gpu

    def _gpu(self, x: Tensor) -> int | None:
        memory = self.memory_of(x.untyped_storage())
        return self.gpu_of(memory) if memory is not None else None

    def _pinned(self, x: Tensor) -> bool:
        memory = self.memory_of(x.untyped_storage())
        return memory is not None and memory.pinned


ORDER: Order


def _word(use: Use) -> str:
    return "writes" if use.writes else "reads"


def _place() -> str:
    """The innermost line that is of this repository and not of this module."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(REPOSITORY) and "/site-packages/" not in file and file != __file__:
            return f"{file.removeprefix(REPOSITORY)[1:]}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "?"


# --- torch on top of it -------------------------------------------------------------------------------------


class Pretend(TorchFunctionMode):
    """Tensors that are requested on a GPU are made on the host, and marked as on the GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name in ("to", "cpu", "pin_memory") and isinstance(args[0], Tensor):
            with self:
                return _move(name, *args, **kwargs)
        if name in ("tolist", "numpy"):
            ORDER.read(args[0])
        if name == "is_pinned":
            return ORDER._pinned(args[0])
        pinned = bool(kwargs.pop("pin_memory", False))
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if device is not None and device.type == "cuda":
            kwargs["device"] = "cpu"
            gpu = device.index if device.index is not None else ORDER.current_gpu
            with _Allocating(gpu):
                out = func(*args, **kwargs)
            if ORDER._gpu(out) is None:  # made from a constant
                ORDER.place(out.untyped_storage(), gpu)
            return out
        if pinned and ORDER.current_gpu != ORDER.process.gpu:
            ORDER.fault(f"pins memory on GPU {ORDER.current_gpu}, in a process of GPU {ORDER.process.gpu}")
        out = func(*args, **kwargs)
        if pinned:
            ORDER.place(out.untyped_storage(), None, pinned=True)
        return out


class _Allocating:
    """Within the block the current thread makes tensors on a GPU."""

    def __init__(self, gpu: int) -> None:
        self._gpu = gpu

    def __enter__(self) -> None:
        ORDER._local.allocating = self._gpu

    def __exit__(self, *_: object) -> None:
        del ORDER._local.allocating


def _move(name: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``x.to``, ``x.cpu`` and ``x.pin_memory``."""
    if name == "pin_memory":
        return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x)
    device, dtype, later, _ = torch._C._nn._parse_to(*(("cpu",) if name == "cpu" else args), **kwargs)
    if device is not None and device.type == "cuda" and device.index is None:
        device = torch.device("cuda", ORDER.current_gpu)
    device, dtype = device or x.device, dtype or x.dtype
    if (device, dtype) == (x.device, x.dtype):
        return x
    return torch.empty_like(x, device=device, dtype=dtype).copy_(x, non_blocking=later)


class Record(TorchDispatchMode):
    """Records what each operation reads and writes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        storages = {x.untyped_storage()._cdata for x in inputs if not x.is_meta}
        out = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta]
        fresh = [x for x in outputs if x.untyped_storage()._cdata not in storages]
        if func is aten.set_.source_Storage:
            fresh = []  # it lies where it lay
        gpu = getattr(ORDER._local, "allocating", None)
        if gpu is None:
            gpu = next((g for x in inputs if not x.is_meta and (g := ORDER._gpu(x)) is not None), None)
        for x in fresh:
            ORDER.place(x.untyped_storage(), gpu)
        if func is aten.copy_.default:
            later = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            ORDER.copy(args[0], args[1], later=bool(later))
        elif func is aten._local_scalar_dense.default:
            ORDER.read(args[0])
        elif func.is_view or func in (
            aten.empty.memory_format,
            aten.empty_like.default,
            aten.set_.source_Storage,
        ):
            pass  # no bytes are touched
        else:
            written = [
                x
                for argument, value in zip_arguments(func._schema, args, kwargs)
                if argument.alias_info is not None and argument.alias_info.is_write
                for x in tree_leaves(value)
                if isinstance(x, Tensor)
            ]
            places = {id(x) for x in written}
            ORDER.launch([x for x in inputs if id(x) not in places], [*written, *fresh])
        return out


# --- messages -----------------------------------------------------------------------------------------------


class Group:
    """One end of a link, in place of torch's process groups; NCCL's has a stream of its own."""

    _boxes: ClassVar[dict[tuple[str, int], Queue[tuple[Tensor, Clock] | None]]] = {}

    def __init__(self, kind: str, name: str, side: int, blocking: bool) -> None:
        self._kind, self._side, self._blocking = kind, side, blocking
        self._timeline = Timeline(f"{ORDER.process.name}: {kind} of {name}")
        self._inbox = self._boxes.setdefault((name, side), Queue())
        self._outbox = self._boxes.setdefault((name, 1 - side), Queue())

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        number = self._begin(tensors[0])
        ORDER.use(tensors[0], self._timeline, number, writes=False)
        with torch.utils._python_dispatch._disable_current_modes():
            self._outbox.put((torch.clone(tensors[0]), dict(self._timeline.clock)))
        return Work(self._timeline, self._kind, self._blocking, lambda: None)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        number = self._begin(tensors[0])
        ORDER.use(tensors[0], self._timeline, number, writes=True)

        def arrive() -> None:
            message = self._inbox.get(timeout=60)
            if message is None:
                raise RuntimeError("the other end has closed")
            self._timeline.learn(message[1])
            with torch.utils._python_dispatch._disable_current_modes():
                tensors[0].copy_(message[0])

        return Work(self._timeline, self._kind, self._blocking, arrive)

    def abort(self) -> None:
        self._outbox.put(None)

    def _begin(self, x: Tensor) -> int:
        gpu = ORDER._gpu(x)
        if (gpu is None) == (self._kind == "nccl"):
            ORDER.fault(f"a message over {self._kind} in memory of {x.device}")
        self._timeline.learn(ORDER.host.clock)
        if gpu is not None:
            stream = ORDER.current_stream(torch.device("cuda", gpu))
            ORDER.messages.add(stream)
            self._timeline.learn(stream.clock)
        return self._timeline.tick()


class Work:
    """A message under way."""

    def __init__(self, timeline: Timeline, kind: str, blocking: bool, arrive: Callable[[], None]) -> None:
        self._timeline, self._on_host, self._arrive = timeline, kind == "gloo" or blocking, arrive

    def wait(self) -> None:
        self._arrive()
        ORDER.current_stream().learn(self._timeline.clock)
        if self._on_host:
            ORDER.host.learn(self._timeline.clock)


def _share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """The result of ``UntypedStorage._share_cuda_``, with a number instead of a CUDA handle."""
    memory = ORDER.memory_of(storage)
    assert memory.gpu is not None
    number = len(ORDER.handles)
    ORDER.handles[number] = storage
    handle = number.to_bytes(4, "big")
    return memory.gpu, handle, storage.nbytes(), 0, b"counter", 0, b"event", True


def _open(*handle: Any) -> torch.UntypedStorage:
    """``UntypedStorage._new_shared_cuda`` of a handle."""
    if handle[7]:
        ORDER.fault("a handle's reader waits for an event of the writer, which may be gone")
    storage = ORDER.handles[int.from_bytes(handle[1], "big")]
    memory = ORDER.memory_of(storage)
    assert memory is not None
    memory.opened[ORDER.process] = handle[0]
    return storage


def on_gpu(x: Tensor, gpu: int | None = None) -> Tensor:
    """Say that a tensor is on a GPU; by default on that of the process."""
    ORDER.place(x.untyped_storage(), ORDER.process.gpu if gpu is None else gpu)
    return x


@contextlib.contextmanager
def stream_order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Order]:
    """The model, as long as the block runs. Code runs in processes: ``with order.within(Process(...))``."""
    global ORDER
    ORDER = order = Order()
    Group._boxes.clear()
    real_device, real_resize = Tensor.device, torch.UntypedStorage.resize_
    real_storage_device = torch.UntypedStorage.device

    def device_of(x: Tensor) -> torch.device:
        gpu = None if x.is_meta else order._gpu(x)
        return torch.device("cuda", gpu) if gpu is not None else real_device.__get__(x)

    def device_of_storage(storage: torch.UntypedStorage) -> torch.device:
        memory = order.memory_of(storage)
        if memory is not None and (gpu := order.gpu_of(memory)) is not None:
            return torch.device("cuda", gpu)
        return real_storage_device.__get__(storage)

    def resize(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        memory = order.memory_of(storage)
        if size == 0:
            order.free(storage)
        elif memory is not None and memory.gpu is not None:
            memory.owner = order.current_stream(torch.device("cuda", memory.gpu))
        real_resize(storage, size)
        if memory is not None:
            memory.address, memory.nbytes = storage.data_ptr(), storage.nbytes()
        return storage

    def in_thread(run: Callable[[], None], host: Timeline | None) -> Callable[[], None]:
        def work() -> None:
            if host is not None:
                order._local.host = host
                with Pretend(), Record():
                    return run()
            return run()

        return work

    real_start, real_join = threading.Thread.start, threading.Thread.join
    real_submit, real_result = ThreadPoolExecutor.submit, Future.result

    def submit(pool: ThreadPoolExecutor, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        clock = dict(order.host.clock)
        done: list[Timeline] = []

        def carried() -> Any:
            order.host.learn(clock)
            done.append(order.host)
            return work(*args, **kwargs)

        future = real_submit(pool, carried)
        future._order = done  # type: ignore[attr-defined]
        return future

    def result(future: Future[Any], timeout: float | None = None) -> Any:
        try:
            return real_result(future, timeout)
        finally:
            for host in getattr(future, "_order", []):
                order.host.learn(host.clock)

    def start(thread: threading.Thread) -> None:
        if hasattr(order._local, "host"):
            host = Timeline(f"{order.process.name}: {thread.name}", order.process)
            host.learn(order.host.clock)
            thread._order = host  # type: ignore[attr-defined]
            thread.run = in_thread(thread.run, host)  # type: ignore[method-assign]
        real_start(thread)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        real_join(thread, timeout)
        if not thread.is_alive() and hasattr(thread, "_order") and hasattr(order._local, "host"):
            order.host.learn(thread._order.clock)

    class Runtime:
        """Registers pages of host memory, whose storage is pinned from then on."""

        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            registered[address] = nbytes
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            registered.pop(address)
            return 0

    registered: dict[int, int] = {}

    def pinned(x: Tensor) -> bool:
        memory = order.memory_of(x.untyped_storage())
        if memory is not None and memory.pinned:
            return True
        return any(a <= x.data_ptr() < a + n for a, n in registered.items())

    monkeypatch.setattr(slice_table, "launch", order.launch_on_slices)
    monkeypatch.setattr(order, "_pinned", pinned)
    monkeypatch.setattr(Tensor, "device", property(device_of), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "device", property(device_of_storage), raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize)
    monkeypatch.setattr(torch.UntypedStorage, "_share_cuda_", _share, raising=False)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", staticmethod(_open), raising=False)
    monkeypatch.setattr(threading.Thread, "start", start)
    monkeypatch.setattr(threading.Thread, "join", join)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit)
    monkeypatch.setattr(Future, "result", result)
    monkeypatch.setattr(Rendezvous, "link_store", lambda self, name, timeout: SimpleNamespace(link_name=name))
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": order.on,
        "current_stream": order.current_stream,
        "set_device": lambda device: setattr(order, "current_gpu", torch.device(device).index or 0),
        "current_device": lambda: order.current_gpu,
        "device_count": lambda: 4,
        "synchronize": order.synchronize,
        "empty_cache": order.empty_cache,
        "get_device_properties": lambda device: SimpleNamespace(uuid=f"GPU-{torch.device(device).index}"),
        "cudart": Runtime,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for kind in ("nccl", "gloo"):
        _replace_group(monkeypatch, kind)
    with Pretend(), Record():
        yield order


def _replace_group(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    name = {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}[kind]

    def make(store: Any, side: int, size: int, options: Any) -> Group:
        return Group(kind, store.link_name, side, os.environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1")

    make.Options = make._Options = SimpleNamespace  # type: ignore[attr-defined]
    make.create_device = make.create_default_device = lambda **_: None  # type: ignore[attr-defined]
    monkeypatch.setattr(dist, name, make, raising=False)
