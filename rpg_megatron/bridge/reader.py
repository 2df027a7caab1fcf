"""Engine side of the live bridge: read-only views of published shards.

Files are mapped, not read: a slice costs what its bytes cost. A map is kept between syncs as long as the
file is the same inode, because mapping anew pays the page faults of the whole model again.
"""

from __future__ import annotations

import mmap
import os
import stat
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from rpg_megatron.bridge.checksum import MODULUS, checksum
from rpg_megatron.bridge.manifest import HEADER_BYTES, Manifest, PublishedBox, PublishedFile, read_manifest
from rpg_megatron.bridge.plan import Box, check_cover


class ShardError(Exception):
    """A publication cannot be read: wrong generation, owner or place, or files that do not fit it."""


@dataclass
class _Mapped:
    inode: tuple[int, int, int]
    memory: mmap.mmap
    bytes: torch.Tensor


class ShardReader:
    """Opens publications below one folder and cuts boxes out of them."""

    def __init__(self, root: Path) -> None:
        """root: the only folder that manifests may come from (the engine's RPG_BRIDGE_DIR)."""
        self.root = root.resolve()
        self.manifest: Manifest | None = None
        self._maps: dict[Path, _Mapped] = {}
        self._files: list[torch.Tensor] = []

    def open(self, path: Path, generation: int) -> Manifest:
        """Map the files of a manifest, after checking place, owner and generation.

        Raises ShardError with the reason; views of an earlier publication stay valid.
        """
        self.manifest, self._files = None, []
        real = path.resolve()
        if not real.is_relative_to(self.root):
            raise ShardError(f"{path}: lies outside {self.root}, the engine's RPG_BRIDGE_DIR")
        try:
            manifest = read_manifest(real)
        except (OSError, ValueError) as e:
            raise ShardError(f"{path}: cannot be read as a manifest ({e})") from None
        if manifest.generation != generation:
            raise ShardError(f"{path}: holds generation {manifest.generation}, asked for {generation}")
        self._files = [self._map(real.parent, f) for f in manifest.files]
        for name, tensor in manifest.tensors.items():
            check_cover(name, tensor.shape, [b.hf for b in tensor.boxes])
        self.manifest = manifest
        self.check_generation()
        return manifest

    def check_generation(self) -> None:
        """Raise ShardError unless every file holds the manifest's generation: before and after reading."""
        manifest = self._opened()
        for info, memory in zip(manifest.files, self._files, strict=True):
            word = int(memory[:8].view(torch.int64))
            if word != manifest.generation:
                state = "is being written" if word < 0 else f"holds generation {word}"
                raise ShardError(
                    f"{info.name} (trainer rank {info.rank}) {state}, asked for {manifest.generation}"
                )

    def dtype(self, name: str) -> torch.dtype:
        """Element type of a published tensor."""
        found = getattr(torch, self._opened().tensors[name].dtype)
        if not isinstance(found, torch.dtype):
            raise ShardError(f"{name}: unknown element type {self._opened().tensors[name].dtype}")
        return found

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
        out = torch.empty(tensor.shape, dtype=self.dtype(name))
        for part, box in self.cut(name, Box.whole(tensor.shape)):
            out[box.slices()].copy_(part)
        return out

    def damaged_files(self, name: str) -> list[PublishedFile]:
        """Files whose present bytes of a tensor do not have the published checksum."""
        manifest = self._opened()
        return [
            manifest.files[box.file]
            for box in manifest.tensors[name].boxes
            if checksum(self._view(name, box, box.hf), box.hf.start) % MODULUS != box.checksum
        ]

    def close(self) -> None:
        """Forget the publication and unmap its files."""
        self.manifest, self._files = None, []
        for path in list(self._maps):
            self._forget(path)

    def _opened(self) -> Manifest:
        if self.manifest is None:
            raise ShardError("no publication is open")
        return self.manifest

    def _view(self, name: str, box: PublishedBox, part: Box) -> torch.Tensor:
        dtype = self.dtype(name)
        nbytes = dtype.itemsize * Box.whole(box.shard_shape).numel
        memory = self._files[box.file][box.offset : box.offset + nbytes]
        if memory.numel() != nbytes:
            raise ShardError(f"{name}: its shard reaches past the end of file {box.file}")
        shard = memory.view(dtype).view(box.shard_shape)
        start = tuple(a + b for a, b in zip(box.local.start, part.offset_in(box.hf), strict=True))
        return shard[Box(start, part.extent).slices()]

    def _map(self, folder: Path, info: PublishedFile) -> torch.Tensor:
        if info.name != os.path.basename(info.name) or info.size < HEADER_BYTES:
            raise ShardError(f"manifest names an impossible file {info.name!r} of {info.size} bytes")
        path = folder / info.name
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
