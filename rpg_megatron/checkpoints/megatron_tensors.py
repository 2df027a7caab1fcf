"""The weights of a Megatron checkpoint (torch_dist), as one rank with the whole model has them.

A checkpoint holds full tensors, in any number of parts, whatever layout has written it. So a box of a
Hugging Face tensor is one box or several in it, which each rank reads for itself, without Megatron.
Needs torch only to read weights.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rpg_megatron.checkpoints.index import INDEX, read_index
from rpg_megatron.checkpoints.megatron_folder import check_tensors, find_short_files, weights_of
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.model_config import read_model_shape
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.boxes import Box, MappingError, Piece, check_cover
from rpg_megatron.models.layer import FUSED
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ONE_RANK, Shape
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import SAFETENSORS, WEIGHT_DTYPES, torch_dtype

if TYPE_CHECKING:
    import torch

    from rpg_megatron.checkpoints.foreign_reader import Location

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")
_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight", "output_layer.lora.lm_head.B")
"""Parameters with a row for each token, which layouts pad differently."""


class Place(NamedTuple):
    """Where a parameter of the whole model is stored."""

    key: str
    at: Shape = ()
    """Index in each dimension that the stored tensor has in front: of layers, of experts."""
    sizes: Shape = ()
    """The size of each of these dimensions."""

    def box(self, own: Box) -> Box:
        """A box of the parameter, in the stored tensor."""
        return Box((*self.at, *own.start), (*(1 for _ in self.at), *own.extent))


def find_places(name: str, model: ModelShape) -> list[Place]:
    """Where Megatron may store a parameter, named as in ``ModelMapping``; first where we do.

    Norms are part of the layer behind them or not; each layer has its own key, or all layers one.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return [Place(name)]
    layer, rest = int(match[1]), match[2]
    at: Shape = ()
    sizes: Shape = ()
    if model.experts is not None and (expert := _EXPERT.fullmatch(rest)):
        rest, at, sizes = f"mlp.experts.experts.{expert[2]}", (int(expert[1]),), (model.experts.count,)
    kinds = {"linear_qkv": not model.is_linear(layer) and not model.latent, "in_proj": model.is_linear(layer)}
    # Norms of query heads have the local name of a latent's.
    kinds |= dict.fromkeys(("linear_q_up_proj", "linear_kv_up_proj"), model.latent is not None)
    others = tuple(f".{kind}.layer_norm_weight" for kind, own in kinds.items() if not own)
    names = [n for n, norm in FUSED.items() if norm == rest and not n.endswith(others)] + [rest]
    places = [Place(f"decoder.layers.{layer}.{each}", at, sizes) for each in names]
    at, sizes = (layer, *at), (model.num_layers, *sizes)
    return [*places, *(Place(f"decoder.layers.{each}", at, sizes) for each in names)]


def whole_parameters(mapping: ModelMapping) -> dict[str, Shape]:
    """Name in Megatron's checkpoints -> shape of all parameters, on one rank with the whole model."""
    names = mapping.stage_params(ONE_RANK, layers=range(mapping.shape.num_layers), first=True, last=True)
    parts = [part for name in names for part in mapping.stored_parts(name)]
    return {part: mapping.local_shape(part, ONE_RANK) for part in parts}


def open_tensors(model: Path) -> MegatronTensors | None:
    """The weights of a model's folder if it is the ``hf`` of a Megatron checkpoint. Raises UserError."""
    folder = weights_of(model)
    return None if folder is None else MegatronTensors(folder, mapping_for(read_model_shape(model)))


class MegatronTensors:
    """The weights of a checkpoint in ``folder``, which has Megatron's ``metadata.json``."""

    def __init__(self, folder: Path, mapping: ModelMapping) -> None:
        """Raises UserError if the tensors are not those of the mapping, or if files are too short."""
        self.folder, self.mapping = folder, mapping
        self._index, self._shapes = read_index(folder), whole_parameters(mapping)
        self._places, expected = {}, {}
        for name, shape in self._shapes.items():
            places = find_places(name, mapping.shape)
            self._places[name] = p = next((p for p in places if p.key in self._index.tensors), places[0])
            expected[p.key] = (*p.sizes, *shape), name in _VOCABULARY
        check_tensors(folder, self._index.weights, expected, mapping.shape.vocab_size)
        if short := find_short_files(folder, self._index):
            raise UserError(f"{folder}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(short))
        self._pieces: dict[str, list[tuple[str, Piece]]] = defaultdict(list)
        for name in self._shapes:
            for piece in mapping.pieces(name, ONE_RANK):
                self._pieces[piece.hf_name].append((name, piece))

    @property
    def dtype(self) -> str:
        """The dtype of all weights but those that are always float32.

        Raises UserError if there are several, or if it is not one of weights.
        """
        kept = {name for hf_name in self.mapping.float32 for name, _ in self._pieces[hf_name]}
        dtypes = sorted({self._dtype(name) for name in self._shapes if name not in kept})
        if len(dtypes) > 1 or dtypes[0] not in WEIGHT_DTYPES:
            known = ", ".join(WEIGHT_DTYPES)
            raise UserError(f"{self.folder}: weights are {', '.join(dtypes)}; save them with one of {known}")
        return dtypes[0]

    def stored(self) -> dict[str, StoredTensor]:
        """The tensors by Hugging Face's names, as ``hf_files.list_checkpoint`` lists those of files."""
        headers, file = {name: header for header, name in SAFETENSORS.items()}, self.folder / INDEX
        dtypes = {name: self._dtype(self._pieces[name][0][0]) for name in self.mapping.hf_tensors()}
        shapes = self.mapping.hf_tensors()
        return {n: StoredTensor(file, headers.get(t, t), shapes[n], 0) for n, t in dtypes.items()}

    def parameter(self, name: str) -> torch.Tensor:
        """A whole parameter, in the checkpoint's dtype."""
        return self._read(name, Box.whole(self._shapes[name]))

    def read(self, hf_name: str, box: Box) -> torch.Tensor:
        """A box of a Hugging Face tensor, in the checkpoint's dtype."""
        import torch

        pieces = self._pieces[hf_name]
        out = torch.empty(box.extent, dtype=torch_dtype(self._dtype(pieces[0][0])))
        for name, piece in pieces:
            if (part := piece.cut(box)) is not None:
                out[Box(part.hf.offset_in(box), part.hf.extent).slices()] = self._read(name, part.local)
        return out

    def _dtype(self, name: str) -> str:
        return self._index.tensors[self._places[name].key].dtype

    def _read(self, name: str, box: Box) -> torch.Tensor:
        """A box of a parameter."""
        import torch

        from rpg_megatron.checkpoints.plain_loading import read_part

        place = self._places[name]
        wanted = place.box(box)
        out = torch.empty(wanted.extent, dtype=torch_dtype(self._dtype(name)))
        for part, file, where in self._parts[place.key]:
            if (common := part.intersect(wanted)) is not None:
                target = Box(common.offset_in(wanted), common.extent)
                source = Box(common.offset_in(part), common.extent)
                out[target.slices()] = read_part(self.folder / file, where, source)
        return out.reshape(box.extent)

    @cached_property
    def _parts(self) -> dict[str, list[tuple[Box, str, Location]]]:
        """The parts of each stored tensor: its box, its file, and its place there."""
        from rpg_megatron.checkpoints.plain_loading import locate_parts

        found = defaultdict(list)
        pieces = [p for p in self._index.pieces if p.offset is not None and p.name in self._index.tensors]
        for piece, where in zip(pieces, locate_parts(self.folder, pieces), strict=True):
            box = Box(piece.offset or (), where.shape)
            found[piece.name].append((box, piece.file, where))
        try:
            for place in self._places.values():
                shape = self._index.tensors[place.key].shape
                check_cover(place.key, shape, [box for box, *_ in found[place.key]])
        except MappingError as e:
            raise UserError(f"{self.folder}: {e}; copy the checkpoint again") from None
        return found
