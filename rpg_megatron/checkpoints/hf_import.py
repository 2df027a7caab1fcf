"""Import from Hugging Face: loads a checkpoint into a rank's Megatron parameters, reading only its slices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rpg_megatron.checkpoints.hf_files import verify_hf_checkpoint
from rpg_megatron.checkpoints.megatron_tensors import open_tensors
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError
from rpg_megatron.models.boxes import Box, MappingError, Piece, check_cover
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS


@torch.no_grad()
def load_hf_weights(
    model_dir: Path,
    params: Iterable[tuple[str, torch.Tensor]],
    mapping: ModelMapping,
    at: RankCoordinates,
    *,
    stored: Mapping[str, StoredTensor] | None = None,
) -> int:
    """Fill parameters in place from a checkpoint of either format; returns the bytes read from its files.

    model_dir: of Hugging Face's format, or ``hf`` of a Megatron checkpoint.

    params: (name, tensor) as from ``Policy.named_parameters()``, on any device, with any floating-point
    dtype; values are cast. at: the rank that has them. stored: the files' tensors, if they have been
    verified.
    Vocabulary padding rows become zero. Not collective. Extra memory is one slice at a time.
    Raises UserError if the checkpoint does not match the model (see ``verify_hf_checkpoint``) or cannot be
    read, MappingError if a parameter's name is unknown or its shape is wrong.
    """
    megatron = open_tensors(model_dir)
    if stored is None:
        stored = verify_hf_checkpoint(model_dir, mapping) if megatron is None else megatron.stored()
    bytes_read = 0
    for name, param in params:
        # Files are memory-mapped, and pages count as this process's memory until the file is closed, so files
        # are reopened for each parameter. Reading some columns touches the pages of the whole tensor.
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            expected = mapping.local_shape(name, at)
            if tuple(param.shape) != expected:
                raise MappingError(
                    f"tensor rank {at.tensor_rank}: {name} has shape {tuple(param.shape)}, expected "
                    f"{expected} by the checkpoint's config.json; build the model from that file"
                )
            pieces = mapping.pieces(name, at)
            if sum(p.local.numel for p in pieces) == param.numel():
                check_cover(name, expected, [p.local for p in pieces])
            else:
                param.zero_()  # vocabulary padding: rows that no slice fills
            for piece in pieces:
                if piece.hf_name not in stored:
                    raise MappingError(
                        f"{name} maps to {piece.hf_name}, which the model does not have; "
                        "are the layers numbered through the whole model?"
                    )
                in_file = stored[piece.hf_name]
                if megatron is not None:
                    values = megatron.read(piece.hf_name, piece.hf)
                else:
                    if in_file.file not in handles:
                        handles[in_file.file] = stack.enter_context(_open(in_file.file))
                    values = _read(handles[in_file.file], piece, in_file)
                param[piece.local.slices()].copy_(values)
                bytes_read += piece.hf.numel * ITEM_BYTES[SAFETENSORS[in_file.dtype]]
    return bytes_read


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """A tensor of a file, in the file's dtype. Raises UserError."""
    whole = Box.whole(stored.shape)
    with _open(stored.file) as handle:
        return _read(handle, Piece(stored.name, whole, whole), stored)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: cannot be opened ({e}); copy the file again") from None


def _read(handle: Any, piece: Piece, in_file: StoredTensor) -> torch.Tensor:
    """One slice of an HF tensor, in the file's dtype."""
    try:
        values: torch.Tensor = handle.get_slice(in_file.name)[piece.hf.slices(in_file.start)]
    except (SafetensorError, OSError) as e:
        raise UserError(f"{in_file.file}: {in_file.name} cannot be read ({e}); copy the file again") from None
    return values
