"""Which checkpoint a folder is that a user has named: the same answer for all commands.

    "hf"         config.json, *.safetensors
    "megatron"   metadata.json, or a tracker file beside iter_NNNNNNN or release
    "step"       a checkpoint of a run: state.json, config.yaml, model/, manifest.json
    "run"        a run's folder, which stands for its newest complete step

The folder may have been made by others: no link of a step may leave the folder that the user has named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import ValidationError

from rpg_megatron.checkpoints import hf_files
from rpg_megatron.checkpoints.megatron_folder import MEGATRON, CheckpointMetadata, is_megatron
from rpg_megatron.checkpoints.peft import ADAPTER_CONFIG
from rpg_megatron.checkpoints.run_folder import (
    ANCHOR,
    CHECKPOINTS,
    CONFIG,
    MODEL,
    STATE,
    list_folders,
    list_steps,
    read_step,
)
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.errors import shorten
from rpg_megatron.config.files import real_path
from rpg_megatron.config.lora import LoraSettings
from rpg_megatron.config.parsing import read_yaml

Kind = Literal["hf", "megatron", "step", "run"]
EXPORTS = "hf"
"""Folder of a run with its exports, ``step_NNNNNN``."""
_GIVE_CONFIG = (
    "give the model's config.json and tokenizer with rpg-megatron convert megatron-to-hf --config DIR"
)
_GIVE_BASE = "give the model that it was trained on with rpg-megatron convert megatron-to-hf --config DIR"


@dataclass(frozen=True)
class Step:
    """A complete checkpoint of a run; its files were not compared with their checksums."""

    folder: Path
    weights: Path
    """Megatron's folder in it: ``model``, or ``anchor`` if the user has named that."""
    root: Path
    """The folder that the user has named, or the step of a named ``model`` or ``anchor``."""
    metadata: CheckpointMetadata
    files: dict[str, dict[str, Any]]
    """From the manifest: name -> bytes, sha256."""

    @property
    def run(self) -> Path:
        """Folder of the run; it need not exist if the step was copied alone."""
        return self.folder.absolute().parents[1]


def kind_of(path: Path, name: str) -> Kind:
    """What kind of checkpoint a folder is. name: option or argument, for messages.

    Raises UserError if it is none.
    """
    try:
        if not path.is_dir():
            state = "is a file" if path.is_file() else "does not exist"
            raise UserError(
                f"{name}: {path} {state}; give the folder of a checkpoint or run, or the name of a run"
            )
        if (path / STATE).is_file() or (path / MODEL / MEGATRON).is_file():
            return "step"
        if is_megatron(path):
            return "step" if _is_part(path) else "megatron"
        if (path / hf_files.CONFIG).is_file():
            return "hf"
        if (path / CHECKPOINTS).is_dir() or (path / CONFIG).is_file():
            return "run"
        raise UserError(f"{name}: {path} {_describe(path)}")
    except OSError as e:
        raise UserError(f"{name}: {e.filename or path} cannot be read ({e.strerror})") from None


def open_step(path: Path, name: str) -> Step:
    """The checkpoint that a folder of kind "step" or "run" means. name: as in ``kind_of``.

    Raises UserError if it is not complete, or if the run has none.
    """
    folder, weights, root = path, MODEL, path
    if kind_of(path, name) == "run":
        newest = next(iter(list_steps(path).values()), None)
        if newest is None:
            unfinished = (
                f"; {len(incomplete)} are incomplete" if (incomplete := list_folders(path)) else " yet"
            )
            raise UserError(
                f"{name}: the run {path} has no complete checkpoint in {CHECKPOINTS}/{unfinished}"
            )
        folder = newest
    elif _is_part(path):
        folder = root = whole_step(path)
        weights = path.absolute().name
    try:
        metadata, files = read_step(folder, root)
    except UserError as e:
        others = [str(f) for f in list_steps(folder.absolute().parents[1]).values() if f != folder.absolute()]
        other = f", such as {others[0]}" if others else ""
        raise UserError(
            f"{name}: {folder} is not a complete checkpoint of a run: {e}; choose another{other}, or copy it "
            "again"
        ) from None
    return Step(folder, folder / weights, root, metadata, files)


def find_lora(step: Step) -> LoraSettings | None:
    """The settings of a step's adapters, if it is one of a LoRA run; it then has no other weights.

    Only this section of the step's settings is read and checked. Raises UserError if it is not valid.
    """
    try:
        section = read_yaml(step.folder / CONFIG, real_path(step.root)).get("lora")
        return None if section is None else LoraSettings.model_validate(section)
    except ValidationError as e:
        first = e.errors(include_url=False)[0]
        key = ".".join(["lora", *map(str, first["loc"])])
        raise UserError(
            f"{step.folder / CONFIG}: {shorten(key, 100)}: {shorten(first['msg'], 200)}"
        ) from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):
        return None  # with --config, whole weights are converted without the settings


def find_settings(step: Step) -> Settings | None:
    """The settings of a step; None if they are not those of this version. No code that they name is run."""
    try:
        return Settings.model_validate(read_yaml(step.folder / CONFIG, real_path(step.root)))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError, UserError):
        return None


def find_model_files(step: Step, *, base: bool = False) -> tuple[Path, Path]:
    """Folder with config.json and tokenizer of a step's model, and the folder that they must lie in.

    That is ``model.path`` of the step's settings or, if it is not on this machine, an export of the run.
    base: only the former, for its weights: adapters are merged in an export.
    Raises UserError if there is neither. The settings are not checked: only this key is read.
    """
    file, give = step.folder / CONFIG, _GIVE_BASE if base else _GIVE_CONFIG
    try:
        model = Path(read_yaml(file, real_path(step.root))["model"]["path"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError) as e:
        raise UserError(f"{file}: has no model.path ({shorten(str(e), 200)}); {give}") from None
    if model.is_absolute() and (model / hf_files.CONFIG).is_file():
        return model, model
    if not base and (exports := list_exports(step.run)):
        return exports[-1], step.run
    raise UserError(
        f"{file}: model.path is {shorten(str(model), 200)}, which has no {hf_files.CONFIG} here; {give}"
    )


def list_exports(run: Path) -> list[Path]:
    """The Hugging Face checkpoints that a run has exported, the newest last."""
    return sorted(p for p in (run / EXPORTS).glob("step_*") if (p / hf_files.CONFIG).is_file())


def whole_step(path: Path) -> Path:
    """The checkpoint of a run if ``path`` is its ``model`` or ``anchor``, else ``path``."""
    return path.absolute().parent if _is_part(path) else path


def _is_part(path: Path) -> bool:
    """Whether a folder is the ``model`` or ``anchor`` of a run's checkpoint."""
    whole = path.absolute()
    return whole.name in (MODEL, ANCHOR) and (whole.parent / STATE).is_file()


def _describe(path: Path) -> str:
    """What a folder without a checkpoint holds, and what to give instead."""
    if (path / ADAPTER_CONFIG).is_file():
        return "is an adapter without its model; give a merged checkpoint, such as hf/step_NNNNNN of its run"
    inside = sorted(p for p in path.iterdir() if p.is_dir())
    if steps := [p for p in inside if (p / STATE).is_file()]:
        return f"holds the checkpoints of a run; give one of them, such as {steps[-1]}"
    if runs := [p for p in inside if (p / CHECKPOINTS).is_dir() or (p / CONFIG).is_file()]:
        return f"holds runs; give one of them, such as {runs[-1]}"
    if exports := [p for p in inside if (p / hf_files.CONFIG).is_file()]:
        return (
            f"has no config.json, but holds Hugging Face checkpoints; give one of them, such as {exports[-1]}"
        )
    return "has no config.json, and is not a Megatron checkpoint, a run or a checkpoint of a run"
