"""Lists the tensors of a Hugging Face or Megatron checkpoint, and checks that it is complete."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.checkpoint_path import Step, find_model_files, kind_of, open_step
from rpg_megatron.checkpoints.hf_files import describe_computed, list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.megatron_folder import (
    HF,
    find_checkpoint,
    find_damage,
    find_short_files,
    read_contents,
    read_manifest,
)
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import places_of, real_path
from rpg_megatron.config.model_shape import ModelShape, read_model_shape
from rpg_megatron.models.lora import is_adapter
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS
from rpg_megatron.system.terminal import one_line

_HASHED = "every file has the SHA-256 of the manifest"
_SHOWN = 40
"""Maximum number of problems in the table."""


@dataclass(frozen=True)
class Row:
    """One tensor."""

    name: str
    dtype: str
    shape: list[int]
    where: str
    """File, or the number of stored parts."""


@dataclass
class Inspection:
    """A checkpoint, read without its weights."""

    kind: str
    folder: str
    model: dict[str, Any] | None = None
    """Model sizes from config.json."""
    facts: dict[str, Any] = field(default_factory=dict)
    """From a Megatron checkpoint's manifest: version, dtype, layout."""
    adapters: bool = False
    """Whether it is of a LoRA run: it then has no other weights."""
    checked: str = ""
    """Which checks were made."""
    tensors: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Damage, one line each; empty for a complete checkpoint."""

    @property
    def parameters(self) -> int:
        """Number of elements of all tensors, including vocabulary padding."""
        return sum(math.prod(t.shape) for t in self.tensors)

    @property
    def size(self) -> int:
        """Their bytes."""
        return sum(ITEM_BYTES.get(t.dtype, 1) * math.prod(t.shape) for t in self.tensors)

    def json(self) -> str:
        """One JSON object with everything."""
        totals = {"count": len(self.tensors), "parameters": self.parameters, "bytes": self.size}
        return json.dumps(asdict(self) | {"totals": totals, "whole": not self.problems}, indent=2)

    def table(self) -> str:
        """The same as text: each tensor and problem in a line of its own, whatever is in its name."""
        rows = [(one_line(t.name), one_line(t.dtype), str(t.shape), one_line(t.where)) for t in self.tensors]
        width = max((len(name) for name, *_ in rows), default=0)
        shapes = max((len(shape) for _, _, shape, _ in rows), default=0)
        lines = [
            f"{name:{width}}  {dtype:8}  {shape:{shapes}}  {where}" for name, dtype, shape, where in rows
        ]
        lines += ["", f"{self.folder}: {self.kind} checkpoint"]
        if self.model:
            lines.append(f"model: {_describe(self.model)}")
        if self.adapters:
            lines.append("LoRA: adapters of this model, without its weights")
        if self.facts:
            lines.append(one_line("written: " + ", ".join(f"{k}={v}" for k, v in self.facts.items())))
        lines.append(f"tensors: {len(self.tensors)}, {self.parameters:,} numbers, {self.size / 1e6:,.1f} MB")
        if self.problems:
            lines += ["DAMAGED:", *(textwrap.indent(p, "  ") for p in self.problems[:_SHOWN])]
            if (more := len(self.problems) - _SHOWN) > 0:
                lines.append(f"  and {more:,} more problems; --json lists them all")
        else:
            lines.append(f"whole: {self.checked}")
        return "\n".join(lines)


def inspect_checkpoint(folder: Path) -> Inspection:
    """List a checkpoint and check its files: HF, Megatron, of a run, or a run's newest.

    Raises UserError if it is none of these, or not a complete checkpoint of a run.
    """
    match kind_of(folder, "DIR"):
        case "hf":
            return _inspect_hf(folder)
        case "megatron":
            return _inspect_megatron(find_checkpoint(folder))
        case _:
            return _inspect_step(open_step(folder, "DIR"))


def _inspect_hf(folder: Path) -> Inspection:
    inspection = Inspection("Hugging Face", str(folder))
    try:
        shape = read_model_shape(folder)
    except UserError as e:
        raise UserError(str(e).removeprefix("model.path: ")) from None
    inspection.model = _model(shape)
    stored = _attempt(inspection, lambda: list_checkpoint(folder)) or {}
    inspection.tensors = [
        Row(n, SAFETENSORS.get(t.dtype, t.dtype), list(t.shape), t.file.name) for n, t in stored.items()
    ]
    if stored:
        _attempt(inspection, lambda: verify_hf_checkpoint(folder, mapping_for(shape)))
    inspection.checked = "files are as long as their headers say; tensors are those of config.json"
    if note := describe_computed(stored):
        inspection.checked += f"; {note}"
    return inspection


def _inspect_megatron(folder: Path) -> Inspection:
    inspection = Inspection("Megatron-Core (torch_dist)", str(folder))
    manifest = _attempt(inspection, lambda: read_manifest(folder, *places_of(folder)))
    if manifest:
        inspection.facts = asdict(manifest[0])
        inspection.problems += find_damage(folder, manifest[1], inside=places_of(folder))
    if (folder / HF).is_dir():
        shape: ModelShape | None = _attempt(inspection, lambda: read_model_shape(folder / HF))
        inspection.model = _model(shape) if shape else None
    _add_contents(inspection, folder)
    inspection.checked = _HASHED if manifest else "no manifest; files are long enough"
    return inspection


def _inspect_step(step: Step) -> Inspection:
    inspection = Inspection("Megatron-Core (torch_dist)", str(step.folder), facts=asdict(step.metadata))
    inspection.problems += find_damage(step.folder, step.files, inside=(real_path(step.root),))
    with suppress(UserError):  # its model is not on this machine
        inspection.model = _model(read_model_shape(find_model_files(step)[0]))
    _add_contents(inspection, step.weights)
    inspection.checked = _HASHED
    return inspection


def _add_contents(inspection: Inspection, folder: Path) -> None:
    """List the tensors according to Megatron's index, and check that files are long enough for it."""
    contents = _attempt(inspection, lambda: read_contents(folder))
    if contents:
        inspection.adapters = any(map(is_adapter, contents.weights))
        inspection.tensors = [
            Row(n, t.dtype, list(t.shape), f"{t.parts} part{'s' if t.parts > 1 else ''}")
            for n, t in contents.tensors.items()
        ]
        known = {p.partition("/")[2] for p in inspection.problems}  # names in a step begin with model/
        inspection.problems += [
            p for p in find_short_files(folder, contents) if p not in {*inspection.problems, *known}
        ]


def _attempt[T](inspection: Inspection, step: Callable[[], T]) -> T | None:
    """The step's result; a UserError is recorded as a problem, and the inspection continues."""
    try:
        return step()
    except UserError as e:
        inspection.problems.append(str(e))
        return None


def _model(shape: ModelShape) -> dict[str, Any]:
    tensors = mapping_for(shape).hf_tensors().values()
    return asdict(shape) | {"parameters": sum(math.prod(t) for t in tensors)}


def _describe(model: dict[str, Any]) -> str:
    experts = ""
    if (e := model["experts"]) is not None:
        experts = (
            f", {e['count']} experts of {e['ffn_hidden_size']} in {len(e['layers'])} layers, "
            f"{e['per_token']} per token"
        )
    return (
        f"{model['family']}, {model['parameters']:,} parameters, {model['num_layers']} layers, "
        f"hidden {model['hidden_size']}, "
        f"{model['num_heads']}/{model['num_kv_heads']} heads of {model['head_dim']}, "
        f"feed-forward {model['ffn_hidden_size']}{experts}, vocabulary {model['vocab_size']}"
        f"{', tied embeddings' if model['tied_embeddings'] else ''}"
    )
