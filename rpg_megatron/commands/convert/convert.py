"""Writes a checkpoint of one format from one of the other, parameter by parameter, in this process.

No more of the model is in memory than one parameter and, where the result is of Hugging Face's format, the
file that is being written. Needs no Megatron: its format has no layout.
"""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, ItemsView, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rpg_megatron.checkpoints.hf_export import export_adapter, export_hf
from rpg_megatron.checkpoints.hf_files import verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_import import load_hf_weights
from rpg_megatron.checkpoints.index import INDEX, Index, StoredPart, to_torch, write_plain_index
from rpg_megatron.checkpoints.index import Tensor as StoredTensor
from rpg_megatron.checkpoints.megatron_folder import CONTENT, MEGATRON
from rpg_megatron.checkpoints.megatron_tensors import (
    MegatronTensors,
    Place,
    find_places,
    open_tensors,
    whole_parameters,
)
from rpg_megatron.config.files import atomic_write_text, open_own
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.lora import AdapterMapping, peft_name, weight_name
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import Shape
from rpg_megatron.models.placement import RankCoordinates
from rpg_megatron.system.dtypes import dtype_name, torch_dtype

if TYPE_CHECKING:
    from rpg_megatron.commands.convert.command import Source

Count = Callable[[int], None]
"""Called with the bytes of each parameter."""
_ONE_RANK: dict[str, Any] = {"tensor": 1, "tensor_rank": 0, "vocab_multiple": 1}
_WHOLE = RankCoordinates(rank=0, pipeline_rank=0, data_rank=0, context_rank=0, **_ONE_RANK)
_FILE_BYTES = 5 * 1024**3
"""Size of a file of Megatron's format from which the next one begins."""
_STATEFUL = re.compile(r"(.*\.linear_(?:proj|qkv|fc1|fc2))\.weight")
"""Layers that have an extra state in Megatron, for FP8, which its readers expect."""


def write_megatron(source: Source, folder: Path, count: Count) -> None:
    """Write the HF checkpoint in Megatron's format, into an empty folder. Raises UserError, OSError."""
    writer = _MegatronWriter(folder)

    def filled() -> Iterator[tuple[str, Tensor]]:
        for name, shape in whole_parameters(source.layout).items():
            parameter = torch.empty(shape, dtype=torch_dtype(source.dtype))
            yield name, parameter
            # The two halves of a gated block's input layer are apart, as Megatron's ranks need them.
            halves = 2 if name.endswith("linear_fc1.weight") else 1
            writer.add(find_places(name, source.shape)[0], parameter, halves)
            count(parameter.nbytes)

    load_hf_weights(source.folder, filled(), source.layout, **_ONE_RANK)
    writer.finish()


def write_hf(source: Source, out: Path, count: Count, max_shard_bytes: int) -> None:
    """Write the Megatron checkpoint in Hugging Face's format or, of adapters alone, in PEFT's.

    Raises UserError, OSError.
    """
    layout, lora = source.layout, source.lora
    adapters = layout if lora is None else AdapterMapping(source.shape, lora)
    stored = MegatronTensors(source.folder, adapters)
    dtype, read = torch_dtype(stored.dtype), stored.parameter
    if isinstance(layout, AdapterMapping):
        export_adapter(out, _Parameters(layout, read, count), layout, _WHOLE, source.config, dtype=dtype)
        return
    if lora is not None:
        read = _read_merged(source, stored, lora)
    export_hf(
        out,
        source.config,
        _Parameters(layout, read, count),
        layout,
        _WHOLE,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        root=source.root,
        ends=lambda: source.ends,
    )


class _Parameters(Mapping[str, Tensor]):
    """A whole model's parameters by Megatron's name; ``[name]`` reads one, and the last one is kept.

    ``items`` gives tensors without values, for their shapes.
    """

    def __init__(self, layout: ModelMapping, read: Callable[[str], Tensor], count: Count) -> None:
        self._shapes, self._read, self._count = whole_parameters(layout), read, count
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # frees it before the next one is read
            self._last = name, self._read(name)
            self._count(self._last[1].nbytes)
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)

    def items(self) -> ItemsView[str, Tensor]:
        return {name: torch.empty(shape, device="meta") for name, shape in self._shapes.items()}.items()


def _read_merged(source: Source, adapters: MegatronTensors, lora: LoraSettings) -> Callable[[str], Tensor]:
    """Reads the model's parameters with the adapters added, in float32: the caller rounds the sums once."""
    layout, base, shapes = source.layout, open_tensors(source.config), whole_parameters(source.layout)
    stored = verify_hf_checkpoint(source.config, layout)
    factors = adapters.mapping.hf_tensors()
    layers, names = range(source.shape.num_layers), lora.names
    adapted = {weight_name(n, t): [peft_name(n, t, x) for x in "AB"] for n in layers for t in names}

    @torch.no_grad()
    def read(name: str) -> Tensor:
        weight = torch.empty(shapes[name])
        if base is not None:
            weight.copy_(base.parameter(name))
        else:
            one = [(name, weight)]
            load_hf_weights(source.config, one, layout, stored=stored, **_ONE_RANK)
        for piece in layout.pieces(name, **_ONE_RANK):
            if piece.hf_name in adapted:
                a, b = (adapters.read(x, Box.whole(factors[x])).float() for x in adapted[piece.hf_name])
                rows = slice(piece.hf.start[0], piece.hf.end[0])
                weight[piece.local.slices()].addmm_(b[rows], a, alpha=lora.scale)
        return weight

    return read


class _MegatronWriter:
    """A torch_dist checkpoint that grows by one parameter at a time. All methods raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._file = open_own(self._new_name(), "xb")
        self._index = Index({}, [], [])

    def add(self, place: Place, parameter: Tensor, parts: int) -> None:
        """Write a parameter, in as many parts along its rows."""
        whole = place.shape(tuple(parameter.shape))
        chunks: list[tuple[Shape, Shape]] = []
        for number, part in enumerate(parameter.chunk(parts)):
            own = Box((number * len(part), *(0,) * (part.ndim - 1)), tuple(part.shape))
            box = place.box(own)
            chunks.append((box.start, box.extent))
            # Of a part, torch would write all of the parameter that it is a part of.
            self._write(place.key, box.start, (part.clone() if parts > 1 else part).reshape(box.extent))
        known = self._index.tensors.get(place.key)
        chunks = chunks if known is None else known.chunks + chunks
        self._index.tensors[place.key] = StoredTensor(dtype_name(parameter.dtype), whole, chunks)
        if match := _STATEFUL.fullmatch(place.key):
            at, size = place.axes[-1] if place.axes else (0, 1)
            self._add_object(f"{match[1]}._extra_state/shard_{at}_{size}", None)

    def finish(self) -> None:
        """Write the index, of the pickle for torch and of JSON."""
        # Without a version Megatron-LM would assume its oldest order of QKV.
        common = {"checkpoint_version": 3.0, "iteration": 0, "content_metadata": dict(CONTENT)}
        self._add_object("common_state/shard_0_1", common)
        self._close()
        metadata = to_torch(self._index)
        with open_own(self._folder / INDEX, "xb") as file:
            pickle.dump(metadata, file)
        write_plain_index(self._folder, metadata, metadata.storage_data)
        text = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        atomic_write_text(self._folder / MEGATRON, text)

    def _add_object(self, name: str, value: object) -> None:
        self._index.objects.append(name)
        self._write(name, None, [value])

    def _write(self, name: str, offset: Shape | None, value: object) -> None:
        if self._file.tell() >= _FILE_BYTES:
            self._close()
            self._number += 1
            self._file = open_own(self._new_name(), "xb")
        begin = self._file.tell()
        torch.save(value, self._file)
        part = StoredPart(name, offset, None, self._new_name().name, begin, self._file.tell() - begin)
        self._index.pieces.append(part)

    def _new_name(self) -> Path:
        return self._folder / f"__{self._number}_0.distcp"

    def _close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
