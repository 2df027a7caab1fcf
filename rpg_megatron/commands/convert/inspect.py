"""Lists the tensors of a Hugging Face or Megatron checkpoint, and checks that it is complete."""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints import megatron_folder as megatron_files
from rpg_megatron.checkpoints.checkpoint_path import find_model_files, kind_of, open_step
from rpg_megatron.checkpoints.hf_files import describe_stored, list_checkpoint, verify_hf_checkpoint
from rpg_megatron.checkpoints.index import read_index
from rpg_megatron.config import UserError, read_model_shape
from rpg_megatron.config.files import places_of, real_path
from rpg_megatron.models.lora import is_adapter
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.system.dtypes import ITEM_BYTES, SAFETENSORS
from rpg_megatron.system.terminal import one_line

_SHOWN = 40
"""Maximum number of problems in the table."""


@dataclass
class Inspection:
    """A checkpoint, read without its weights."""

    kind: str
    folder: str
    model: dict[str, Any] | None = None
    """Model sizes from config.json."""
    facts: dict[str, Any] = field(default_factory=dict)
    """From a Megatron checkpoint's manifest: version, dtype, layout that wrote it."""
    adapters: bool = False
    """Whether it is of a LoRA run: it then has no other weights."""
    checked: str = ""
    """Which checks were made."""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    """Of each tensor name, dtype, shape, and where it is: its file, or the number of stored parts."""
    problems: list[str] = field(default_factory=list)
    """Damage, one line each; empty for a complete checkpoint."""

    def totals(self) -> dict[str, int]:
        """Number of tensors, of their elements, vocabulary padding included, and of their bytes."""
        sizes = [(math.prod(t["shape"]), ITEM_BYTES.get(t["dtype"], 1)) for t in self.tensors]
        size = sum(n * item for n, item in sizes)
        return {"count": len(sizes), "parameters": sum(n for n, _ in sizes), "bytes": size}

    def json(self) -> str:
        """One JSON object with everything."""
        return json.dumps(asdict(self) | {"totals": self.totals(), "whole": not self.problems}, indent=2)

    def table(self) -> str:
        """The same as text: each tensor and problem in a line of its own, whatever is in its name."""
        rows = [[one_line(str(value)) for value in t.values()] for t in self.tensors]
        width, _, shapes, _ = (max(map(len, column)) for column in zip([""] * 4, *rows, strict=True))
        lines = [f"{n:{width}}  {dtype:8}  {shape:{shapes}}  {where}" for n, dtype, shape, where in rows]
        lines += ["", f"{self.folder}: {self.kind} checkpoint"]
        if self.model:
            lines.append(f"model: {_describe(self.model)}")
        if self.adapters:
            lines.append("LoRA: adapters of this model, without its weights")
        if self.facts:
            lines.append(one_line("written: " + ", ".join(f"{k}={v}" for k, v in self.facts.items())))
        count, parameters, size = self.totals().values()
        lines.append(f"tensors: {count}, {parameters:,} numbers, {size / 1e6:,.1f} MB")
        if self.problems:
            lines += ["DAMAGED:", *(textwrap.indent(p, "  ") for p in self.problems[:_SHOWN])]
            if (more := len(self.problems) - _SHOWN) > 0:
                lines.append(f"  and {more:,} more problems; --json lists them all")
        else:
            lines.append(f"whole: {self.checked}")
        return "\n".join(lines)

    def add(self, name: str, dtype: str, shape: Sequence[int], where: str) -> None:
        """Add a tensor."""
        self.tensors.append({"name": name, "dtype": dtype, "shape": list(shape), "where": where})

    def attempt[T](self, step: Callable[[], T]) -> T | None:
        """The step's result; a UserError is recorded as a problem, and the inspection continues."""
        try:
            return step()
        except UserError as e:
            self.problems.append(str(e))
            return None


def inspect_checkpoint(folder: Path) -> Inspection:
    """List a checkpoint and check its files: HF, Megatron, of a run, or a run's newest.

    Raises UserError if it is none of these, or not a complete checkpoint of a run.
    """
    kind, inspection = kind_of(folder, "DIR"), Inspection("Megatron-Core (torch_dist)", "")
    if kind == "hf":
        return _inspect_hf(folder)
    if kind == "megatron":
        whole = weights = megatron_files.find_checkpoint(folder)
        inside = places_of(whole)
        manifest = inspection.attempt(lambda: megatron_files.read_manifest(whole, *inside))
        if (whole / megatron_files.HF).is_dir():
            inspection.model = inspection.attempt(lambda: _read_model(whole / megatron_files.HF))
    else:
        step = open_step(folder, "DIR")
        whole, weights, inside = step.folder, step.weights, [real_path(step.root)]
        manifest = step.metadata, step.files
        with suppress(UserError):  # its model is not on this machine
            inspection.model = _read_model(find_model_files(step)[0])
    inspection.folder, inspection.checked = str(whole), "no manifest; files are long enough"
    if manifest:
        inspection.checked = "every file has the SHA-256 of the manifest"
        inspection.facts = asdict(manifest[0])
        inspection.problems += megatron_files.find_damage(whole, manifest[1], inside=inside)
    index = inspection.attempt(lambda: read_index(weights))
    if index is not None:
        inspection.adapters = any(map(is_adapter, index.weights))
        for name, t in index.tensors.items():
            inspection.add(name, t.dtype, t.shape, f"{len(t.chunks)} part{'s' * (len(t.chunks) > 1)}")
        # Of a step, the manifest names files with their folder.
        known = {name for p in inspection.problems for name in (p, p.partition("/")[2])}
        short = megatron_files.find_short_files(weights, index)
        inspection.problems += [problem for problem in short if problem not in known]
    return inspection


def _inspect_hf(folder: Path) -> Inspection:
    inspection = Inspection("Hugging Face", str(folder))
    try:
        inspection.model = _read_model(folder)
    except UserError as e:
        raise UserError(str(e).removeprefix("model.path: ")) from None
    stored = inspection.attempt(lambda: list_checkpoint(folder)) or {}
    for name, t in stored.items():
        inspection.add(name, SAFETENSORS.get(t.dtype, t.dtype), t.shape, t.file.name)
    if stored:
        inspection.attempt(lambda: verify_hf_checkpoint(folder, mapping_for(read_model_shape(folder))))
    inspection.checked = "files are as long as their headers say; tensors are those of config.json"
    if note := describe_stored(stored):
        inspection.checked += f"; {note}"
    return inspection


def _read_model(folder: Path) -> dict[str, Any]:
    """Sizes of a model. Raises UserError."""
    shape = read_model_shape(folder)
    return asdict(shape) | {"parameters": mapping_for(shape).parameters}


def _describe(model: dict[str, Any]) -> str:
    text = (
        "{family}, {parameters:,} parameters, {num_layers} layers, hidden {hidden_size}, "
        "{num_heads}/{num_kv_heads} heads of {head_dim}, feed-forward {ffn_hidden_size}"
    ).format(**model)
    if (e := model["experts"]) is not None:
        text += f", {e['count']} experts of {e['ffn_hidden_size']} in {len(e['layers'])} layers"
        text += f", {e['per_token']} per token"
    tied = ", tied embeddings" if model["tied_embeddings"] else ""
    return f"{text}, vocabulary {model['vocab_size']}{tied}"
