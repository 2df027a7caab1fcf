"""Records which slices of HF tensors vLLM's weight loaders copy where, by a run on meta tensors.

A view of a meta tensor shares the storage object of its base. So when a loader calls ``copy_``, the storages
identify source tensor and parameter, and (shape, stride, offset) identify the slice, however the loader made
it (narrow, chunk, unbind, ``.data``).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rpg_megatron.models.boxes import Box


@dataclass(frozen=True)
class Strided:
    """Shape, strides and offset of a view, in elements."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, view: torch.Tensor) -> Strided:
        """Shape, strides and offset of ``view`` in its storage."""
        return cls(tuple(view.shape), tuple(view.stride()), int(view.storage_offset()))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return torch.Size(self.shape).numel()

    def on(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same view of another tensor of the recorded base's shape."""
        return tensor.as_strided(self.shape, self.stride, self.offset + int(tensor.storage_offset()))


@dataclass(frozen=True)
class SliceCopy:
    """``target`` (a view of a parameter) receives a box of an HF tensor, element by element."""

    target: Strided
    hf_name: str
    box: Box


@dataclass(frozen=True)
class Fill:
    """``target`` (a view of a parameter) is filled with a constant: padding."""

    target: Strided
    value: float


class LoadRecorder[Key: Hashable](TorchDispatchMode):
    """Dispatch mode for running loaders; afterwards ``copies`` and ``fills`` hold what they did.

    sources: full tensors by name. targets: parameters by any key, which may share a tensor. All are on the
    meta device, each with a storage of its own. Operations that are neither are described in ``refused``.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], targets: Mapping[Key, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own
        self._sources = {_storage(t): (name, t) for name, t in sources.items()}
        self._targets = {_storage(t): key for key, t in targets.items()}
        self.copies: list[tuple[Key, SliceCopy]] = []
        self.fills: list[tuple[Key, Fill]] = []
        self.refused: list[str] = []
        self.written: dict[Key, set[Strided]] = {}
        """What ``copies``, ``fills`` and refused copies wrote to."""

    def count(self, target: torch.Tensor) -> int:
        """Number of elements of a parameter that were written."""
        key = self._targets.get(_storage(target))
        return 0 if key is None else sum(view.numel for view in self.written.get(key, ()))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run the operation (free on meta tensors) and record writes to parameters."""
        is_copy = func is torch.ops.aten.copy_.default
        # A tensor that is no parameter is not on the meta device, and sources have no values to copy.
        skip = is_copy and args[1].is_meta and not args[0].is_meta
        result = args[0] if skip else func(*args, **(kwargs or {}))
        name = func._schema.name
        if name.endswith("_") and args and isinstance(args[0], torch.Tensor) and args[0].numel():
            self._note(func, name, args)
        return result

    def _note(self, func: Any, name: str, args: Sequence[Any]) -> None:
        view, storage = Strided.of(args[0]), _storage(args[0])
        key = self._targets.get(storage)
        if func is torch.ops.aten.copy_.default:
            self._note_copy(key, args[0], args[1])
        elif key is None:
            if storage in self._sources:  # what is copied from it later is no longer what was published
                self.refused.append(f"{name} on {self._sources[storage][0]}")
        elif func is torch.ops.aten.zero_.default:
            self.fills.append((key, Fill(view, 0.0)))
        elif func is torch.ops.aten.fill_.Scalar:
            self.fills.append((key, Fill(view, float(args[1]))))
        else:
            self.refused.append(f"{name} on {key}")
            return
        if key is not None:
            views = self.written.setdefault(key, set())
            if view in views:
                self.refused.append(f"{key} is written twice")
            views.add(view)

    def _note_copy(self, key: Key | None, target: torch.Tensor, source: torch.Tensor) -> None:
        origin = self._sources.get(_storage(source))
        if key is None or origin is None:
            source_name = "an intermediate tensor" if origin is None else origin[0]
            self.refused.append(f"copy of {source_name} into {key or 'no parameter'}")
            return
        name, full = origin
        box = strided_box(Strided.of(source), full.shape)
        if box is None or target.shape != source.shape:
            self.refused.append(f"copy of {name} into {key} is not a box")
            return
        self.copies.append((key, SliceCopy(Strided.of(target), name, box)))


def strided_box(view: Strided, shape: Sequence[int]) -> Box | None:
    """The box that a view of a contiguous tensor of this shape covers, in the same order; else None.

    Dimensions of size 1 may be dropped or added. Transposed, flattened and strided views are not boxes.
    """
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    dims = [(n, s) for n, s in zip(view.shape, view.stride, strict=True) if n != 1]
    start, extent, offset = [], [], view.offset
    for size, stride in zip(shape, strides, strict=True):
        first, offset = divmod(offset, stride)
        taken = 1
        if size != 1 and dims and dims[0][1] == stride:
            taken = dims.pop(0)[0]
        if first + taken > size:
            return None
        start.append(first)
        extent.append(taken)
    return None if dims or offset else Box(tuple(start), tuple(extent))


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the storage object behind a tensor and its views."""
    return int(tensor.untyped_storage()._cdata)
