"""Hugging Face checkpoint -> this rank's Megatron parameters, reading no more than the rank's own slices."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rpg_megatron.checkpoints.hf_files import StoredTensor, verify_hf_checkpoint
from rpg_megatron.config.errors import UserError
from rpg_megatron.models.boxes import LayoutError, Piece, check_cover
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS

__all__ = ["load_hf_weights", "verify_hf_checkpoint"]


@torch.no_grad()
def load_hf_weights(
    model_dir: Path,
    params: Iterable[tuple[str, torch.Tensor]],
    layout: ModelMapping,
    *,
    tensor: int,
    tensor_rank: int,
    vocab_multiple: int,
) -> int:
    """Fill parameters in place from a checkpoint; returns the bytes read from its files.

    params: (name, tensor) as from ``Policy.named_parameters()``, any device and floating-point dtype;
    values are cast. Vocabulary padding rows become zero. Not a collective: every rank reads its slices by
    itself, and nobody holds more than one slice at a time next to its parameters.
    Raises UserError if the checkpoint does not fit the model (see ``verify_hf_checkpoint``) or cannot be
    read, LayoutError if a parameter has a name or shape that the layout does not expect.
    """
    stored = verify_hf_checkpoint(model_dir, layout)
    bytes_read = 0
    for name, param in params:
        # Files are mapped, and pages that were read count as this process's memory until they are closed: so
        # they are opened anew for each parameter. Columns alone touch the pages of all their tensor.
        with ExitStack() as stack:
            handles: dict[Path, Any] = {}
            expected = layout.local_shape(name, tensor=tensor, vocab_multiple=vocab_multiple)
            if tuple(param.shape) != expected:
                raise LayoutError(
                    f"tensor rank {tensor_rank}: {name} has shape {tuple(param.shape)}, the checkpoint's "
                    f"config.json makes it {expected}; the model was built with other sizes"
                )
            pieces = layout.pieces(
                name,
                tensor=tensor,
                tensor_rank=tensor_rank,
                vocab_multiple=vocab_multiple,
            )
            if sum(p.local.numel for p in pieces) == param.numel():
                check_cover(name, expected, [p.local for p in pieces])
            else:
                param.zero_()  # vocabulary padding: rows that no piece fills
            for piece in pieces:
                if piece.hf_name not in stored:
                    raise LayoutError(
                        f"{name} maps to {piece.hf_name}, which the model does not have; "
                        "are the layers numbered through the whole model?"
                    )
                source = stored[piece.hf_name]
                if source.file not in handles:
                    handles[source.file] = stack.enter_context(_open(source.file))
                param[piece.local.slices()].copy_(_read(handles[source.file], piece, source))
                bytes_read += piece.hf.numel * ITEM_BYTES[SAFETENSORS[source.dtype]]
    return bytes_read


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as e:
        raise UserError(f"{file}: cannot be opened ({e}); copy the file again") from None


def _read(handle: Any, piece: Piece, source: StoredTensor) -> torch.Tensor:
    """One box of an HF tensor, in the file's dtype."""
    try:
        values: torch.Tensor = handle.get_slice(piece.hf_name)[piece.hf.slices()]
    except (SafetensorError, OSError) as e:
        raise UserError(f"{source.file}: {piece.hf_name} cannot be read ({e}); copy the file again") from None
    return values
