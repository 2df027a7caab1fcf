"""Names of element types: torch's ("bfloat16") and those in safetensors headers ("BF16").

Imports torch only when a ``torch.dtype`` is needed, so that ``plan`` and ``doctor`` start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4}
"""Bytes of one element."""

WEIGHT_DTYPES = ("float32", "bfloat16", "float16")
"""Dtypes that weights may be stored in; checkpoints in others are quantised."""

SAFETENSORS = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Names of ``WEIGHT_DTYPES`` in a safetensors header."""


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name, such as torch.bfloat16 of "bfloat16". Raises ValueError for an unknown name."""
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch")
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as "bfloat16" of torch.bfloat16."""
    return str(dtype).removeprefix("torch.")
