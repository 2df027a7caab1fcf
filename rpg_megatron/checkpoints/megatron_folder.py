"""The folder of a Megatron checkpoint: finds it, lists its tensors, and verifies its files by a manifest.

    DIR/latest_checkpointed_iteration.txt    "release", or an iteration's number: Megatron-LM's convention
    DIR/release/                             one checkpoint in Megatron-Core's torch_dist format
        .metadata, metadata.json, *.distcp   Megatron-Core's own files
        hf/                                  config.json, tokenizer, generation settings, for the export to HF
        manifest.json                        every file with its size and SHA-256; written last

Verifying a checkpoint and listing its tensors needs neither Megatron nor torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from rpg_megatron.config.errors import UserError, shorten
from rpg_megatron.config.files import open_own, open_regular, places_of, read_json, read_text, real_path
from rpg_megatron.models.lora import is_adapter
from rpg_megatron.system.dtypes import WEIGHT_DTYPES
from rpg_megatron.system.terminal import one_line

if TYPE_CHECKING:
    from rpg_megatron.checkpoints.index import Index, Tensor

LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"
HF = "hf"
MANIFEST = "manifest.json"
MEGATRON = "metadata.json"
"""A file in every Megatron-Core checkpoint, by which one is recognised."""
CONTENT = {
    # A key for each layer: Megatron will drop the alternative, one tensor over all layers.
    "non_homogeneous_layers": True,
    "singleton_local_shards": False,
    # The default cannot be saved at all; this one can be read in any layout.
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}
"""How keys are formed. Megatron stores it in the checkpoint, for readers to form the same keys."""
_FORMAT = 1
_CHUNK = 1 << 22
_LONGEST_TRACKER = 80
"""Bytes of ``LATEST``."""


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
    if (outer := weights_of(path)) is not None:
        return outer
    tracker = path / LATEST
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; give the folder of a Megatron checkpoint")
    try:
        latest = read_text(tracker, *places_of(path), limit=_LONGEST_TRACKER).strip()
    except (OSError, UnicodeDecodeError):
        raise UserError(
            f"{path}: holds neither {MEGATRON} nor {LATEST}; give the folder of a Megatron checkpoint in the "
            "torch_dist format"
        ) from None
    folder = path / (f"iter_{int(latest):07d}" if latest.isdecimal() else RELEASE)
    if not latest.isdecimal() and latest != RELEASE:
        raise UserError(f"{tracker}: contains neither a number nor {RELEASE}; copy the checkpoint again")
    if not (folder / MEGATRON).is_file():
        raise UserError(
            f"{folder / MEGATRON} is missing, though {LATEST} names this checkpoint; copy it again (formats "
            "other than torch_dist have no such file and cannot be read)"
        )
    if not (real := real_path(folder)).is_relative_to(real_path(path)):
        raise UserError(f"{folder}: leads to {real}, outside {path}; give that folder itself")
    return folder


def is_megatron(path: Path) -> bool:
    """Whether a folder is a Megatron checkpoint, contains some, or is the ``hf`` of one."""
    return (path / MEGATRON).is_file() or (path / LATEST).is_file() or weights_of(path) is not None


def weights_of(model: Path) -> Path | None:
    """The Megatron checkpoint with the weights of a model's folder; None: they are in that folder itself.

    The former is the ``hf`` folder of a checkpoint, with config.json and tokenizer. A model's folder is the
    only thing that names it in the settings, once ``hf_hub.with_local_model`` has found it.
    """
    outer = model.absolute().parent
    if model.name != HF or not (outer / MEGATRON).is_file() or any(model.glob("*.safetensors*")):
        return None
    return outer


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
    for name, expected in files.items():
        size = (folder / name).stat().st_size
        if size != expected["bytes"]:
            raise OSError(
                f"{folder / name} has {size} bytes here, and {expected['bytes']} where it was written"
            )
    names = {str(f.relative_to(folder)) for f in folder.rglob("*") if f.is_file()}
    files |= hash_files(folder, sorted(names - files.keys()), count)
    text = json.dumps({"format": _FORMAT, **asdict(metadata), "files": dict(sorted(files.items()))}, indent=2)
    with open_own(folder / MANIFEST, "w", encoding="utf-8") as f:
        f.write(text + "\n")
        f.flush()
        os.fsync(f.fileno())


def read_manifest(folder: Path, *inside: Path) -> tuple[CheckpointMetadata, dict[str, dict[str, Any]]] | None:
    """Metadata and files (name -> bytes, sha256); None without a manifest, as in Megatron-LM's checkpoints.

    inside: where the manifest must lie (see ``open_regular``). Raises UserError if the manifest is invalid.
    """
    file = folder / MANIFEST
    try:
        raw = read_json(file, *inside)
        if raw["format"] != _FORMAT:
            version = shorten(repr(raw["format"]))
            raise UserError(f"{file}: format {version}, this version reads {_FORMAT}; update the package")
        metadata = CheckpointMetadata(
            **{name: _typed(raw, name, kind) for name, kind in get_type_hints(CheckpointMetadata).items()}
        )
        if metadata.dtype not in WEIGHT_DTYPES:
            raise ValueError(f"dtype {shorten(metadata.dtype)}")
        if not raw["files"]:
            raise ValueError("it lists no files")
        if outside := [name for name in raw["files"] if Path(name).is_absolute() or ".." in Path(name).parts]:
            raise ValueError(f"{outside[0]!r} is outside the checkpoint's folder")
        return metadata, {
            str(n): {"bytes": int(f["bytes"]), "sha256": str(f["sha256"])} for n, f in raw["files"].items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as e:
        why = e.strerror if isinstance(e, OSError) else f"{type(e).__name__}: {shorten(str(e))}"
        raise UserError(f"{file}: not readable ({why}); copy the checkpoint again") from None


def _typed(raw: dict[str, Any], name: str, kind: type) -> Any:
    if type(raw[name]) is not kind:
        raise TypeError(f"{name} is {shorten(repr(raw[name]))}")
    return raw[name]


def find_damage(
    folder: Path,
    files: dict[str, dict[str, Any]],
    count: Callable[[int], None] = lambda n: None,
    inside: Sequence[Path] = (),
) -> list[str]:
    """Compare all files with the manifest; returns one line for each missing or damaged file.

    Reads every byte. count: called with the number of bytes read, from several threads. inside: where the
    files must lie (see ``open_regular``).
    """
    problems, whole = [], []
    for name, expected in files.items():
        size = _size_of(folder / name, inside)
        if isinstance(size, str):
            problems.append(f"{one_line(name)} {size}")
        elif size != expected["bytes"]:
            problems.append(f"{one_line(name)} has {size} bytes, not {expected['bytes']}")
        else:
            whole.append(name)
    for name, digest in _hash_all(folder, whole, count, inside):
        if digest != files[name]["sha256"]:
            problems.append(f"{one_line(name)} does not have the contents that were written")
    return problems


def _size_of(file: Path, inside: Sequence[Path] = ()) -> int | str:
    """Size of a file in bytes, or what is wrong with it."""
    try:
        with open_regular(file, *inside) as f:
            return os.fstat(f.fileno()).st_size
    except FileNotFoundError:
        return "is missing"
    except (OSError, ValueError) as e:  # ValueError: a name that no file can have
        return f"cannot be read ({getattr(e, 'strerror', None) or e})"


def _hash_all(
    folder: Path, names: Iterable[str], count: Callable[[int], None], inside: Sequence[Path] = ()
) -> list[tuple[str, str]]:
    names = list(names)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashlib releases the GIL
        return list(zip(names, pool.map(lambda n: _sha256(folder / n, count, inside), names), strict=True))


def _sha256(file: Path, count: Callable[[int], None], inside: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    with open_regular(file, *inside) as f:
        while chunk := f.read(_CHUNK):
            digest.update(chunk)
            count(len(chunk))
    return digest.hexdigest()


def check_tensors(
    folder: Path,
    stored: Mapping[str, Tensor],
    expected: Mapping[str, tuple[tuple[int, ...], bool]],
    vocab: int,
) -> None:
    """Compare the weights of a checkpoint with those of a model: key -> shape, and whether it has padding.

    The number of padding rows of a vocabulary of ``vocab`` may differ. Raises one UserError that lists
    missing, unexpected and wrongly shaped tensors.
    """
    adapters = any(map(is_adapter, stored))
    if adapters != any(map(is_adapter, expected)):
        raise UserError(
            f"{folder}: holds "
            + (
                "the adapters of a LoRA run, without its model; give the run's checkpoint, with its settings"
                if adapters
                else "a whole model, and the settings train adapters (lora); set lora to null"
            )
        )
    problems = [f"missing: {n}" for n in expected if n not in stored]
    problems += [f"unexpected: {n}" for n in stored if n not in expected]
    problems += [
        f"wrong shape: {n} is {list(stored[n].shape)}, not {list(shape)}"
        for n, (shape, padded) in expected.items()
        if n in stored and not _fits(stored[n].shape, shape, vocab if padded else None)
    ]
    if problems:
        more = f"\n  and {len(problems) - 40} more" if len(problems) > 40 else ""
        raise UserError(
            f"{folder}: the tensors do not match the model that its config.json describes\n "
            + "\n  ".join(problems[:40])
            + more
        )


def _fits(stored: tuple[int, ...], expected: tuple[int, ...], vocab: int | None) -> bool:
    """Whether a stored tensor can be loaded; the number of vocabulary padding rows may differ."""
    return stored == expected if vocab is None else stored[1:] == expected[1:] and stored[0] >= vocab


def find_short_files(folder: Path, index: Index) -> list[str]:
    """One line for each file that the index needs and that is missing or truncated."""
    problems, inside = [], places_of(folder)
    for name, end in sorted(index.ends.items()):
        size = _size_of(folder / name, inside)
        if isinstance(size, str):
            problems.append(f"{one_line(name)} {size}")
        elif size < end:
            problems.append(f"{one_line(name)} has {size} bytes, the index needs {end}")
    return problems
