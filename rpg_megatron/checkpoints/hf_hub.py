"""A model named by its id on the Hugging Face hub, such as ``Qwen/Qwen3-4B-Base``, as a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rpg_megatron.checkpoints.hf_files import CONFIGURATION
from rpg_megatron.config import Settings, UserError
from rpg_megatron.config.policy import is_hub_id

_WEIGHTS = "*.safetensors"


def with_local_model(settings: Settings, *, weights: bool = True) -> Settings:
    """The settings with ``model.path`` as a folder: if it is a hub id, its files are downloaded first.

    They go to the hub's cache, from where a second call takes them, without a network too. weights: False:
    configuration and tokenizer only. Raises UserError if the hub has no such model or cannot be reached.
    """
    model = settings.model
    if not is_hub_id(model.path) or model.path.exists():
        return settings
    path = download(str(model.path), model.revision, weights=weights)
    return settings.model_copy(update={"model": model.model_copy(update={"path": path})})


def download(
    name: str, revision: str | None = None, *, weights: bool = True, key: str = "model.path"
) -> Path:
    """Folder of the model's files in the hub's cache. key: what named the model, for messages."""
    from huggingface_hub import constants, errors, snapshot_download

    patterns = [*CONFIGURATION, _WEIGHTS] if weights else list(CONFIGURATION)
    # Files at the top: folders hold other formats of the same weights, such as original/.
    arguments: dict[str, Any] = {"allow_patterns": patterns, "ignore_patterns": "*/*", "revision": revision}
    wanted = f"{key}: {name} is not a folder"
    local = f"download it where there is a network (hf download {name}), or give a folder"
    try:
        return Path(snapshot_download(name, **arguments))
    except errors.GatedRepoError:
        reason = "the hub requires that you accept its conditions, on its page; then log in (hf auth login)"
    except errors.RevisionNotFoundError:
        raise UserError(
            f"model.revision: the hub has no {revision!r} of {name}; give a branch, tag or commit"
        ) from None
    except errors.RepositoryNotFoundError:
        reason = "the hub shows no model of this name; check the spelling, or log in (hf auth login)"
    except errors.IncompleteSnapshotError:
        reason = f"the hub's cache holds only a part of it and the hub cannot be reached; {local}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        reason = f"the hub's cache does not hold it and {state}; {local}"
    except Exception as e:  # the download was cut off, no space left, ...
        lines = str(e).strip().splitlines()
        reason = f"the download failed ({type(e).__name__}: {(lines or [''])[0][:200]}); {local}"
    raise UserError(f"{wanted}, and {reason}")
