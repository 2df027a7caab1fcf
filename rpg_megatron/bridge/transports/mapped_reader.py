"""Transports ``shared_memory`` and ``cuda_ipc``, engine side: read-only views of published shards.

Files are memory-mapped: reading a slice touches only its bytes. A mapping is kept between syncs while the
file's inode stays the same, since a new one would cost the page faults of the whole model again. GPU memory
is opened by its CUDA IPC handle.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from rpg_megatron.bridge.checksum import MODULUS, checksum
from rpg_megatron.bridge.manifest import HEADER_BYTES, Copy, Manifest, PublishedBox, Shard, parse_manifest
from rpg_megatron.bridge.slice_table import HostSlices, SliceTable, TableCache, modulo, table_of
from rpg_megatron.bridge.transports.cuda_ipc import HandleError, choose_copies, open_memory
from rpg_megatron.config.files import open_own, read_text
from rpg_megatron.models.boxes import Box
from rpg_megatron.system.dtypes import torch_dtype

ReadSums = dict[str, tuple[int, int]]
"""HF tensor name -> checksum and number of bytes of what a worker read of it."""
Parts = list[tuple[str, int]]
"""HF tensor name and number of bytes of each slice of a table."""
_Sums = tuple[Parts, SliceTable | HostSlices]


def add_sums(sums: ReadSums, parts: Parts, numbers: Sequence[int]) -> None:
    """Add the checksums of these parts."""
    for (name, size), number in zip(parts, numbers, strict=True):
        total, nbytes = sums[name]
        sums[name] = (total + number) % MODULUS, nbytes + size


class ShardError(Exception):
    """Published weights cannot be read: wrong version, owner or location, or damaged files."""


@dataclass
class Copies:
    """Boxes of HF tensors, and where a worker copies them to."""

    wanted: list[tuple[str, Box]]
    memory: list[torch.Tensor]
    """What the targets are parts of."""
    targets: Callable[[], list[torch.Tensor]]
    """Makes the target of each box, of the box's shape."""
    cache: TableCache[Any]
    """Of these copies; a sync is the same as the last one unless memory has moved."""

    def parts(
        self, cut: Callable[[str, Box], Iterable[tuple[Any, Box]]]
    ) -> Iterator[tuple[str, Any, Box, torch.Tensor]]:
        """Of each part that ``cut`` returns of a box: name, part, its box in the HF tensor, its target."""
        for (name, box), target in zip(self.wanted, self.targets(), strict=True):
            for part, where in cut(name, box):
                yield name, part, where, target[Box(where.offset_in(box), where.extent).slices()]


class Reader(Protocol):
    """How an engine worker reads weights: ``open``, ``check``, ``begin``, ``load`` ..., ``end``."""

    manifest: Manifest | None
    """Manifest of the open version; None if none is open."""

    def ranks_read(self, name: str) -> set[int]:
        """The trainer ranks whose slices of a tensor are read."""
        ...

    def open(self, place: dict[str, Any], version: int) -> Manifest:
        """Open a published version. Raises ShardError if it is missing or another version is published."""
        ...

    def check(self, wanted: Sequence[tuple[str, Box]]) -> ReadSums:
        """Verify that all of ``wanted`` can be read; returns checksums of what it read to do so.

        Does not change the model. Raises ShardError.
        """
        ...

    def begin(self) -> None:
        """Start reading what was checked, once and in the same order. Raises ShardError."""
        ...

    def load(self, copies: Copies) -> None:
        """Copy boxes of HF tensors to their targets. Raises ShardError."""
        ...

    def whole(self, name: str) -> torch.Tensor:
        """A full HF tensor, as a copy."""
        ...

    def end(self) -> ReadSums:
        """Verify that everything read since ``begin`` is of the open version; returns the checksums computed
        since then. Raises ShardError.
        """
        ...

    def release(self) -> None:
        """Abandon an interrupted update."""
        ...

    def close(self) -> None:
        """Release all memory and connections."""
        ...


def read_whole(reader: Reader, manifest: Manifest, name: str, device: torch.device) -> torch.Tensor:
    """A full HF tensor, as a copy on this device."""
    tensor = manifest.tensors[name]
    out = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device=device)
    reader.load(Copies([(name, Box.whole(tensor.shape))], [out], lambda: [out], TableCache()))
    return out


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run a block's GPU work on a separate stream, after all work queued before; waits for it at the end.

    Copies then do not block the engine's default stream, and their errors are raised here.
    """
    if device.type != "cuda":
        yield
        return
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One per process: torch caches freed memory by stream and has only 32 streams."""
    return torch.cuda.Stream(device)


@dataclass
class _Mapped:
    inode: tuple[int, int, int]
    memory: mmap.mmap
    bytes: torch.Tensor


class ShardReader:
    """``Reader`` of manifests in one folder, with shards in mapped files or in GPU memory."""

    def __init__(self, root: Path, gpu: str = "", on_progress: Callable[[], None] = lambda: None) -> None:
        """root: the only folder that manifests are read from (the engine's RPG_BRIDGE_DIR). gpu: UUID of the
        worker's GPU, to find trainer ranks on it. on_progress: called for each slice.
        """
        self.root, self._gpu, self._on_progress = root.resolve(), gpu, on_progress
        self.manifest: Manifest | None = None
        self._maps: dict[Path, _Mapped] = {}
        self._files: list[torch.Tensor] = []
        self._path, self._written = self.root, 0
        self._opened_gpu: dict[Copy, torch.Tensor] = {}
        self._copies: list[Copy] = []
        self._checked: TableCache[_Sums] = TableCache()

    def open(self, place: dict[str, Any], version: int) -> Manifest:
        """Map the files of a manifest after checking location, owner and version.

        Raises ShardError with the reason. Views of an earlier version stay valid.
        """
        self.manifest, self._files, self._copies = None, [], []
        path = self.root / str(place.get("manifest", ""))  # an absolute path replaces the root
        real = path.resolve()
        if not real.is_relative_to(self.root):
            raise ShardError(f"{path}: is outside {self.root}, the engine's RPG_BRIDGE_DIR")
        try:
            manifest = parse_manifest(read_text(path, self.root), place)
        except (OSError, ValueError) as e:
            raise ShardError(f"{path}: cannot be read as a manifest: {e}") from None
        if manifest.version != version:
            raise ShardError(f"{path}: holds version {manifest.version}, asked for {version}")
        if manifest.transport == "cuda_ipc":
            try:
                self._copies = choose_copies(manifest.shards, self._gpu)
                opened = self._opened_gpu
                self._opened_gpu = {c: opened[c] if c in opened else open_memory(c) for c in self._copies}
                self._files = [self._opened_gpu[c] for c in self._copies]
            except HandleError as e:
                raise ShardError(str(e)) from None
        else:
            self._files = [self._map(real.parent, s) for s in manifest.shards]
        self._path, self._written = real, real.stat().st_mtime_ns
        self.manifest = manifest
        self.check_version()
        return manifest

    def check_version(self) -> None:
        """Raise ShardError unless all shards hold the manifest's version; call before and after reading."""
        manifest = self._opened()
        if manifest.transport == "cuda_ipc":
            # The trainer's CPU cannot set a version word in GPU memory; it removes the manifest instead.
            try:
                unchanged = self._path.stat().st_mtime_ns == self._written
            except OSError:
                unchanged = False
            if not unchanged:
                raise ShardError(f"version {manifest.version} must not be read now")
            return
        for info, memory in zip(manifest.shards, self._files, strict=True):
            word = int(memory[:8].view(torch.int64))
            if word != manifest.version:
                state = "must not be read now" if word < 0 else f"holds version {word}"
                raise ShardError(
                    f"{info.file} (trainer rank {info.rank}) {state}, asked for {manifest.version}"
                )

    def check(self, wanted: Sequence[tuple[str, Box]]) -> ReadSums:
        """Compute the checksums of exactly what will be read."""

        def make() -> _Sums:
            cuts = [(name, *cut) for name, box in wanted for cut in self.cut(name, box)]
            slices = [(part, where.start) for _, part, where in cuts]
            parts = [(name, part.nbytes) for name, part, _ in cuts]
            return parts, table_of(slices, on_slice=self._on_progress)

        parts, table = self._made(self._checked, tuple(wanted), self._files, make)
        sums: ReadSums = {name: (0, 0) for name, _ in wanted}
        add_sums(sums, parts, modulo(table.sums()))
        self.check_version()
        return sums

    def begin(self) -> None:
        """Verify that the version is still the one that was checked."""
        self.check_version()

    def end(self) -> ReadSums:
        """Verify that the version did not change while reading; checksums were computed in ``check``."""
        self.check_version()
        return {}

    def release(self) -> None:
        """Nothing to abandon."""

    def cut(self, name: str, wanted: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        """The parts of a box of an HF tensor: (read-only view into a shard, its box in the HF tensor).

        Together they cover ``wanted`` exactly. The memory of the views is not writable.
        """
        for box in self._opened().tensors[name].boxes:
            common = box.hf.intersect(wanted)
            if common is not None:
                yield self._view(name, box, common), common

    def load(self, copies: Copies) -> None:
        """Copy boxes to their targets, on a GPU in one launch."""

        def make() -> SliceTable | HostSlices:
            parts = list(copies.parts(self.cut))
            slices = [(part, where.start) for _, part, where, _ in parts]
            return table_of(slices, [target for *_, target in parts], self._on_progress)

        self._made(copies.cache, None, [*copies.memory, *self._files], make).copy()
        self._on_progress()

    def whole(self, name: str) -> torch.Tensor:
        """A full HF tensor, as a copy."""
        return read_whole(self, self._opened(), name, self._files[0].device)

    def ranks_read(self, name: str) -> set[int]:
        """The trainer ranks whose slices of a tensor are read: with ``cuda_ipc``, of the replica chosen."""
        manifest = self._opened()
        read = self._copies or manifest.shards
        return {read[box.shard].rank for box in manifest.tensors[name].boxes}

    def damaged(self, name: str) -> list[Shard]:
        """Shards whose current bytes of a tensor do not match the published checksum."""
        manifest = self._opened()
        return [
            manifest.shards[box.shard]
            for box, expected in zip(manifest.tensors[name].boxes, manifest.box_sums(name), strict=True)
            if checksum(self._view(name, box, box.hf), box.hf.start) != expected
        ]

    def close(self) -> None:
        """Close the open version and unmap its files."""
        self.manifest, self._files = None, []
        self._opened_gpu.clear()
        for path in list(self._maps):
            self._forget(path)

    def _opened(self) -> Manifest:
        if self.manifest is None:
            raise ShardError("no publication is open; call open first")
        return self.manifest

    def _made[T](
        self, cache: TableCache[T], key: Hashable, memory: Iterable[torch.Tensor], make: Callable[[], T]
    ) -> T:
        """What ``make`` returns, on a GPU as long as nothing has moved; host memory would stay in use."""
        on_gpu = any(file.device.type == "cuda" for file in self._files)
        return cache.get((self._opened().parsed, key), memory, make) if on_gpu else make()

    def _view(self, name: str, box: PublishedBox, part: Box) -> torch.Tensor:
        dtype = torch_dtype(self._opened().tensors[name].dtype)
        nbytes = dtype.itemsize * Box.whole(box.param_shape).numel
        memory = self._files[box.shard][box.offset : box.offset + nbytes]
        if memory.numel() != nbytes:
            raise ShardError(f"{name}: a box reaches past the end of {self._opened().shards[box.shard]}")
        shard = memory.view(dtype).view(box.param_shape)
        start = tuple(a + b for a, b in zip(box.local.start, part.offset_in(box.hf), strict=True))
        return shard[Box(start, part.extent).slices()]

    def _map(self, folder: Path, info: Shard) -> torch.Tensor:
        if info.file != os.path.basename(info.file) or info.size < HEADER_BYTES:
            raise ShardError(f"the manifest names an impossible file {info.file!r} of {info.size} bytes")
        path = folder / info.file
        try:
            file = open_own(path)  # refuses links, so that the file is as private as the folder
        except OSError as e:
            raise ShardError(f"{path} (trainer rank {info.rank}): cannot be opened ({e.strerror})") from None
        with file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ShardError(f"{path}: not a private file of this user, so not a trainer's")
            if status.st_size != info.size:
                raise ShardError(f"{path}: has {status.st_size} bytes, its manifest says {info.size}")
            inode = (status.st_dev, status.st_ino, status.st_size)
            mapped = self._maps.get(path)
            if mapped is None or mapped.inode != inode:
                self._forget(path)
                memory = mmap.mmap(file.fileno(), info.size, access=mmap.ACCESS_READ)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns about read-only memory, which is intended
                    mapped = _Mapped(inode, memory, torch.frombuffer(memory, dtype=torch.uint8))
                self._maps[path] = mapped
            return mapped.bytes

    def _forget(self, path: Path) -> None:
        mapped = self._maps.pop(path, None)
        if mapped is not None:
            memory = mapped.memory
            del mapped
            with suppress(BufferError):  # a view is still alive; the memory is freed with it
                memory.close()
