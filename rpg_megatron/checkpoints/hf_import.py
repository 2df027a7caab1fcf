"""Import from Hugging Face: loads a checkpoint into a rank's Megatron parameters, reading only its slices."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rpg_megatron.checkpoints.hf_files import list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.megatron_tensors import open_tensors
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.fp8_files import BLOCK
from rpg_megatron.models.boxes import Box, MappingError, check_cover
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
            handle = lru_cache(None)(lambda file, stack=stack: stack.enter_context(_open(file)))
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
                    values = _read(handle, piece.hf, in_file)
                param[piece.local.slices()].copy_(values)
                item = 1 if in_file.scale else ITEM_BYTES[SAFETENSORS[in_file.dtype]]
                bytes_read += piece.hf.numel * item
    return bytes_read


def read_whole(stored: StoredTensor) -> torch.Tensor:
    """A tensor of a file, in the file's dtype; bfloat16 for FP8. Raises UserError."""
    with ExitStack() as stack:
        return _read(lambda file: stack.enter_context(_open(file)), Box.whole(stored.shape), stored)


def read_all(model_dir: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by their names there, as ``read_whole``. Raises UserError."""
    return {name: read_whole(tensor) for name, tensor in list_checkpoint(model_dir).items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: cannot be opened ({e}); copy the file again") from None


def _read(handle: Callable[[Path], Any], box: Box, in_file: StoredTensor) -> torch.Tensor:
    """A box of an HF tensor, in the file's dtype; for FP8, values times scales in float32, as bfloat16."""
    index: Any = box.slices(in_file.start)
    values = _read_slice(handle, index, in_file)
    if in_file.scale is None:
        return values
    blocks = (slice(s.start // BLOCK, -(-s.stop // BLOCK)) for s in index[-2:])
    scale = _read_slice(handle, (*index[:-2], *blocks), in_file.scale).float()
    for dim in (-2, -1):
        scale = scale.repeat_interleave(BLOCK, dim)
        scale = scale.narrow(dim, index[dim].start % BLOCK, values.size(dim))
    return scale.mul_(values.float()).bfloat16()


def _read_slice(handle: Callable[[Path], Any], index: Any, in_file: StoredTensor) -> torch.Tensor:
    try:
        values: torch.Tensor = handle(in_file.file).get_slice(in_file.name)[index]
    except (SafetensorError, OSError) as e:
        raise UserError(f"{in_file.file}: {in_file.name} cannot be read ({e}); copy the file again") from None
    return values
