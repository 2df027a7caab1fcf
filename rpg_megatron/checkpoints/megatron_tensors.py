"""The weights of a Megatron checkpoint (torch_dist), as one rank with the whole model has them.

A checkpoint holds full tensors, in any number of parts, whatever layout has written it. So a box of a
Hugging Face tensor is one box or several in it, which are read without Megatron and by any rank for itself.
Needs torch only to read weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rpg_megatron.checkpoints.hf_files import StoredTensor
from rpg_megatron.checkpoints.index import INDEX, Tensor, read_index
from rpg_megatron.checkpoints.megatron_folder import check_tensors, contents_of, find_short_files, weights_of
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_shape import ModelShape, read_model_shape
from rpg_megatron.models.boxes import Box, Piece
from rpg_megatron.models.dense import FUSED
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import Shape
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import SAFETENSORS, WEIGHT_DTYPES, torch_dtype

if TYPE_CHECKING:
    import torch

    from rpg_megatron.checkpoints.foreign_reader import Location

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_FUSED = {name: fused for fused, name in FUSED.items()}
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.lora.lm_head.B")
"""Parameters with a row for each token, which layouts pad differently."""
_HEADERS = {name: header for header, name in SAFETENSORS.items()}


@dataclass(frozen=True)
class Place:
    """Where a parameter of the whole model is stored."""

    key: str
    axes: tuple[tuple[int, int], ...] = ()
    """Index and size of each dimension that the stored tensor has in front: of layers, of experts."""

    def shape(self, own: Shape) -> Shape:
        """Of the stored tensor."""
        return (*(size for _, size in self.axes), *own)

    def box(self, own: Box) -> Box:
        """A box of the parameter, in the stored tensor."""
        return Box((*(at for at, _ in self.axes), *own.start), (*(1 for _ in self.axes), *own.extent))


def find_places(name: str, model: ModelShape) -> list[Place]:
    """Where Megatron may store a parameter, named as in ``ModelMapping``; first where we do.

    Norms are part of the layer behind them or not; each layer has its own key, or all layers one.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return [Place(name)]
    layer, rest, experts = int(match[1]), match[2], ()
    if model.experts is not None and (expert := _EXPERT.fullmatch(rest)):
        rest, experts = f"mlp.experts.experts.{expert[2]}", ((int(expert[1]), model.experts.count),)
    names = [_FUSED[rest], rest] if rest in _FUSED else [rest]
    return [
        *(Place(f"decoder.layers.{layer}.{each}", experts) for each in names),
        *(Place(f"decoder.layers.{each}", ((layer, model.num_layers), *experts)) for each in names),
    ]


def whole_parameters(mapping: ModelMapping) -> dict[str, Shape]:
    """Megatron name -> shape of all parameters, on one rank with the whole model."""
    return mapping.stage_params(
        layers=range(mapping.shape.num_layers), first=True, last=True, tensor=1, vocab_multiple=1
    )


def open_tensors(model: Path) -> MegatronTensors | None:
    """The weights of a model's folder if it is the ``hf`` of a Megatron checkpoint. Raises UserError."""
    folder = weights_of(model)
    return None if folder is None else MegatronTensors(folder, mapping_for(read_model_shape(model)))


class MegatronTensors:
    """The weights of a checkpoint in ``folder``, which has Megatron's ``metadata.json``."""

    def __init__(self, folder: Path, mapping: ModelMapping) -> None:
        """Raises UserError if the tensors are not those of the mapping, or if files are too short."""
        self.folder, self.mapping = folder, mapping
        self._index = read_index(folder)
        contents = contents_of(self._index)
        self.parameters = whole_parameters(mapping)
        self.places = {}
        for name in self.parameters:
            places = find_places(name, mapping.shape)
            self.places[name] = next((p for p in places if p.key in contents.tensors), places[0])
        expected = {p.key: (p.shape(self.parameters[n]), n in _VOCABULARY) for n, p in self.places.items()}
        check_tensors(folder, contents.weights, expected, mapping.shape.vocab_size)
        if short := find_short_files(folder, contents):
            raise UserError(f"{folder}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(short))

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors by Hugging Face's names, as ``hf_files.list_checkpoint`` lists those of files."""
        shapes = self.mapping.hf_tensors()
        return {
            name: StoredTensor(self.folder / INDEX, _HEADERS.get(dtype, dtype), shapes[name], 0)
            for name, dtype in ((n, self._stored(pieces[0][0]).dtype) for n, pieces in self._pieces.items())
        }

    @property
    def dtype(self) -> str:
        """The dtype of all weights. Raises UserError if there are several, or if it is not one of weights."""
        dtypes = sorted({self._stored(name).dtype for name in self.parameters})
        if len(dtypes) != 1:
            raise UserError(
                f"{self.folder}: the weights have several dtypes ({', '.join(dtypes)}); save them with one"
            )
        if dtypes[0] not in WEIGHT_DTYPES:
            raise UserError(f"{self.folder}: weights are {dtypes[0]}; known: {', '.join(WEIGHT_DTYPES)}")
        return dtypes[0]

    def parameter(self, name: str) -> torch.Tensor:
        """A whole parameter, in the checkpoint's dtype."""
        return self._read(name, Box.whole(self.parameters[name]))

    def read(self, hf_name: str, box: Box) -> torch.Tensor:
        """A box of a Hugging Face tensor, in the checkpoint's dtype."""
        import torch

        pieces = self._pieces[hf_name]
        out = torch.empty(box.extent, dtype=torch_dtype(self._stored(pieces[0][0]).dtype))
        for name, piece in pieces:
            if (part := piece.cut(box)) is not None:
                out[Box(part.hf.offset_in(box), part.hf.extent).slices()] = self._read(name, part.local)
        return out

    def _stored(self, name: str) -> Tensor:
        return self._index.tensors[self.places[name].key]

    def _read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a parameter: from the parts that hold some of it, the rows that they share with it."""
        import torch

        from rpg_megatron.checkpoints.plain_loading import read_part

        stored, wanted = self._stored(name), self.places[name].box(box)
        out = torch.empty(wanted.extent, dtype=torch_dtype(stored.dtype))
        for offset, shape in stored.chunks:
            if offset and not wanted.start[0] - shape[0] < offset[0] < wanted.end[0]:
                continue  # quick, since a tensor of experts has thousands
            part = Box(offset, shape)
            if (common := part.intersect(wanted)) is not None:
                file, where = self._locations[self.places[name].key, offset]
                target = Box(common.offset_in(wanted), common.extent)
                source = Box(common.offset_in(part), common.extent)
                out[target.slices()] = read_part(self.folder, file, where, source)
        return out.reshape(box.extent)

    @cached_property
    def _locations(self) -> dict[tuple[str, Shape], tuple[str, Location]]:
        """Where each part of each weight is: key and offset -> file, and place in it."""
        from rpg_megatron.checkpoints.plain_loading import locate_parts

        keys = {place.key for place in self.places.values()}
        parts = [p for p in self._index.pieces if p.name in keys and p.offset is not None]
        shapes = {(key, offset): shape for key in keys for offset, shape in self._index.tensors[key].chunks}
        found = {}
        for part, where in zip(parts, locate_parts(self.folder, parts), strict=True):
            assert part.offset is not None
            if where.shape != shapes[part.name, part.offset]:
                raise UserError(
                    f"{self.folder}: a part of {part.name} has the shape {list(where.shape)}; copy the "
                    "checkpoint again"
                )
            found[part.name, part.offset] = part.file, where
        return found

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[str, Piece]]]:
        """Hugging Face name -> the parameters that hold the tensor, and where."""
        found: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name in self.parameters:
            for piece in self.mapping.pieces(name, tensor=1, tensor_rank=0, vocab_multiple=1):
                found[piece.hf_name].append((name, piece))
        return {name: found[name] for name in self.mapping.hf_tensors()}
