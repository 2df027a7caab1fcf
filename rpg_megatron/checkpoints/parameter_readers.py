"""Reads the parameters of a whole model one by one, so that there need not be memory for all of them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

import torch

from rpg_megatron.checkpoints.hf_files import list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.hf_forms import decoder_tensors
from rpg_megatron.checkpoints.hf_import import load_hf_weights, read_whole
from rpg_megatron.checkpoints.megatron_tensors import MegatronTensors, open_tensors, whole_parameters
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.models.boxes import Box
from rpg_megatron.models.lora import peft_name, weight_name
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import ONE_RANK

Reader = Callable[[str], torch.Tensor]
"""Megatron's name -> the parameter, as one rank with the whole model has it."""


def parameter_reader(model: Path, mapping: ModelMapping, dtype: torch.dtype) -> Reader:
    """Reader of a model's folder, of either format. Raises UserError.

    dtype: of all parameters but those that are always float32.
    """

    def dtype_of(name: str) -> torch.dtype:
        kept = any(piece.hf_name in mapping.float32 for piece in mapping.pieces(name, ONE_RANK))
        return torch.float32 if kept else dtype

    if (megatron := open_tensors(model)) is not None:
        return lambda name: megatron.parameter(name).to(dtype_of(name))
    stored, shapes = verify_hf_checkpoint(model, mapping), whole_parameters(mapping)

    def read(name: str) -> torch.Tensor:
        parameter = torch.empty(shapes[name], dtype=dtype_of(name))
        load_hf_weights(model, [(name, parameter)], mapping, ONE_RANK, stored=stored)
        return parameter

    return read


def merged_reader(model: Path, layout: ModelMapping, adapters: MegatronTensors, lora: LoraSettings) -> Reader:
    """Reader of a model's folder with adapters added. The sums are float32: the caller rounds them once."""
    s, sizes = layout.shape, adapters.mapping.hf_tensors()
    places = [(s, n, t) for n in range(s.num_layers) for t in lora.names_in(s)]
    adapted = {weight_name(*place): [peft_name(*place, x) for x in "AB"] for place in places}
    base = parameter_reader(model, layout, torch.float32)

    @torch.no_grad()
    def read(name: str) -> torch.Tensor:
        weight = base(name)
        for piece in layout.pieces(name, ONE_RANK):
            if piece.hf_name in adapted:
                a, b = (adapters.read(x, Box.whole(sizes[x])).float() for x in adapted[piece.hf_name])
                rows = slice(piece.hf.start[0], piece.hf.end[0])
                weight[piece.local.slices()].addmm_(b[rows], a, alpha=lora.scale)
        return weight

    return read


Weights = Callable[[str], torch.Tensor]
"""HF name -> the full tensor, in the checkpoint's dtype."""


def stored_weights(folder: Path) -> Weights:
    """Reads tensors of a checkpoint, Hugging Face's or Megatron's, by their names in mappings; KeyError for
    unknown names.
    """
    (stored, _), megatron = decoder_tensors(list_checkpoint(folder)), open_tensors(folder)

    @lru_cache(maxsize=32)
    def read(name: str) -> torch.Tensor:
        if megatron is not None:
            return megatron.read(name, Box.whole(stored[name].shape))
        return read_whole(stored[name])

    return read
