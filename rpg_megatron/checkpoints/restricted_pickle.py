"""Reads the pickles of a Megatron checkpoint without running code that they refer to.

A torch distributed checkpoint has two kinds of pickle: its index (``.metadata``), and objects stored beside
its tensors, such as FP8 scales and Megatron's metadata. Both can name any function of any module, which
Python's unpickler would call. Here, an index may name only the classes of an index, and objects only what
torch's ``weights_only`` loader and Megatron allow.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_regular

_TORCH = "torch.distributed.checkpoint"
_INDEX_CLASSES = frozenset(
    {
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("collections", "OrderedDict"),
        (f"{_TORCH}.filesystem", "_StorageInfo"),
        *(
            (f"{_TORCH}.metadata", name)
            for name in (
                *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
                *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
            )
        ),
        # Written by earlier versions of torch.
        ("torch.distributed._shard.sharded_tensor.metadata", "TensorProperties"),
        ("torch.distributed._shard.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    }
)
_WEIGHTS_ONLY, _NOT_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


_optimizers: list[type] = [torch.optim.AdamW]


def allow_optimizers(*classes: type) -> None:
    """Also allow these classes in checkpoints.

    An optimizer with state in host memory writes the classes of its parts into its checkpoints.
    """
    _optimizers.extend(classes)


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")


def read_index(file: Path) -> Metadata:
    """The index of a torch distributed checkpoint, from its file.

    Raises UserError if it is missing or damaged, or refers to other than the classes of an index, or to files
    outside the folder.
    """
    try:
        with open_regular(file) as f:
            found = _IndexUnpickler(f).load()
        if not isinstance(found, Metadata) or not isinstance(found.storage_data, dict):
            raise ValueError("not an index of tensors")
        for info in found.storage_data.values():
            if not isinstance(info, _StorageInfo) or info.transform_descriptors:
                raise ValueError("not an index of tensors")
            path = PurePosixPath(info.relative_path)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"{str(path)!r} is outside the checkpoint's folder")
    except pickle.UnpicklingError as e:
        raise _refuse(file, e) from None
    except Exception as e:  # a damaged pickle can raise any exception
        raise UserError(
            f"{file}: not readable ({type(e).__name__}: {str(e)[:300]}); copy the checkpoint again"
        ) from None
    return found


@contextmanager
def restricted_loading(folder: Path) -> Iterator[None]:
    """Within the block, torch and Megatron read checkpoints with the restrictions of this module.

    Not thread-safe. Raises UserError if an object of a checkpoint is not allowed; the message names
    ``folder``.
    """
    from megatron.core.safe_globals import SAFE_GLOBALS

    def read_metadata(reader: Any, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(reader._get_metadata_path()))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = reader.load_id
        return metadata

    unrestricted = FileSystemReader.read_metadata
    environment = {name: os.environ.pop(name, None) for name in (_WEIGHTS_ONLY, _NOT_WEIGHTS_ONLY)}
    FileSystemReader.read_metadata = read_metadata  # type: ignore[method-assign,assignment]
    # Torch reads objects with weights_only=False; this variable overrides it.
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        with torch.serialization.safe_globals([*SAFE_GLOBALS, *_optimizers]):
            yield
    except pickle.UnpicklingError as e:
        raise _refuse(folder, e) from None
    except CheckpointException as e:
        for error in (failure[0] for failure in e.failures.values()):
            if isinstance(error, UserError):
                raise error from None
            if isinstance(error, pickle.UnpicklingError):
                raise _refuse(folder, error) from None
        raise
    finally:
        FileSystemReader.read_metadata = unrestricted  # type: ignore[method-assign]
        os.environ.pop(_WEIGHTS_ONLY)
        os.environ.update({name: value for name, value in environment.items() if value is not None})


def check_extra_states(state: Mapping[str, Any]) -> None:
    """Check a module's extra states: byte tensors with a pickle, which Transformer Engine would read as is.

    state: the module's state dict. Call it within ``restricted_loading``. Raises pickle.UnpicklingError.
    """
    from megatron.core.safe_globals import SafeUnpickler

    for name, value in state.items():
        if name.endswith("_extra_state") and isinstance(value, torch.Tensor) and value.numel():
            SafeUnpickler(io.BytesIO(value.detach().cpu().numpy().tobytes())).load()


def _refuse(where: Path, error: pickle.UnpicklingError) -> UserError:
    named = re.search(r"(?:GLOBAL |global: GLOBAL |class ')([\w.]+)", str(error))
    if named is None:
        why = next(iter(str(error).splitlines()), "")[:300]
        return UserError(f"{where}: not readable (UnpicklingError: {why}); copy the checkpoint again")
    return UserError(
        f"{where}: refers to {named[1]}, which no checkpoint needs and which could run code; it was not run; "
        "do not use this checkpoint"
    )
