"""Conversion of checkpoints between Hugging Face and Megatron: checks, the two directions, verification.

The result is written beside the target folder, and renamed when it is complete and, on request, verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints import hf_files
from rpg_megatron.checkpoints import megatron_folder as megatron_files
from rpg_megatron.checkpoints.checkpoint_path import (
    find_lora,
    find_model_files,
    find_settings,
    kind_of,
    open_step,
)
from rpg_megatron.checkpoints.megatron_folder import HF, CheckpointMetadata
from rpg_megatron.commands.convert.staging import Source, Staging
from rpg_megatron.config import ModelShape, UserError, read_model_shape
from rpg_megatron.config.files import atomic_write_text, copy_file, folder_size, places_of
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.data.tokenizer_file import refuse_remote_code
from rpg_megatron.launcher.stopping import StopSignals
from rpg_megatron.models.lora import AdapterMapping
from rpg_megatron.models.mapping import ModelMapping
from rpg_megatron.models.registry import mapping_for
from rpg_megatron.rollout.seeds import chat_ends
from rpg_megatron.system.dtypes import SAFETENSORS


def open_hf(hf: Path) -> Source:
    """Check an HF checkpoint.

    Raises one UserError that lists all tensors that are missing, unexpected, or of a wrong shape or dtype.
    """
    if kind_of(hf, "--hf") != "hf":
        raise UserError(
            f"--hf: {hf} is a Megatron checkpoint; convert it with megatron-to-hf --megatron {hf}"
        )
    shape = _read_shape(hf, hf)
    layout = mapping_for(shape)
    stored = hf_files.verify_hf_checkpoint(hf, layout, one_dtype=True)
    dtype = next(tensor.dtype for name, tensor in stored.items() if name not in layout.float32)
    note = hf_files.describe_stored(hf_files.list_checkpoint(hf))
    return Source(shape, layout, SAFETENSORS[dtype], hf, hf, hf, hf, {}, note=note)


def open_megatron(
    megatron: Path, config: Path | None = None, *, adapter: bool = False, name: str = "--megatron"
) -> Source:
    """Find a Megatron checkpoint, and what is needed beside it.

    megatron: its folder; a checkpoint of a run; or a run, for its newest one. config: HF folder with
    config.json and tokenizer, for a checkpoint written by Megatron-LM, or instead of that which a run's
    settings name. adapter: convert a LoRA run's adapters alone. name: option or argument, for messages.
    """
    kind = kind_of(megatron, name)
    if kind == "hf":
        raise UserError(
            f"{name}: {megatron} is a Hugging Face checkpoint already; there is nothing to convert"
        )
    metadata = CheckpointMetadata("", "", 1, 1)
    files: dict[str, dict[str, Any]] = {}
    lora: LoraSettings | None = None
    ends: list[int] = []
    if kind == "megatron":
        folder = whole = megatron_files.find_checkpoint(megatron)
        if (manifest := megatron_files.read_manifest(folder, *places_of(folder))) is not None:
            metadata, files = manifest
        if config is None and not files and not (folder / HF).is_dir():
            raise UserError(
                f"{folder}: has no {HF}/ with config.json and tokenizer, so it was not converted from an HF "
                "checkpoint by this tool; give an HF folder of the same model with --config (of rpg-megatron "
                "convert megatron-to-hf)"
            )
        source, root = config or folder / HF, config or megatron
    else:
        step = open_step(megatron, name)
        folder, whole, metadata = step.weights, step.folder, step.metadata
        files = {name: f for name, f in step.files.items() if name.startswith(f"{folder.name}/")}
        lora = find_lora(step)
        source, root = (config, config) if config else find_model_files(step, base=lora is not None)
        if (settings := find_settings(step)) is not None:
            ends = chat_ends(settings, source)
    try:
        shape = _read_shape(source, root)
    except UserError:
        if source.is_relative_to(whole):  # there may be further damage
            _refuse_damage(whole, files)
        raise
    layout: ModelMapping = mapping_for(shape)
    if lora is not None:
        if adapter:
            layout = AdapterMapping(shape, lora)
        else:
            hf_files.verify_hf_checkpoint(source, layout)
    elif adapter:
        raise UserError(f"--adapter: {megatron} is not a LoRA run or its checkpoint; leave out --adapter")
    return Source(shape, layout, metadata.dtype, source, root, folder, whole, files, lora, ends)


def convert_to_megatron(source: Source, out: Path, signals: StopSignals, *, verify: bool = False) -> str:
    """Write ``out`` as a Megatron checkpoint, including the files needed to train it and to convert it back.

    Returns what was done, as text. Raises UserError for user errors; RunFailed if, with ``verify``, logits
    differ or its process died; Interrupted after a signal. In these cases, no files are left.
    """
    from rpg_megatron.checkpoints.hf_export import changed_config, copy_untrained  # torch
    from rpg_megatron.commands.convert.convert import write_megatron

    with Staging(out, source.size, signals) as staging:
        folder = staging.result / megatron_files.RELEASE
        (folder / HF).mkdir(parents=True)
        staging.begin("converting", source.size)
        write_megatron(source, folder, staging.count)
        for name, file in hf_files.open_copied(source.config, source.root):
            copy_file(file, folder / HF, name, changed_config(name, file, source.dtype))
        copy_untrained(source.folder, folder / HF, source.shape)
        staging.begin("checksums", folder_size(folder))
        metadata = CheckpointMetadata(version("megatron-core"), source.dtype, 1, 1)
        megatron_files.write_manifest(folder, metadata, staging.count)
        atomic_write_text(staging.result / megatron_files.LATEST, megatron_files.RELEASE)
        return _finish(source, staging, folder, source.config, verify)


def convert_to_hf(
    source: Source,
    out: Path,
    signals: StopSignals,
    *,
    verify: bool = False,
    max_shard_bytes: int = 5 * 1024**3,
) -> str:
    """Write ``out`` as an HF checkpoint, in files of at most ``max_shard_bytes``, or as an adapter for PEFT.

    As ``convert_to_megatron``. Checks every file against the manifest first, if there is one.
    """
    from rpg_megatron.commands.convert.convert import write_hf  # torch

    with Staging(out, source.size, signals) as staging:
        if source.files:
            staging.begin("checking", sum(f["bytes"] for f in source.files.values()))
            _refuse_damage(source.whole, source.files, staging.count)
        staging.begin("converting", source.size)
        write_hf(source, staging.result, staging.count, max_shard_bytes)
        return _finish(source, staging, source.folder, staging.result, verify)


def _read_shape(folder: Path, root: Path) -> ModelShape:
    try:
        shape = read_model_shape(folder)
        refuse_remote_code(folder)
        hf_files.list_copied(folder, root)  # raises for files that cannot be copied
        return shape
    except UserError as e:
        raise UserError(str(e).removeprefix("model.path: ")) from None


def _refuse_damage(
    folder: Path, files: dict[str, dict[str, Any]], count: Callable[[int], None] = lambda n: None
) -> None:
    if damage := megatron_files.find_damage(folder, files, count, places_of(folder)):
        raise UserError(f"{folder}: the checkpoint is damaged; copy it again\n  " + "\n  ".join(damage))


def _finish(source: Source, staging: Staging, megatron: Path, hf: Path, verify: bool) -> str:
    """Verify on request, and move the result to its place; returns what was done."""
    from rpg_megatron.commands.convert.convert import verify_logits

    verified = ""
    if verify:
        staging.begin("verifying")
        staging.signals.raising = True
        verified = verify_logits(source, megatron, hf)
        staging.signals.raising = False
    staging.keep()
    # Not ru_maxrss, which includes the memory of the process that this one was forked from.
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) / 1e3
    return (
        f"{verified}{staging.out}: written in {time.monotonic() - staging.began:.1f} s; peak memory "
        f"{peak:,.0f} MB, for {source.size / 1e6:,.1f} MB of weights"
    )
