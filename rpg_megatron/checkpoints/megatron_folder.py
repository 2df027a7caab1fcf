"""The folder of a Megatron checkpoint: finds it, lists its tensors, and verifies its files by a manifest.

    DIR/latest_checkpointed_iteration.txt    "release", or an iteration's number: Megatron-LM's convention
    DIR/release/                             one checkpoint in Megatron-Core's torch_dist format
        .metadata, metadata.json, *.distcp   Megatron-Core's own files
        hf/                                  config.json, tokenizer, generation settings, for the export to HF
        manifest.json                        every file with its size and SHA-256; written last

Verifying a checkpoint needs neither Megatron nor torch; listing its tensors needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rpg_megatron.config.errors import UserError
from rpg_megatron.config.files import open_regular, read_json, read_text
from rpg_megatron.system.dtypes import dtype_name

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF = "hf"
MANIFEST = "manifest.json"
MEGATRON = "metadata.json"
"""A file in every Megatron-Core checkpoint, by which one is recognised."""
INDEX = ".metadata"
"""The index of torch's distributed checkpoints, a pickle."""
_FORMAT = 1
_CHUNK = 1 << 22


@dataclass(frozen=True)
class CheckpointMetadata:
    """A manifest's content besides the list of files."""

    megatron_core: str
    """Version of Megatron-Core that wrote the checkpoint."""
    dtype: str
    """Of the weights: float32, bfloat16 or float16."""
    tensor: int
    """Tensor-parallel size that wrote the checkpoint; it can be loaded at any size."""
    pipeline: int


def find_checkpoint(path: Path) -> Path:
    """The folder with Megatron's ``metadata.json``: ``path`` itself, or the one its tracker file names.

    Raises UserError if there is none.
    """
    if (path / MEGATRON).is_file():
        return path
    tracker = path / LATEST
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give the folder of a Megatron checkpoint")
    try:
        latest = read_text(tracker).strip()[:80]
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{path}: holds neither {MEGATRON} nor {LATEST}; give the folder of a Megatron checkpoint in the "
            "torch_dist format"
        ) from None
    folder = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else RELEASE)
    if not latest.isdecimal() and latest != RELEASE:
        raise UserError(
            f"{tracker}: contains {latest!r}, neither a number nor {RELEASE}; copy the checkpoint again"
        )
    if not (folder / MEGATRON).is_file():
        raise UserError(
            f"{folder / MEGATRON} is missing, though {LATEST} names this checkpoint; copy it again (formats "
            "other than torch_dist have no such file and cannot be read)"
        )
    return folder


def is_megatron(path: Path) -> bool:
    """Whether a folder is a Megatron checkpoint, or contains some."""
    return (path / MEGATRON).is_file() or (path / LATEST).is_file()


def hash_files(
    folder: Path, names: Iterable[str], count: Callable[[int], None] = lambda n: None
) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of files of a checkpoint, as in its manifest. ``count``: see ``write_manifest``."""
    sums = _hash_all(folder, names, count)
    return {name: {"bytes": (folder / name).stat().st_size, "sha256": digest} for name, digest in sums}


def write_manifest(
    folder: Path,
    metadata: CheckpointMetadata,
    count: Callable[[int], None] = lambda n: None,
    known: Mapping[str, dict[str, Any]] | None = None,
) -> None:
    """Write ``manifest.json`` with the size and SHA-256 of every file; the last file of a checkpoint.

    count: called with the number of bytes read, from several threads. known: entries of files that their
    writers have hashed already; these files are not read.
    Raises OSError if a known file is missing or has another size.
    """
    files = dict(known or {})
    for name, wanted in files.items():
        size = (folder / name).stat().st_size
        if size != wanted["bytes"]:
            raise OSError(
                f"{folder / name} has {size} bytes here, and {wanted['bytes']} where it was written"
            )
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    files |= hash_files(folder, sorted(names - files.keys()), count)
    text = json.dumps({"format": _FORMAT, **asdict(metadata), "files": dict(sorted(files.items()))}, indent=2)
    with (folder / MANIFEST).open("w", encoding="utf-8") as f:
        f.write(text + "\n")
        f.flush()
        os.fsync(f.fileno())


def read_manifest(folder: Path) -> tuple[CheckpointMetadata, dict[str, dict[str, Any]]] | None:
    """Metadata and files (name -> bytes, sha256); None without a manifest, as in Megatron-LM's checkpoints.

    Raises UserError if the manifest is invalid.
    """
    file = folder / MANIFEST
    try:
        raw = read_json(file)
        if raw["format"] != _FORMAT:
            raise UserError(
                f"{file}: format {raw['format']}, this version reads {_FORMAT}; update the package"
            )
        metadata = CheckpointMetadata(**{name: raw[name] for name in CheckpointMetadata.__dataclass_fields__})
        if not raw["files"]:
            raise ValueError("it lists no files")
        if outside := [name for name in raw["files"] if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{outside[0]!r} is outside the checkpoint's folder")
        return metadata, {
            str(n): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for n, f in raw["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(
            f"{file}: not readable ({type(e).__name__}: {e}); copy the checkpoint again"
        ) from None


def find_damage(
    folder: Path, files: dict[str, dict[str, Any]], count: Callable[[int], None] = lambda n: None
) -> list[str]:
    """Compare all files with the manifest; returns one line for each missing or damaged file.

    Reads every byte. count: called with the number of bytes read, from several threads.
    """
    problems, whole = [], []
    for name, wanted in files.items():
        size = _size_of(folder / name)
        if isinstance(size, str):
            problems.append(f"{name} {size}")
        elif size != wanted["bytes"]:
            problems.append(f"{name} has {size} bytes, not {wanted['bytes']}")
        else:
            whole.append(name)
    for name, digest in _hash_all(folder, whole, count):
        if digest != files[name]["sha256"]:
            problems.append(f"{name} does not have the contents that were written")
    return problems


def _size_of(file: Path) -> int | str:
    """Size of a file in bytes, or what is wrong with it."""
    try:
        with open_regular(file) as f:
            return os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        return "is missing"
    except OSError as e:
        return f"cannot be read ({e.strerror})"


def _hash_all(folder: Path, names: Iterable[str], count: Callable[[int], None]) -> list[tuple[str, str]]:
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        return list(zip(names, pool.map(lambda n: _sha256(folder / n, count), names), strict=True))


def _sha256(file: Path, count: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    with open_regular(file) as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            count(len(chunk))
    return digest.hexdigest()


@dataclass(frozen=True)
class StoredWeight:
    """One tensor of a Megatron checkpoint, stored in one file or several."""

    dtype: str
    """As torch names it, without ``torch.``."""
    shape: tuple[int, ...]
    """Shape of the full tensor, independent of the layout that wrote it."""
    parts: int
    """Number of pieces that it is stored in."""


@dataclass(frozen=True)
class Contents:
    """Content of a checkpoint according to its index."""

    tensors: dict[str, StoredWeight]
    """Megatron's key -> tensor, optimizer state included."""
    objects: frozenset[str]
    """Megatron's keys of objects that are not tensors, such as FP8 scales."""
    ends: dict[str, int]
    """File -> minimum size in bytes."""

    @property
    def weights(self) -> dict[str, StoredWeight]:
        """The model's tensors, without optimizer state."""
        return {n: t for n, t in self.tensors.items() if not n.startswith(("optimizer.", "chained_"))}


def read_contents(folder: Path) -> Contents:
    """Read the index. Imports torch. Raises UserError if it is missing or invalid."""
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    from rpg_megatron.checkpoints.restricted_pickle import read_index

    metadata = read_index(folder / INDEX)
    try:
        tensors = {
            name: StoredWeight(dtype_name(t.properties.dtype), tuple(t.size), len(t.chunks))
            for name, t in metadata.state_dict_metadata.items()
            if isinstance(t, TensorStorageMetadata)
        }
        objects = frozenset(metadata.state_dict_metadata) - frozenset(tensors)
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    except (TypeError, AttributeError, ValueError) as e:
        raise UserError(
            f"{folder / INDEX}: not readable ({type(e).__name__}: {e}); copy the checkpoint again"
        ) from None
    return Contents(tensors, objects, ends)


def find_short_files(folder: Path, contents: Contents) -> list[str]:
    """One line for each file that the index needs and that is missing or truncated."""
    problems = []
    for name, end in sorted(contents.ends.items()):
        size = _size_of(folder / name)
        if isinstance(size, str):
            problems.append(f"{name} {size}")
        elif size < end:
            problems.append(f"{name} has {size} bytes, the index needs {end}")
    return problems
