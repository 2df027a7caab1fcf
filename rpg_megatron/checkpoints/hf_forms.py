"""The forms in which files have a decoder's tensors, which differ from those of a mapping.

Files of vision models may have older names. Files of mixtures may have all experts of a layer in two tensors,
``experts.gate_up_proj`` [experts, 2 x columns, hidden] and ``experts.down_proj`` [experts, hidden, columns],
as Qwen3.5 is released; a mapping has three matrices for each expert, as engines read them. Weights may be in
FP8, with scales beside them, and are read as bfloat16.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.fp8_files import BLOCK
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS

PACKED = "mlp.experts.gate_up_proj"
"""How a name of packed experts ends."""
_FP8, _SCALE = "F8_E4M3", "_scale_inv"
"""Dtype in a header of weights in FP8; how the name of their scales ends."""
_OLD_NAMES = {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."}
"""How the names of a decoder in a vision model begin in older files -> in transformers' models."""
_ALL_EXPERTS = re.compile(r"(.*\bmlp\.experts)\.(gate_up|down)_proj")
_EXPERT = re.compile(r"(.*\bmlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


@dataclass(frozen=True)
class FileTensor:
    """A tensor as files have it."""

    shape: tuple[int, ...]
    parts: dict[str, tuple[int, ...]]
    """Name in the mapping -> the index at which that tensor begins; empty if it is the whole one."""


@dataclass(frozen=True)
class Form:
    """How files have a decoder's tensors."""

    old_names: bool = False
    packed: bool = False
    """Whether the experts of a layer are in two tensors."""

    def tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, FileTensor]:
        """The tensors of the files, by name. shapes: those of a mapping."""
        out: dict[str, FileTensor] = {}
        for name, shape in shapes.items():
            if not self.packed or not (expert := _EXPERT.fullmatch(name)):
                file_name = _old_name(name) if self.old_names else name
                out[file_name] = FileTensor(shape, {name: ()})
                continue
            rows, columns = shape
            both = expert[3] != "down"
            file_name = f"{expert[1]}.{'gate_up' if both else 'down'}_proj"
            parts = out[file_name].parts if file_name in out else {}
            parts[name] = int(expert[2]), rows * (expert[3] == "up"), 0
            out[file_name] = FileTensor((len(parts) // (1 + both), rows * (1 + both), columns), parts)
        return out


def form_of(names: Iterable[str], untrained: tuple[str, ...]) -> Form:
    """The form of a checkpoint's files. names: of their tensors. untrained: how those of others begin."""
    names = list(names)
    old = ("language_model.", "vision_tower.", "multi_modal_projector.")
    packed = any(n.endswith(PACKED) and not n.startswith(untrained) for n in names)
    return Form(any(n.startswith(old) for n in names), packed)


def join_scales(stored: Mapping[str, StoredTensor]) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors of files, those in FP8 as BF16 with their scales; and scales that are missing or wrong.

    The scale of a tensor X is ``X_scale_inv``, with one number for each block of X's last two dimensions.
    """
    fp8 = {name + _SCALE: t.shape for name, t in stored.items() if t.dtype == _FP8}
    wrong = []
    for name in fp8 | {name: () for name in stored if name.endswith(_SCALE) and name not in fp8}:
        shape, scale = fp8.get(name, ()), stored.get(name)
        blocks = (*shape[:-2], *(-(-size // BLOCK) for size in shape[-2:]))
        if scale is None or len(shape) < 2 or scale.shape != blocks or scale.dtype not in SAFETENSORS:
            found = f"{list(scale.shape)} {scale.dtype}" if scale else "missing"
            wanted = f"not {list(blocks)} F32" if len(shape) > 1 else "of a vector"
            other = stored.get(name.removesuffix(_SCALE))
            kind = f"a tensor in {other.dtype}" if other else "no tensor"
            wrong.append(f"{name} is {found}, {wanted}" if name in fp8 else f"{name} is of {kind}")
    joined = {
        name: replace(t, dtype="BF16", scale=stored.get(name + _SCALE)) if t.dtype == _FP8 else t
        for name, t in stored.items()
        if name not in fp8
    }
    return joined, wrong


def decoder_tensors(
    stored: Mapping[str, StoredTensor], most: int = 2**16
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Tensors of files by their names in mappings; and those that are there twice, as the files name them.

    most: packed experts of a layer in the result; there may be any number in a file's header.
    """
    out: dict[str, StoredTensor] = {}
    twice: list[str] = []
    for name, tensor in stored.items():
        start = next((old for old in _OLD_NAMES if name.startswith(old)), "")
        name = _OLD_NAMES.get(start, "") + name.removeprefix(start)
        for part, value in _experts(name, tensor, most) or [(name, tensor)]:
            twice += [f"{tensor.name} ({part})"] * (part in out)
            out[part] = value
    return out, twice


def _experts(name: str, tensor: StoredTensor, most: int) -> list[tuple[str, StoredTensor]]:
    """The matrices of packed experts, of ``most`` at most; empty for another tensor."""
    match = _ALL_EXPERTS.fullmatch(name)
    if match is None or len(tensor.shape) != 3:
        return []
    count, rows, columns = tensor.shape
    kinds = ["down"] if match[2] == "down" else ["gate", "up"]
    if rows % len(kinds):
        return []
    rows, size = rows // len(kinds), ITEM_BYTES.get(SAFETENSORS.get(tensor.dtype, ""), 1)
    out = []
    for place, (expert, kind) in enumerate((e, k) for e in range(min(count, most)) for k in kinds):
        part = replace(
            tensor,
            shape=(rows, columns),
            begin=tensor.begin + place * math.prod((rows, columns)) * size,
            start=(expert, rows * (kind == "up"), 0),
        )
        out.append((f"{match[1]}.{expert}.{kind}_proj.weight", part))
    return out


def _old_name(name: str) -> str:
    old, new = next(((old, new) for old, new in _OLD_NAMES.items() if name.startswith(new)), ("", ""))
    return old + name.removeprefix(new)
