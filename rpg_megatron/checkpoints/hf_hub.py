"""Finds the folder of the model that settings name, which may be on the Hugging Face hub, such as
``Qwen/Qwen3-4B-Base``, or in a Megatron checkpoint.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_files import CONFIG, CONFIGURATION
from rpg_megatron.checkpoints.megatron_folder import HF, find_checkpoint, is_megatron
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.errors import first_line
from rpg_megatron.config.policy import ModelSettings, is_hub_id

_WEIGHTS = "*.safetensors"


def with_local_model(settings: Settings, *, weights: bool = True, hub: bool = True) -> Settings:
    """The settings with ``model.path`` and ``teacher.path`` as local folders with config.json and tokenizer.

    Hub ids are downloaded, unless ``hub`` is False. The files are in the hub's cache, so later calls work
    without network access. weights: whether to download the weights too. A Megatron checkpoint becomes its
    ``hf``, which readers of weights know (``megatron_folder.weights_of``). Raises UserError if the hub has no
    such model or cannot be reached, or if there is no ``hf``.
    """
    update: dict[str, Any] = {}
    for key in ("model", "teacher"):
        section = getattr(settings, key)
        path = None if section is None else section.path
        if path is None:
            continue
        if hub and is_hub_id(path) and not path.exists():
            path = download(
                str(path),
                section.revision if isinstance(section, ModelSettings) else None,
                weights=weights,
                key=f"{key}.path",
            )
        elif is_megatron(path):
            path = find_checkpoint(path) / HF
            if not (path / CONFIG).is_file():
                raise UserError(
                    f"{key}.path: {path.parent} has no {HF}/ with config.json and tokenizer; copy them there "
                    "from an HF folder of the same model, or convert it with rpg-megatron convert "
                    "megatron-to-hf"
                )
        if path != section.path:
            update[key] = section.model_copy(update={"path": path})
    return settings.model_copy(update=update) if update else settings


def download(
    name: str, revision: str | None = None, *, weights: bool = True, key: str = "model.path"
) -> Path:
    """Download a model; returns its folder in the hub's cache. key: setting or argument, for messages."""
    from huggingface_hub import constants, errors, snapshot_download

    patterns = [*CONFIGURATION, _WEIGHTS] if weights else list(CONFIGURATION)
    # Top-level files only: subfolders such as original/ have the same weights in other formats.
    arguments: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": "*/*", "revision": revision}
    problem = f"{key}: {name} is not a folder"
    local = f"download it on a machine with network access (hf download {name}), or give a folder"
    try:
        return Path(snapshot_download(name, **arguments))
    except errors.GatedRepoError:
        reason = "you must accept its conditions on its hub page; then log in (hf auth login)"
    except errors.RevisionNotFoundError:
        raise UserError(
            f"model.revision: {name} has no revision {revision!r} on the hub; give a branch, tag or commit"
        ) from None
    except errors.RepositoryNotFoundError:
        reason = "the hub has no visible model of this name; check the spelling, or log in (hf auth login)"
    except errors.IncompleteSnapshotError:
        reason = f"the hub's cache has only some of its files and the hub cannot be reached; {local}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        reason = f"the hub's cache does not contain it and {state}; {local}"
    except Exception as e:  # interrupted download, no space left, ...
        reason = f"the download failed ({type(e).__name__}: {first_line(e)}); {local}"
    raise UserError(f"{problem}, and {reason}")
