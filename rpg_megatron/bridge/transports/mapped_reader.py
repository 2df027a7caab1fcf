"""Engine side of the live bridge where memory is shared: views of published shards, to be read only.

Files are mapped, not read: a slice costs what its bytes cost. A map is kept between syncs as long as the
file is the same inode, because mapping anew pays the page faults of the whole model again. Memory of a GPU is
opened by its handle.
"""

from __future__ import annotations

import mmap
import os
import stat
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import torch

from rpg_megatron.bridge.checksum import MODULUS, checksum, checksums
from rpg_megatron.bridge.manifest import HEADER_BYTES, Copy, Manifest, PublishedBox, Shard, parse_manifest
from rpg_megatron.bridge.transports.cuda_ipc import HandleError, choose_copies, open_memory
from rpg_megatron.models.boxes import Box, check_cover
from rpg_megatron.system.dtypes import torch_dtype

Sums = dict[str, tuple[int, int]]
"""What a worker read of each HF tensor: checksum and bytes."""


class ShardError(Exception):
    """A publication cannot be read: wrong version, owner or place, or files that do not fit it."""


class Reader(Protocol):
    """How an engine worker gets at published weights; one implementation for each transport."""

    manifest: Manifest | None
    """Of the open publication."""

    @property
    def ranks_read(self) -> dict[int, int]:
        """Of each rank that the open publication names, the one that is read: itself, or one that holds the
        same.
        """
        ...

    def open(self, place: dict[str, Any], version: int) -> Manifest:
        """Find a publication. Raises ShardError if it is not there or holds another version."""
        ...

    def check(self, wanted: Sequence[tuple[str, Box]]) -> Sums:
        """Make sure that all of ``wanted`` can be read; returns what was summed, if it was read already.

        Raises ShardError. Nothing of the model is touched.
        """
        ...

    def begin(self) -> None:
        """Start to read what was checked, once, in the same order. Raises ShardError."""
        ...

    def cut(self, hf_name: str, wanted: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        """The parts of a box of an HF tensor, as (values, their box in the HF tensor).

        They cover it exactly. Values may be gone when the next part is asked for; do not write to them.
        """
        ...

    def whole(self, name: str) -> torch.Tensor:
        """A full HF tensor, as a copy of its own."""
        ...

    def end(self) -> Sums:
        """Confirm that what was read since ``begin`` is the version; returns what was summed only now.

        Raises ShardError.
        """
        ...

    def release(self) -> None:
        """An update stopped half way: forget it."""
        ...

    def close(self) -> None:
        """Let go of everything."""
        ...


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """A block's work on a GPU goes to a stream of its own, after what is under way, and ends with the block.

    Copies do not hold up the engine's default stream then, and a failure in them is raised here.
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
    """One for the life of the process: torch keeps freed memory apart for each stream, and has 32 of them."""
    return torch.cuda.Stream(device)


@dataclass
class _Mapped:
    inode: tuple[int, int, int]
    memory: mmap.mmap
    bytes: torch.Tensor


class ShardReader:
    """Opens publications below one folder and cuts boxes out of them."""

    def __init__(self, root: Path, gpu: str = "") -> None:
        """root: the only folder that manifests may come from (the engine's RPG_BRIDGE_DIR). gpu: UUID of the
        worker's, to find trainer ranks on it.
        """
        self.root, self._gpu = root.resolve(), gpu
        self.manifest: Manifest | None = None
        self._maps: dict[Path, _Mapped] = {}
        self._files: list[torch.Tensor] = []
        self._path, self._written = self.root, 0
        self._opened_gpu: dict[Copy, torch.Tensor] = {}
        self.ranks_read: dict[int, int] = {}

    def open(self, place: dict[str, Any], version: int) -> Manifest:
        """Map the files of a manifest, after checking place, owner and version.

        Raises ShardError with the reason; views of an earlier publication stay valid.
        """
        self.manifest, self._files, self.ranks_read = None, [], {}
        path = self.root / str(place.get("manifest", ""))  # of an absolute path, that one
        real = path.resolve()
        if not real.is_relative_to(self.root):
            raise ShardError(f"{path}: lies outside {self.root}, the engine's RPG_BRIDGE_DIR")
        try:
            manifest = parse_manifest(real.read_text(encoding="utf-8"), place)
        except (OSError, ValueError) as e:
            raise ShardError(f"{path}: cannot be read as a manifest: {e}") from None
        if manifest.version != version:
            raise ShardError(f"{path}: holds version {manifest.version}, asked for {version}")
        if manifest.transport == "cuda_ipc":
            try:
                copies = choose_copies(manifest.shards, self._gpu)
                kept = self._opened_gpu
                self._opened_gpu = {c: kept[c] if c in kept else open_memory(c) for c in copies}
                self._files = [self._opened_gpu[c] for c in copies]
                self.ranks_read = {s.rank: c.rank for s, c in zip(manifest.shards, copies, strict=True)}
            except HandleError as e:
                raise ShardError(str(e)) from None
        else:
            self._files = [self._map(real.parent, s) for s in manifest.shards]
        self._path, self._written = real, real.stat().st_mtime_ns
        for name, tensor in manifest.tensors.items():
            check_cover(name, tensor.shape, [b.hf for b in tensor.boxes])
        self.manifest = manifest
        self.check_version()
        return manifest

    def check_version(self) -> None:
        """Raise ShardError unless all still is the manifest's version: before and after reading."""
        manifest = self._opened()
        if manifest.transport == "cuda_ipc":
            # On a GPU there is no word that the trainer's CPU could set: it removes the manifest.
            try:
                unchanged = self._path.stat().st_mtime_ns == self._written
            except OSError:
                unchanged = False
            if not unchanged:
                raise ShardError(f"version {manifest.version} is not to be read now")
            return
        for info, memory in zip(manifest.shards, self._files, strict=True):
            word = int(memory[:8].view(torch.int64))
            if word != manifest.version:
                state = "is not to be read now" if word < 0 else f"holds version {word}"
                raise ShardError(
                    f"{info.file} (trainer rank {info.rank}) {state}, asked for {manifest.version}"
                )

    def check(self, wanted: Sequence[tuple[str, Box]]) -> Sums:
        """Sum exactly what will be read."""
        sums: Sums = {name: (0, 0) for name, _ in wanted}
        parts = [(name, *cut) for name, box in wanted for cut in self.cut(name, box)]
        found = checksums((part, where.start) for _, part, where in parts)
        for (name, part, _), number in zip(parts, found, strict=True):
            total, nbytes = sums[name]
            sums[name] = (total + number) % MODULUS, nbytes + part.nbytes
        self.check_version()
        return sums

    def begin(self) -> None:
        """Make sure that it still is what was checked."""
        self.check_version()

    def end(self) -> Sums:
        """Make sure that it was so to the end; all was summed before."""
        self.check_version()
        return {}

    def release(self) -> None:
        """Nothing is under way."""

    def cut(self, name: str, wanted: Box) -> Iterator[tuple[torch.Tensor, Box]]:
        """The parts of a box of an HF tensor: (read-only view into a shard, its box in the HF tensor).

        Together they cover ``wanted`` exactly. Do not write to the views: their memory is not writable.
        """
        for box in self._opened().tensors[name].boxes:
            common = box.hf.intersect(wanted)
            if common is not None:
                yield self._view(name, box, common), common

    def whole(self, name: str) -> torch.Tensor:
        """A full HF tensor, as a copy of its own."""
        tensor = self._opened().tensors[name]
        device = self._files[0].device
        out = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device=device)
        for part, box in self.cut(name, Box.whole(tensor.shape)):
            out[box.slices()].copy_(part)
        return out

    def damaged(self, name: str) -> list[Shard]:
        """Shards whose present bytes of a tensor do not have the published checksum."""
        manifest = self._opened()
        return [
            manifest.shards[box.shard]
            for box in manifest.tensors[name].boxes
            if checksum(self._view(name, box, box.hf), box.hf.start) % MODULUS != box.checksum
        ]

    def close(self) -> None:
        """Forget the publication and unmap its files."""
        self.manifest, self._files = None, []
        self._opened_gpu.clear()
        for path in list(self._maps):
            self._forget(path)

    def _opened(self) -> Manifest:
        if self.manifest is None:
            raise ShardError("no publication is open")
        return self.manifest

    def _view(self, name: str, box: PublishedBox, part: Box) -> torch.Tensor:
        dtype = torch_dtype(self._opened().tensors[name].dtype)
        nbytes = dtype.itemsize * Box.whole(box.param_shape).numel
        memory = self._files[box.shard][box.offset : box.offset + nbytes]
        if memory.numel() != nbytes:
            raise ShardError(f"{name}: its box reaches past the end of {self._opened().shards[box.shard]}")
        shard = memory.view(dtype).view(box.param_shape)
        start = tuple(a + b for a, b in zip(box.local.start, part.offset_in(box.hf), strict=True))
        return shard[Box(start, part.extent).slices()]

    def _map(self, folder: Path, info: Shard) -> torch.Tensor:
        if info.file != os.path.basename(info.file) or info.size < HEADER_BYTES:
            raise ShardError(f"manifest names an impossible file {info.file!r} of {info.size} bytes")
        path = folder / info.file
        try:
            # Not a link, so that the folder's privacy is the file's; not blocking, should it be a pipe.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as e:
            raise ShardError(f"{path} (trainer rank {info.rank}): cannot be opened ({e.strerror})") from None
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
                raise ShardError(f"{path}: not a private file of this user, so not the trainer's")
            if found.st_size != info.size:
                raise ShardError(f"{path}: has {found.st_size} bytes, its manifest says {info.size}")
            inode = (found.st_dev, found.st_ino, found.st_size)
            kept = self._maps.get(path)
            if kept is None or kept.inode != inode:
                self._forget(path)
                memory = mmap.mmap(fd, info.size, access=mmap.ACCESS_READ)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # torch warns of read-only memory, which is what we want
                    kept = _Mapped(inode, memory, torch.frombuffer(memory, dtype=torch.uint8))
                self._maps[path] = kept
            return kept.bytes
        finally:
            os.close(fd)

    def _forget(self, path: Path) -> None:
        kept = self._maps.pop(path, None)
        if kept is not None:
            memory = kept.memory
            del kept
            with suppress(BufferError):  # a view is still alive; the memory goes with it
                memory.close()
