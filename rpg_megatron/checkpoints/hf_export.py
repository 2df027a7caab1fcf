"""Export to Hugging Face: writes Megatron parameters as a sharded safetensors checkpoint.

No rank holds the full model. Consecutive HF tensors form files of bounded size. File s is assembled by rank s
modulo the world size from slices that their owners send, one tensor at a time, so a rank needs extra memory
for one file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file

from rpg_megatron.checkpoints.hf_files import (
    CONFIG,
    INDEX,
    SINGLE,
    UNTRAINED,
    find_form,
    list_untrained,
    open_copied,
    stored_bytes,
)
from rpg_megatron.checkpoints.hf_forms import PACKED, FileTensor, Form
from rpg_megatron.checkpoints.hf_import import read_whole
from rpg_megatron.checkpoints.peft import ADAPTER_CONFIG, ADAPTER_WEIGHTS, peft_config
from rpg_megatron.checkpoints.stored_tensor import StoredTensor
from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import copy_file, open_own, parse_json, remove, rename
from rpg_megatron.config.model_shape import ModelShape
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.partition import RankCoordinates
from rpg_megatron.models.placement import RankShards, SliceOwner, assign_owners
from rpg_megatron.system.collectives import control_group, gather_objects, run_together
from rpg_megatron.system.dtypes import WEIGHT_DTYPES, dtype_name

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class _Plan:
    """Files and, for each tensor, which rank sends which slice; the same on every rank."""

    shards: list[list[str]]
    owners: dict[str, list[SliceOwner]]
    """By name in the mapping."""
    tensors: dict[str, FileTensor]
    untrained: dict[str, StoredTensor] = field(default_factory=dict)
    """Tensors that are copied from the model's own files, as they are."""

    def slices(self, name: str) -> list[tuple[tuple[int, ...], SliceOwner]]:
        """The slices of a file's tensor, each with the index at which its part of the tensor begins."""
        parts = self.tensors[name].parts.items()
        return [(begin, owner) for part, begin in parts for owner in self.owners[part]]


@torch.no_grad()
def export_hf(
    out_dir: Path,
    source_dir: Path,
    params: Mapping[str, torch.Tensor],
    mapping: ModelMapping,
    coordinates: RankCoordinates,
    *,
    dtype: torch.dtype,
    max_shard_bytes: int = 5 * 1024**3,
    replace: bool = False,
    root: Path | None = None,
    ends: Callable[[], Sequence[int]] = tuple,
) -> None:
    """Write the model as a Hugging Face checkpoint in ``out_dir``. Collective over the default process group.

    params: this rank's parameters by Megatron name, any floating-point dtype; values are cast to ``dtype``
    (float32, bfloat16 or float16), but for tensors that are always float32. Configuration, tokenizer and
    tensors that are not trained are copied from ``source_dir``. Without an initialised process group, the
    caller must hold the whole model. The folder gets its final name when it is complete; a killed export
    leaves ``.NAME.incomplete``, which the next export removes. ``replace``: replace an existing ``out_dir``.
    ``root``: see ``open_copied``. ``ends``: called on rank 0; tokens that generation_config.json is to name
    as ends of a response, besides its own.
    Raises UserError or OSError on every rank if ``out_dir`` exists or cannot be written, MappingError if
    tensors are incomplete.
    """
    if dtype_name(dtype) not in WEIGHT_DTYPES:
        raise UserError(f"export dtype {dtype_name(dtype)} is not supported; use {', '.join(WEIGHT_DTYPES)}")
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    part = out_dir.parent / f".{os.path.basename(out_dir)}.incomplete"
    shards = RankShards(coordinates, tuple((n, tuple(p.shape)) for n, p in params.items()))
    gathered = gather_objects(shards, RankShards)
    shapes = mapping.hf_tensors()
    tensors = find_form(source_dir, mapping.shape).tensors(shapes)
    dtypes = {n: torch.float32 if {*t.parts} & mapping.float32 else dtype for n, t in tensors.items()}
    sizes = {n: math.prod(t.shape) * dtypes[n].itemsize for n, t in tensors.items()}
    untrained = list_untrained(source_dir, mapping.shape)
    sizes |= {n: stored_bytes(t) for n, t in untrained.items()}
    owners, shards_of_files = assign_owners(mapping, gathered), group_shards(sizes, max_shard_bytes)
    plan = _Plan(shards_of_files, owners, tensors, untrained)
    names = _file_names(len(plan.shards))

    run_together(lambda: _prepare(out_dir, part, replace) if rank == 0 else None)
    try:
        for first in range(0, len(plan.shards), world):
            shard = first + rank
            file = _assemble_round(plan, first, world, rank, params, dtypes)

            def write(shard: int = shard, file: dict[str, torch.Tensor] = file) -> None:
                if shard < len(plan.shards):
                    _save(file, part / names[shard])

            run_together(write)
            del file, write  # free this round's file before the next one is assembled

        def finish() -> None:
            if rank == 0:
                _finish(part, source_dir, root, plan, sizes, dtype, ends())
                _publish(part, out_dir, names)

        run_together(finish)
    except (UserError, OSError):
        if rank == 0:  # the disk may be full
            remove(part, ignore_errors=True)
        raise


def copy_untrained(source_dir: Path, folder: Path, shape: ModelShape) -> None:
    """Write a file of what Megatron's format has no place for, if there is any: tensors that are not trained,
    and, as an empty tensor, that experts are packed.
    """
    tensors = {name: read_whole(t) for name, t in list_untrained(source_dir, shape).items()}
    tensors |= {PACKED: torch.empty(0)} if find_form(source_dir, shape).packed else {}
    if tensors or shape.untrained:
        _save(tensors, folder / UNTRAINED)


@torch.no_grad()
def export_adapter(
    out_dir: Path,
    params: Mapping[str, torch.Tensor],
    mapping: AdapterMapping,
    coordinates: RankCoordinates,
    base: Path,
    *,
    dtype: torch.dtype,
) -> None:
    """Write the adapters in PEFT's format, in place of an ``out_dir`` that exists. Collective.

    params: this rank's adapters by Megatron name. base: folder of the model. Raises as ``export_hf``.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    part = out_dir.parent / f".{os.path.basename(out_dir)}.incomplete"
    shards = RankShards(coordinates, tuple((n, tuple(p.shape)) for n, p in params.items()))
    shapes = mapping.hf_tensors()
    owners = assign_owners(mapping, gather_objects(shards, RankShards))
    plan = _Plan([list(shapes)], owners, Form().tensors(shapes))
    tensors = _assemble_round(plan, 0, world, rank, params, dict.fromkeys(shapes, dtype))

    def write() -> None:
        if rank != 0:
            return
        out_dir.parent.mkdir(exist_ok=True)
        _prepare(out_dir, part, replace=True)
        _save(tensors, part / ADAPTER_WEIGHTS)
        with open_own(part / ADAPTER_CONFIG, "x", encoding="utf-8") as f:
            f.write(json.dumps(peft_config(mapping, base), indent=2) + "\n")
        _publish(part, out_dir, [ADAPTER_WEIGHTS])

    try:
        run_together(write)
    except (UserError, OSError):
        if rank == 0:
            remove(part, ignore_errors=True)
        raise


def _save(tensors: dict[str, torch.Tensor], file: Path) -> None:
    """Write a safetensors file. Raises OSError instead of the library's own error."""
    try:
        save_file(tensors, file, metadata={"format": "pt"})
    except SafetensorError as e:
        code = re.search(r"\(os error (\d+)\)", str(e))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(file)) from None


def _assemble_round(
    plan: _Plan,
    first: int,
    world: int,
    rank: int,
    params: Mapping[str, torch.Tensor],
    dtypes: Mapping[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    """Exchange the slices of the next ``world`` files; returns this rank's file as CPU tensors.

    Slices are sent through host memory: NCCL would keep buffers for each pair of ranks, gigabytes on a GPU.
    """
    group = control_group() if world > 1 else None
    shards = plan.shards[first : first + world]
    out: dict[str, torch.Tensor] = {}
    # In lock step, one tensor per file: a rank has the slices of one tensor in flight at most.
    for i in range(max(len(s) for s in shards)):
        ops: list[Any] = []
        landing: list[tuple[torch.Tensor, torch.Tensor]] = []
        for assembler, shard in enumerate(shards):
            if i >= len(shard):
                continue
            name = shard[i]
            if name in plan.untrained:
                if assembler == rank:
                    out[name] = read_whole(plan.untrained[name])
                continue
            dtype = dtypes[name]
            if assembler == rank:
                out[name] = torch.empty(plan.tensors[name].shape, dtype=dtype)
            for tag, (begin, owner) in enumerate(plan.slices(name)):
                if rank not in (assembler, owner.rank):
                    continue
                piece = owner.piece
                place = piece.hf.slices(begin)
                if owner.rank == rank:
                    values = params[owner.param].detach()[piece.local.slices()].to(dtype)
                    if assembler == rank:
                        out[name][place].copy_(values)
                    else:
                        ops.append(dist.P2POp(dist.isend, values.contiguous().cpu(), assembler, group, tag))
                else:
                    buffer = torch.empty(piece.hf.extent, dtype=dtype)
                    ops.append(dist.P2POp(dist.irecv, buffer, owner.rank, group, tag))
                    landing.append((out[name][place], buffer))
        if ops:
            for work in dist.batch_isend_irecv(ops):
                work.wait()
        for target, buffer in landing:
            target.copy_(buffer)
    return out


def _file_names(count: int) -> list[str]:
    if count == 1:
        return [SINGLE]
    return [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def _prepare(out_dir: Path, part: Path, replace: bool) -> None:
    if out_dir.exists() and not replace:
        raise UserError(f"{out_dir}: already exists; choose another folder or remove it")
    remove(part)  # left by an export that was killed
    part.mkdir(parents=True)


def _finish(
    part: Path,
    source_dir: Path,
    root: Path | None,
    plan: _Plan,
    sizes: Mapping[str, int],
    dtype: torch.dtype,
    ends: Sequence[int],
) -> None:
    """Write index, configuration and tokenizer."""
    names = _file_names(len(plan.shards))
    if len(names) > 1:
        index = {
            "metadata": {"total_size": sum(sizes.values())},
            "weight_map": {n: names[s] for s, shard in enumerate(plan.shards) for n in shard},
        }
        with open_own(part / INDEX, "x", encoding="utf-8") as f:
            f.write(json.dumps(index, indent=2) + "\n")
    for name, file in open_copied(source_dir, root):
        content = changed_config(name, file, dtype_name(dtype))
        if name == GENERATION and ends:
            content = _with_ends(file.read(), ends)
        copy_file(file, part, name, content)
    if ends and not (part / GENERATION).exists():
        with open_own(part / GENERATION, "xb") as f:
            f.write(_with_ends(b"{}", ends))


def _publish(part: Path, out_dir: Path, names: Sequence[str]) -> None:
    """Make the files durable and readable, and rename the folder. names: the files of weights."""
    mode = part.stat().st_mode & 0o666  # by the user's umask; safetensors writes 0600
    for name in os.listdir(part):
        with open_own(part / name) as f:
            if name in names:
                os.fchmod(f.fileno(), mode)
            os.fsync(f.fileno())
    if out_dir.exists():
        old = out_dir.parent / f".{os.path.basename(out_dir)}.replaced"
        remove(old, ignore_errors=True)
        rename(out_dir, old)
        rename(part, out_dir)
        remove(old, ignore_errors=True)
    else:
        rename(part, out_dir)


def changed_config(name: str, file: BinaryIO, dtype: str) -> bytes | None:
    """config.json for weights of a dtype, which are not quantised; None for files of other names."""
    if name != CONFIG:
        return None
    config = parse_json(file.read())
    config.pop("quantization_config", None)
    decoder = config.get("text_config")
    for part in (config, decoder if isinstance(decoder, dict) else {}):
        # transformers renamed the key; set the one that exists.
        for key in [k for k in ("dtype", "torch_dtype") if k in part] or ["dtype"] * (part is config):
            part[key] = dtype
    return (json.dumps(config, indent=2) + "\n").encode()


def _with_ends(text: bytes, ends: Sequence[int]) -> bytes:
    """A generation_config.json that names these tokens as ends of a response, besides its own."""
    config = parse_json(text)
    own = config.get("eos_token_id")
    listed = own if isinstance(own, list) else [] if own is None else [own]
    config["eos_token_id"] = [*listed, *(token for token in ends if token not in listed)]
    return (json.dumps(config, indent=2) + "\n").encode()


def group_shards(sizes: Mapping[str, int], max_bytes: int) -> list[list[str]]:
    """Group tensors, in order, into files of at most ``max_bytes``; a larger tensor gets its own file."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups
