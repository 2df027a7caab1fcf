"""Writes the weights of a whole model in Megatron's format (torch_dist), without Megatron."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import torch

from rpg_megatron.checkpoints.index import INDEX, Index, StoredPart, Tensor, to_torch, write_plain_index
from rpg_megatron.checkpoints.megatron_folder import CONTENT, MEGATRON
from rpg_megatron.checkpoints.megatron_tensors import Place
from rpg_megatron.config.files import atomic_write_text, open_own
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.partition import Shape
from rpg_megatron.system.dtypes import dtype_name

_WEIGHTS = "__0_0.distcp"
"""The file of all weights, named as that of rank 0."""
_STATEFUL = re.compile(r"(.*\.(?:linear_(?:[a-z_]*proj|qkv|fc1|fc2)|in_proj|out_proj))\.weight(?:\.query)?")
"""Layers that have an extra state in Megatron, for FP8, which its readers expect."""


class MegatronWriter:
    """A torch_dist checkpoint that grows by one parameter at a time. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._index = folder, Index({}, [], [])
        self._file = open_own(folder / _WEIGHTS, "xb")

    def add(self, place: Place, parameter: torch.Tensor, parts: int) -> None:
        """Write a parameter, in as many parts along its rows."""
        empty = Tensor(dtype_name(parameter.dtype), (*place.sizes, *parameter.shape), [])
        chunks = self._index.tensors.setdefault(place.key, empty).chunks
        for number, part in enumerate(parameter.chunk(parts)):
            own = Box((number * len(part), *(0,) * (part.ndim - 1)), tuple(part.shape))
            box = place.box(own)
            chunks.append((box.start, box.extent))
            # Of a part, torch would write all of the parameter that it is a part of.
            self._write(place.key, box.start, (part.clone() if parts > 1 else part).reshape(box.extent))
        if match := _STATEFUL.fullmatch(place.key):
            (at,), (size,) = place.at or (0,), place.sizes or (1,)
            self._add_object(f"{match[1]}._extra_state/shard_{at}_{size}", None)

    def finish(self) -> None:
        """Write the index, as torch's pickle and as JSON."""
        # Without a version Megatron-LM would assume its oldest order of QKV.
        common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": dict(CONTENT)}
        self._add_object("common_state/shard_0_1", common)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        with open_own(self._folder / INDEX, "xb") as file:
            pickle.dump(to_torch(self._index), file)
        write_plain_index(self._folder, self._index)
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        atomic_write_text(self._folder / MEGATRON, json.dumps(backend))

    def _add_object(self, name: str, value: object) -> None:
        self._index.objects.append(name)
        self._write(name, None, [value])

    def _write(self, name: str, offset: Shape | None, value: object) -> None:
        begin = self._file.tell()
        torch.save(value, self._file)
        part = StoredPart(name, offset, None, _WEIGHTS, begin, self._file.tell() - begin)
        self._index.pieces.append(part)
